"""Historical faults as wrappers of the methods that once had them.

Each takes an instance and its bound method, and returns the method with the fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.model_executor.model_runner_kv_cache_mixin import ROW_HEADROOM

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.branch_lists import BranchLists
    from sglang.srt.layers.attention.paged_backend import BranchDraftDecode
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.tp_worker import SampledForward, TpModelWorker
    from sglang.srt.mem_cache.ops.branch_slots.op import SlotRows
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_draft_phase import DraftPhase
    from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker

Method = Callable[..., Any]


def free_early(worker: TpModelWorker, run: Method) -> Method:
    """Report the pages of a request as freed when its last forward is launched.

    The allocator keeps them, as it would once they were owned again, so that only the
    records suffer.
    """
    freed: set[int] = set()

    def forward_batch_generation(
        batch: ScheduleBatch, sampling_info: SamplingBatchInfo
    ) -> GenerationBatchResult:
        pool = batch.env.cache.req_to_token_pool
        for req in batch.reqs:
            is_last = batch.forward_mode.is_decode and not req.decodes_on
            if is_last and req.serial not in freed:
                freed.add(req.serial)
                slots = pool.row_slots(
                    req.req_pool_idx, req.cache_protected_len, req.committed_len - 1
                )
                for manager in worker.canary_managers():
                    manager.target.groups[0].free(slots)
        result: GenerationBatchResult = run(batch, sampling_info)
        return result

    return forward_batch_generation


def advance_positions(phase: DraftPhase, run_step: Method) -> Method:
    """Move the positions of a draft step before its forward instead of after it."""

    def early(level: int, forward_batch: ForwardBatch) -> Any:
        positions = forward_batch.positions + 1
        return run_step(level, dataclasses.replace(forward_batch, positions=positions))

    return early


def with_tails(
    tails_of: Callable[[ScheduleBatch, Tensor], Tensor],
) -> Callable[[EagleDraftWorker, Method], Method]:
    """Let the draft's half of a prefill end each row in another token.

    Args:
        tails_of: given the batch and the sampled tokens, returns those tokens [R].
    """

    def wrap(worker: Any, extend: Method) -> Method:
        next_tokens: Callable[[ForwardBatch], Tensor] = worker.next_tokens

        def with_wrong_tails(batch: ScheduleBatch, done: SampledForward) -> None:
            def wrong(forward_batch: ForwardBatch) -> Tensor:
                ids = next_tokens(forward_batch)
                assert forward_batch.logits_rows is not None
                ids[forward_batch.logits_rows] = tails_of(batch, done.token_ids)
                return ids

            worker.next_tokens = wrong
            extend(batch, done)

        return with_wrong_tails

    return wrap


def sampled_tails(batch: ScheduleBatch, sampled: Tensor) -> Tensor:
    """The sampled token, even if a chunk does not end its prompt."""
    return sampled


def prompt_tails(batch: ScheduleBatch, sampled: Tensor) -> Tensor:
    """The token after a chunk, looked up in the prompt alone."""
    wrong = [
        req.tokens[min(end, req.prompt_len - 1)] if req.is_chunked else -1
        for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
    ]
    tails = torch.tensor(wrong, device=sampled.device)
    return tails.where(tails >= 0, sampled)


def narrow_headroom(args: ServerArgs) -> int:
    return ROW_HEADROOM + args.tree_shape.num_draft_tokens


def narrow_rows(runner: ModelRunner, row_width: Method) -> Method:
    """Widen rows by the draft tokens only, not by the reserve."""
    return lambda: runner.model_config.context_len + narrow_headroom(runner.server_args)


def small_buffer(lists: BranchLists, declare: Method) -> Method:
    """Size index lists without the factor top-k."""
    return lambda capacity: declare(capacity // lists.topk)


def short_lists(lists: BranchLists, fill: Method) -> Method:
    """Leave the newest slot of every branch out of its list."""

    def fill_all_but_newest(rows: SlotRows) -> None:
        fill(rows)
        branches = len(rows.req_pool_indices) * lists.topk
        indptr = lists.indptr[: lists.steps * (branches + 1)].view(lists.steps, -1)
        for step in range(lists.steps):
            newest = indptr[step, 1:].long() - 1
            lists.indices[step].index_fill_(0, newest, 0)

    return fill_all_but_newest


def short_tables(draft: BranchDraftDecode, prepare: Method) -> Method:
    """Leave the newest slot that the last draft step reads out of the tables."""

    def prepare_all_but_newest(rows: SlotRows) -> None:
        prepare(rows)
        topk = draft.layout.topk
        newest = (rows.seq_lens + draft.layout.num_steps - 2) // draft.entry_slots
        columns = newest.repeat_interleave(topk)
        table = draft.page_table[: len(rows.req_pool_indices) * topk]
        table.scatter_(1, columns[:, None], 0)

    return prepare_all_but_newest
