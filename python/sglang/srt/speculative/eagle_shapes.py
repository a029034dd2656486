"""What an EAGLE draft worker keeps for each shape of trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.draft_slots import has_draft_region
from sglang.srt.configs.draft_layout import BranchLayout
from sglang.srt.draft_trees.workspace import EagleWorkspace

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.kv_canary.draft_state import DraftState
    from sglang.srt.layers.attention.base_attn_backend import DraftDecodeBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape:
    """What belongs to one shape of trees.

    Fields:
        layout: of the branches.
        workspace: tensors of an iteration.
        attention: of the draft phase.
        state_check: of what an iteration hands on; None if the KV canary is off.
    """

    shape: TreeShape
    layout: BranchLayout
    workspace: EagleWorkspace
    attention: DraftDecodeBackend
    state_check: DraftState | None

    @classmethod
    def create(
        cls,
        shape: TreeShape,
        *,
        runner: ModelRunner,
        server_args: ServerArgs,
        hidden_states: Tensor | None,
        state_check: DraftState | None,
    ) -> EagleShape:
        """Allocate what a shape needs beside `hidden_states`, which shapes share.

        Args:
            runner: of the draft model; has its pools.
        """
        pool = runner.req_to_token_pool
        has_region = shape.topk > 1 and has_draft_region(server_args)
        layout = BranchLayout(
            page_size=runner.page_size,
            topk=shape.topk,
            num_steps=shape.num_steps,
            region=pool.row_width if has_region else None,
        )
        return cls(
            shape=shape,
            layout=layout,
            workspace=EagleWorkspace(
                shape=shape,
                layout=layout,
                draft_lead=server_args.draft_lead,
                req_to_token_pool=pool,
                max_rows=pool.size,
                hidden_states=hidden_states,
            ),
            attention=runner.attn_backend.draft_decode(layout, max_requests=pool.size),
            state_check=state_check,
        )
