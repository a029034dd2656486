"""The canary's launches around one model forward.

Four calls in this order: outside the graph, inside before the model, inside after it,
outside. The phase word on the device notices when one is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.kv_canary.config import CanaryConfig
from sglang.srt.kv_canary.kernels.finish import STATUS_WORDS
from sglang.srt.kv_canary.kernels.launches import (
    before_model,
    set_lineage,
    verify,
    write_tail,
)
from sglang.srt.kv_canary.kernels.records import WriterKind
from sglang.srt.kv_canary.kernels.state import CanaryRows
from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
from sglang.srt.kv_canary.token_oracle import oracle_tokens
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    KVReadView,
)
from sglang.srt.speculative.eagle_info_v2 import EagleDraftInput

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
    """What all forwards of one worker share.

    Fields:
        topk: branches of a draft step; tree_depth: levels of a tree behind its root.
        seeds: int64 [req_rows], lineage of each request row before position 0, in a
            draft's pool; None: the target's, where it is 0.
    """

    config: CanaryConfig
    buffers: CanaryBuffers
    req_to_token_pool: ReqToTokenPool
    kv_pool: KVCache
    attn_backend: AttentionBackend
    page_size: int
    vocab_size: int
    topk: int = 1
    tree_depth: int = 0
    seeds: Tensor | None = None

    @property
    def is_draft(self) -> bool:
        return self.seeds is not None


class SingleForwardManager:
    """Attributes:
    index: which forward of a launch; its phase word.
    """

    def __init__(self, target: CanaryTarget, index: int) -> None:
        self._target = target
        self.index = index
        self._is_draft = target.is_draft
        # Of the forward that is open.
        self._rows: CanaryRows | None = None
        state, capacities = target.buffers.state, target.buffers.capacities
        # Always the same memory, because graphs write it.
        self._findings = state.counters.new_zeros(STATUS_WORDS + capacities.max_rows)
        self._findings_of: dict[int, Tensor] = {}
        self._kinds = dict(_KINDS)
        if target.is_draft:
            self._kinds[ForwardMode.DECODE] = WriterKind.DRAFT
        self._knows_inputs = target.config.check_write_inputs and not target.is_draft
        # Behind the rows of requests.
        self._branch_lineages = torch.arange(
            capacities.req_rows,
            len(state.expected_lineage),
            device=state.counters.device,
        )

    def findings(self, forward_batch: ForwardBatch) -> Tensor:
        """int64 [STATUS_WORDS + R] of the forward that ended last, whose live rows are
        those of `forward_batch`; true until the next forward writes its own."""
        count = forward_batch.req_pool_indices.shape[0]
        findings = self._findings_of.get(count)
        if findings is None:
            findings = self._findings[: STATUS_WORDS + count]
            self._findings_of[count] = findings
        return findings

    def _draft_rows(self, forward_batch: ForwardBatch) -> CanaryRows:
        """A draft's lineages begin with a seed, and each branch has one of its own."""
        rows, spec = rows_of(forward_batch), forward_batch.spec_info
        assert isinstance(spec, EagleDraftInput)
        rows = dataclasses.replace(rows, seed_table=self._target.seeds)
        if not forward_batch.forward_mode.is_decode:
            return dataclasses.replace(rows, stay_lens=spec.accept_lens)
        assert spec.columns is not None
        branches = self._branch_lineages[: rows.num_rows]
        return dataclasses.replace(
            rows,
            # All branches begin where their request stands.
            lineage_rows=branches if self.index else None,
            publish_rows=branches,
            shift_from=spec.columns.shift_from,
            column_shift=spec.columns.shift,
        )

    def pre_ops_outside_graph(self, forward_batch: ForwardBatch) -> None:
        """On the host: capacity, and the lineages of prefixes that the host knows."""
        self._target.buffers.capacities.check(forward_batch)
        lineages = forward_batch.prefix_lineages
        if lineages is not None:
            state = self._target.buffers.state
            set_lineage(state, forward_batch.req_pool_indices, lineages)
        spec, seeds = forward_batch.spec_info, self._target.seeds
        if seeds is not None and isinstance(spec, EagleDraftInput):
            given = spec.seeds
            if given is not None:
                seeds.index_copy_(0, forward_batch.req_pool_indices, given)

    def pre_ops_maybe_inside_graph(
        self, forward_batch: ForwardBatch, views: Sequence[KVReadView]
    ) -> None:
        """Before the model: verify what it will read, write the head records."""
        target, is_draft = self._target, self._is_draft
        if is_draft:
            rows = self._draft_rows(forward_batch)
        else:
            rows = rows_of(forward_batch, tree_depth=target.tree_depth)
        self._rows = rows
        state, config = target.buffers.state, target.config
        pool = target.req_to_token_pool
        is_branch = is_draft and forward_batch.forward_mode.is_decode
        # What branches hold beyond the first step is in no table.
        has_tokens = config.check_read_tokens and not (is_branch and self.index)
        tokens = pool.token_table if has_tokens else None
        offset = target.buffers.kv_token_id_vs_position_offset
        first, *others = views
        for view in others:
            verify(
                state,
                rows,
                view,
                fingerprint=target.buffers.fingerprint,
                req_to_token=pool.req_to_token,
                tokens=tokens,
                token_offset=offset,
            )
        before_model(
            state,
            rows,
            first,
            fingerprint=target.buffers.fingerprint,
            req_to_token=pool.req_to_token,
            tokens=tokens,
            token_offset=offset,
            page_size=target.page_size,
            writer_kind=self._kinds[forward_batch.forward_mode],
            manager=self.index,
            oracle=self._oracle(forward_batch) if self._knows_inputs else None,
            # A draft's inputs are proposals, or what the target's were before.
            published=None if is_draft else pool.token_table,
        )

    def post_ops_maybe_inside_graph(self, forward_batch: ForwardBatch) -> None:
        """After the model: write the tail records over the bytes it stored."""
        target, rows, is_draft = self._target, self._rows, self._is_draft
        if rows is None:
            raise AssertionError("KV canary: no pre_ops before these post_ops")
        self._rows = None
        ends_step = not is_draft and forward_batch.forward_mode in _ENDS_STEP
        write_tail(
            target.buffers.state,
            rows,
            fingerprint=target.buffers.fingerprint,
            page_size=target.page_size,
            writer_kind=self._kinds[forward_batch.forward_mode],
            manager=self.index,
            advance=is_draft or ends_step,
            findings=self._findings if ends_step else None,
        )

    def post_ops_outside_graph(self, forward_batch: ForwardBatch) -> None:
        """Nothing to do on the host: findings travel with the result."""

    def _oracle(self, forward_batch: ForwardBatch) -> tuple[Tensor, Tensor] | None:
        """Tokens and positions that a decode must have as its inputs (tests)."""
        if not forward_batch.forward_mode.is_decode:
            return None
        positions = forward_batch.prefix_lens
        tokens = oracle_tokens(
            forward_batch.rids_int, positions, vocab_size=self._target.vocab_size
        )
        return tokens, positions


def rows_of(forward_batch: ForwardBatch, *, tree_depth: int = 0) -> CanaryRows:
    """The batch as the canary's launches take it; nothing is copied."""
    return CanaryRows(
        req_rows=forward_batch.req_pool_indices,
        prefix_lens=forward_batch.prefix_lens,
        extend_lens=forward_batch.extend_lens,
        qo_indptr=forward_batch.qo_indptr,
        input_ids=forward_batch.input_ids,
        positions=forward_batch.positions,
        out_cache_loc=forward_batch.out_cache_loc,
        serials=forward_batch.req_serial,
        salts=forward_batch.salt,
        parent_index=forward_batch.parent_index,
        max_depth=tree_depth,
    )
