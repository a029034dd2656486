"""The canary's launches around one model forward.

Four calls in this order: outside the graph, inside before the model, inside after it,
outside. The phase word on the device notices when one is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.findings import STATUS_WORDS
from kv_canary.records import WriterKind
from kv_canary.runtime.forward import ForwardLaunches
from kv_canary.view import NO_MANAGER, ForwardView, KVReadView
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from sglang.srt.kv_canary.config import CanaryConfig
    from sglang.srt.kv_canary.groups import EngineGroup, PoolGroup
    from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
    from sglang.srt.kv_canary.state_group import StateGroup
    from sglang.srt.kv_canary.token_oracle import InputOracle
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

# Forwards of the target whose tokens all stay; a verification's are chosen later.
_ENDS_STEP = (ForwardMode.EXTEND, ForwardMode.DECODE)
_KINDS = {
    ForwardMode.EXTEND: WriterKind.EXTEND,
    ForwardMode.DECODE: WriterKind.DECODE,
    ForwardMode.TARGET_VERIFY: WriterKind.VERIFY,
    ForwardMode.DRAFT_EXTEND_V2: WriterKind.DRAFT_EXTEND,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTarget:
    """The state that all forwards of one worker share.

    Fields:
        groups: one per KV group of the pool, the primary one first.
        states: the recurrent states of the model, if it has any.
        topk: branches of a draft step; tree_depth: levels of a tree below its root.
        oracle: what inputs must be (tests), of the target; None: it is off.
    """

    config: CanaryConfig
    groups: tuple[PoolGroup, ...]
    req_to_token_pool: ReqToTokenPool
    kv_pool: KVCache
    attn_backend: AttentionBackend
    page_size: int
    vocab_size: int
    topk: int = 1
    tree_depth: int = 0
    oracle: InputOracle | None = None
    states: StateGroup | None = None

    @property
    def every(self) -> tuple[EngineGroup, ...]:
        """All groups, the primary one first."""
        return self.groups if self.states is None else (*self.groups, self.states)

    @property
    def buffers(self) -> CanaryBuffers:
        """Of the primary group."""
        return self.groups[0].buffers

    @property
    def seeds(self) -> Tensor | None:
        """int64 [req_rows], lineage of each request row before position 0 in a draft's
        pool (0 but for heads). None for the target's, where it is 0."""
        return self.groups[0].seeds

    @property
    def is_draft(self) -> bool:
        return self.seeds is not None

    @property
    def token_offset(self) -> int:
        """The slot of position p holds token p + this."""
        return self.buffers.kv_token_id_vs_position_offset

    def group(self, name: str) -> PoolGroup | None:
        """The group of this name, or None if the pool has none."""
        return next((group for group in self.groups if group.name == name), None)


class SingleForwardManager:
    """The launches of the forwards with one place in a launch.

    Attributes:
        index: which forward of a launch; its phase word.
    """

    def __init__(self, target: CanaryTarget, index: int) -> None:
        self._target = target
        self.index = index
        self._is_draft = target.is_draft
        groups = target.every
        self._launches = ForwardLaunches(groups)
        self._checks = [group.checks for group in groups]
        self._branch_checks = [group.branch_checks for group in groups]
        self._decode_checks = [group.decode_checks for group in groups]
        state, capacities = target.buffers.state, target.buffers.capacities
        self._capacities, self._seeds = capacities, target.seeds
        # Of each group. Always the same memory, because graphs write it.
        self._findings = [
            group.state.counters.new_zeros(STATUS_WORDS + capacities.max_rows)
            for group in groups
        ]
        self._findings_of: dict[int, list[Tensor]] = {}
        self._kinds = dict(_KINDS)
        if target.is_draft:
            self._kinds[ForwardMode.DECODE] = WriterKind.DRAFT
        # After the rows of requests: two for each branch, because a branch of one step
        # may continue any of the step before.
        self._branch_lineages = torch.arange(
            capacities.req_rows,
            len(state.expected_lineage),
            device=state.counters.device,
        ).chunk(2)

    def findings(self, forward_batch: ForwardBatch) -> list[Tensor]:
        """int64 [STATUS_WORDS + R] of each group, in the forward that ended last, whose
        live rows are those of `forward_batch`; true until the next forward writes its
        own."""
        count = forward_batch.req_pool_indices.shape[0]
        findings = self._findings_of.get(count)
        if findings is None:
            findings = [every[: STATUS_WORDS + count] for every in self._findings]
            self._findings_of[count] = findings
        return findings

    def pre_ops_outside_graph(self, forward_batch: ForwardBatch) -> None:
        """Refuse, on the host, a forward that is too large to be checked whole."""
        self._capacities.check(forward_batch)

    def pre_ops_maybe_inside_graph(
        self,
        forward_batch: ForwardBatch,
        reads: Sequence[KVReadView],
        forwards: Mapping[str, WindowForward],
    ) -> None:
        """Verify `reads`, and in secondary groups what `forwards` reads; write the head
        records: before the model."""
        is_decode = forward_batch.forward_mode.is_decode
        checks = self._decode_checks if is_decode else self._checks
        if self._is_draft and is_decode and self.index:
            checks = self._branch_checks
        view = self._view_of(forward_batch, reads)
        self._launches.before(
            [group.view(view, forwards) for group in self._launches.groups],
            checks=checks,
        )

    def _view_of(
        self, forward_batch: ForwardBatch, reads: Sequence[KVReadView]
    ) -> ForwardView:
        kind = self._kinds[forward_batch.forward_mode]
        if not self._is_draft:
            oracle = self._target.oracle
            return view_of(
                forward_batch,
                reads=reads,
                writer_kind=kind,
                manager=self.index,
                oracle=None if oracle is None else oracle.of(forward_batch),
                max_depth=self._target.tree_depth,
            )
        spec = forward_batch.spec_info
        assert isinstance(spec, EagleDraftInput)
        # A head's lineages begin with a seed, and each branch has one of its own.
        view = view_of(
            forward_batch,
            reads=reads,
            writer_kind=kind,
            manager=self.index,
            seed_table=self._seeds,
        )
        if not forward_batch.forward_mode.is_decode:
            return dataclasses.replace(view, stay_lens=spec.accept_lens)
        assert spec.columns is not None
        shift_from, shift, parents = spec.columns
        mine = self._branch_lineages[self.index % 2][: view.num_rows]
        others = self._branch_lineages[1 - self.index % 2]
        before = others[: view.num_rows]
        if parents is not None:
            before = others.index_select(0, parents)
        return dataclasses.replace(
            view,
            # All branches begin with the lineage of their request.
            lineage_rows=before if self.index else None,
            publish_rows=mine,
            shift_from=shift_from,
            column_shift=shift,
        )

    def post_ops_maybe_inside_graph(self, forward_batch: ForwardBatch) -> None:
        """Write the tail records over the bytes that the model stored."""
        if not self._launches.is_open:
            raise AssertionError("KV canary: no pre_ops before these post_ops")
        is_draft = self._is_draft
        ends_step = not is_draft and forward_batch.forward_mode in _ENDS_STEP
        self._launches.after(
            advance=is_draft or ends_step,
            findings=self._findings if ends_step else None,
        )

    def post_ops_outside_graph(self, forward_batch: ForwardBatch) -> None:
        """Nothing to do on the host: findings travel with the result."""


def view_of(
    forward_batch: ForwardBatch,
    *,
    reads: Sequence[KVReadView] = (),
    writer_kind: WriterKind = WriterKind.NONE,
    manager: int = NO_MANAGER,
    oracle: tuple[Tensor, Tensor] | None = None,
    seed_table: Tensor | None = None,
    max_depth: int = 0,
) -> ForwardView:
    """View of the batch for the core's launches; nothing is copied."""
    return ForwardView(
        req_rows=forward_batch.req_pool_indices,
        prefix_lens=forward_batch.prefix_lens,
        extend_lens=forward_batch.extend_lens,
        input_ids=forward_batch.input_ids,
        positions=forward_batch.positions,
        out_cache_loc=forward_batch.out_cache_loc,
        serials=forward_batch.req_serial,
        salts=forward_batch.salt,
        qo_indptr=forward_batch.qo_indptr,
        parent_index=forward_batch.parent_index,
        tree_mask=_mask_of(forward_batch),
        seed_table=seed_table,
        reads=reads,
        writer_kind=writer_kind,
        manager=manager,
        oracle=oracle,
        max_depth=max_depth,
    )


def _mask_of(forward_batch: ForwardBatch) -> Tensor | None:
    """The nodes that each node of a tree attends to, [T, D], as attention gets them.

    Raises:
        ValueError: trees without a mask, whose nodes would attend to all before them.
    """
    mask = forward_batch.tree_mask
    if mask is not None:
        return mask.flatten(0, 1)
    if forward_batch.parent_index is not None:
        raise ValueError("KV canary: a batch of trees without a tree_mask")
    return None
