"""vLLM's scheduler output as a `Step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_canary.engines.step import Admission, BlockIds, RowStep, Step
from kv_canary.engines.vllm.salts import request_salt

if TYPE_CHECKING:
    from kv_canary.engines.block_ledger import BlockLedger


def read_step(output: Any, ledger: BlockLedger) -> Step:
    """Read a `SchedulerOutput`; `ledger` knows some of its requests."""
    cached = output.scheduled_cached_reqs
    released = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
    admitted = [
        _new_request(
            request, goes_on=request.req_id in ledger and request.req_id not in released
        )
        for request in output.scheduled_new_reqs
    ]
    grown: list[tuple[str, BlockIds]] = []
    computed = {admission.rid: admission.computed for admission in admitted}
    lengths = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    computed.update(lengths)
    resumed, drafts = cached.resumed_req_ids, output.scheduled_spec_decode_tokens
    for rid, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if rid in resumed:
            length = computed[rid]
            admitted.append(_resumed(rid, blocks, length, cached, ledger))
        elif blocks is not None:
            grown.append((rid, blocks))
    return Step(
        released=released,
        admitted=admitted,
        grown=grown,
        copies=[tuple(copy)[:2] for copy in output.kv_cache_block_copies or ()],
        rows=[
            RowStep(rid, computed[rid], scheduled, drafts.get(rid, ()))
            for rid, scheduled in output.num_scheduled_tokens.items()
        ],
    )


def _new_request(request: Any, *, goes_on: bool) -> Admission:
    # The V2 runner gets preempted requests as new ones, together with their output.
    tokens = request.prefill_token_ids or request.prompt_token_ids
    return Admission(
        rid=request.req_id,
        tokens=tokens,
        blocks=request.block_ids,
        computed=request.num_computed_tokens,
        salt=request_salt(request),
        # A streaming session's next input; the V2 runner released preempted ones, or
        # hears of a preemption with this message.
        goes_on=goes_on,
    )


def _resumed(
    rid: str, blocks: BlockIds, computed: int, cached: Any, ledger: BlockLedger
) -> Admission:
    old = ledger.get(rid)
    tokens = cached.all_token_ids.get(rid)
    if tokens is None:
        tokens = old.tokens if old is not None else []
    return Admission(
        rid=rid,
        tokens=tokens,
        blocks=blocks,
        computed=computed,
        salt=old.salt if old is not None else 0,
    )
