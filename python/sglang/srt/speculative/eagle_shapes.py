"""What an EAGLE draft worker keeps for each shape of trees, and what lets its KV pause:
the target's hidden states at tokens that plain steps computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.arg_groups.draft_slots import has_draft_region
from sglang.srt.configs.draft_layout import CATCH_UP_TOKENS, BranchLayout
from sglang.srt.draft_trees.workspace import EagleWorkspace

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.kv_canary.draft_state import DraftState
    from sglang.srt.layers.attention.base_attn_backend import DraftDecodeBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import (
        EAGLEDraftCudaGraphRunner,
    )
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

PLAIN_STATES_BYTES = 128 << 20
"""Memory for hidden states of plain steps, if `CATCH_UP_TOKENS` a request fit."""
MAX_BEHIND = 512
"""Most tokens that a draft's KV may lack. What it lacks at a request's end is not
cached."""


def most_behind(*, rows: int, bytes_per_token: int) -> int:
    """Return how many tokens of a request the draft's KV may lack.

    Args:
        rows: of requests. bytes_per_token: of hidden states; 0 if none are read.
    """
    if not bytes_per_token:
        return MAX_BEHIND
    fitting = PLAIN_STATES_BYTES // (rows * bytes_per_token)
    return min(max(fitting, CATCH_UP_TOKENS), MAX_BEHIND)


class PlainStates:
    """The target's newest hidden states of each request row, a ring by position.

    Args:
        rows: request rows. length: positions that are kept.
    """

    def __init__(
        self,
        *,
        rows: int,
        length: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._length = length
        self._states = torch.zeros((rows * length, width), dtype=dtype, device=device)

    def keep(self, rows: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keep states [R, width] of request rows at positions, int64 [R] each."""
        self._states.index_copy_(0, self._places(rows, positions), states)

    def take(self, rows: Tensor, positions: Tensor, *, out: Tensor) -> None:
        """Copy states of request rows, int64 [R], at positions, int64 [R, n], to `out`
        [R * n, width]; those that were not kept are meaningless."""
        places = self._places(rows[:, None], positions)
        torch.index_select(self._states, 0, places.view(-1), out=out)

    def _places(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows * self._length + positions % self._length


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleGraphs:
    """Graphs of one shape; the draft phase has none where a shape only extends."""

    draft: EAGLEDraftCudaGraphRunner | None
    extend: EAGLEDraftExtendCudaGraphRunner
