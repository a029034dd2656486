"""The canary's launches: each runs natively, as a Triton kernel, or in torch.

Per forward: `before_model` (verify and head write), the model, `write_tail`; `verify`
alone serves sweeps. None allocates memory that outlives it or waits for the device,
except in torch. Knows no requests and no pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kv_canary.accepted import AcceptedPath, AcceptedWords
from kv_canary.findings import STATUS_WORDS
from kv_canary.kernels import reference, reference_write
from kv_canary.op import Op

if TYPE_CHECKING:
    from kv_canary.accepted import SampledTokens
    from kv_canary.carried import CarriedRows
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView

_NATIVE = "kv_canary.kernels.native:"
_TRITON = "kv_canary.kernels.triton_launch:"

verify = Op(
    reference=reference.verify,
    native=_NATIVE + "verify",
    triton=_TRITON + "verify",
)
write_head = Op(
    reference=reference_write.write_head,
    native=_NATIVE + "write_head",
    triton=_TRITON + "write_head",
)
_before_model = Op(
    reference=reference_write.before_model,
    native=_NATIVE + "before_model",
    triton=_TRITON + "before_model",
)
_write_tail = Op(
    reference=reference_write.write_tail,
    native=_NATIVE + "write_tail",
    triton=_TRITON + "write_tail",
)
_poison = Op(
    reference=reference_write.poison,
    native=_NATIVE + "poison",
    triton=_TRITON + "poison",
)
_move_records = Op(
    reference=reference_write.move_records, triton=_TRITON + "move_records"
)
_finish_step = Op(
    reference=reference_write.finish_step,
    native=_NATIVE + "finish_step",
    triton=_TRITON + "finish_step",
)
_gather_findings = Op(
    reference=reference_write.gather_findings,
    native=_NATIVE + "gather_findings",
    triton=_TRITON + "gather_findings",
)

_expect_rows = Op(
    reference=reference_write.expect_rows,
    native=_NATIVE + "expect_rows",
    triton=_TRITON + "expect_rows",
)
_note_tokens = Op(
    reference=reference_write.note_tokens,
    native=_NATIVE + "note_tokens",
    triton=_TRITON + "note_tokens",
)
_send_tokens = Op(reference=reference_write.send_tokens, triton=_TRITON + "send_tokens")
_carry = Op(
    reference=reference_write.carry,
    native=_NATIVE + "carry",
    triton=_TRITON + "carry",
)
_finish_accepted = Op(
    reference=reference_write.finish_accepted,
    native=_NATIVE + "finish_accepted",
    triton=_TRITON + "finish_accepted",
)


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Verify every one of `view.reads`, then write the head records; the first of the
    reads and the head write are one launch, which steps the phase."""
    if len(view.reads) > 1:
        for table in view.reads[1:]:
            verify(state, view, checks, table, steps_phase=False)
    _before_model(state, view, checks)


def stamp(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Write the head records of all rows and announce them as tails: before any
    `verify` of the forward, where rows may read what other rows of it write.

    Until `write_tail` the tails of these slots have no fingerprint: compare bytes with
    `SlotBytes`, which leaves them out, and give `checks` none. `view` belongs to no
    manager.
    """
    write_head(state, view, checks)
    is_slot = (view.out_cache_loc >= 0) & (view.out_cache_loc < state.num_slots)
    # Slot 0 is scratch, whose records are poison in both halves.
    slots = view.out_cache_loc * is_slot
    state.tail.index_copy_(0, slots, state.head.index_select(0, slots))


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    *,
    advance: bool = False,
    findings: Tensor | None = None,
) -> None:
    """Check that the head records are still this forward's, write the tail records with
    fingerprints of the bytes, advance the clock: after the model.

    `view` and `checks` must be those of `before_model`, and `expected_lineage`
    unchanged since. The phase AFTER_HEAD becomes IDLE.

    Args:
        advance: whether the launch also advances the rows' lineages, as `finish_step`
            does.
        findings: int64 [>= STATUS_WORDS + R], filled by `gather_findings` after that;
            the rows must differ. None: `finish_step` does both, as for trees.

    Raises:
        ValueError: `advance` with a tree, whose accepted path is not known yet, or
            findings without `advance`.
    """
    if advance and view.parent_index is not None:
        raise ValueError("write_tail: lineages of a tree; use finish_step")
    if findings is not None and not advance:
        raise ValueError("write_tail: findings are those of a forward that advances")
    _write_tail(state, view, checks, advance, findings)


def poison(state: CanaryState, slots: Tensor, *, n_live: Tensor | None = None) -> None:
    """Poison slots [n] int64, or the first `n_live` [1] int64 of them. A slot that is
    poisoned already keeps its first freeing step; ids outside the pool are skipped."""
    if slots.numel():
        _poison(state, slots, n_live)


def move_records(state: CanaryState, *, dst: Tensor, src: Tensor) -> None:
    """Set records[dst] = records[src], int64 [n] each, as if all were read first. dst
    may repeat only with equal sources; ids must lie in the pool."""
    if dst.numel():
        _move_records(state, dst, src)


def set_lineage(state: CanaryState, rows: Tensor, values: Tensor) -> None:
    """Set expected_lineage[rows] = values, int64 [n] each, from the host's tokens."""
    state.expected_lineage.index_copy_(0, rows, values)


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None = None
) -> None:
    """Announce a prefill by the host's requests: the lineages that rows [R] int64 go on
    from, and whose they are. Their next inputs are not known any more. Rows differ.

    Args:
        values: int64 [len(Expected), R], contiguous.
        seeds: int64 [req_rows], set where the pool has seeds; None: it has none.
    """
    if rows.numel():
        _expect_rows(state, rows, values, seeds)


def note_tokens(state: CanaryState, sampled: SampledTokens) -> Tensor:
    """Note what was sampled, from the sampler's own result: the next forward's inputs
    are compared with it. Rows other than 0 differ.

    Returns:
        marks, int64 [2, R] on the device: serials, and words 0 of the tokens (`UNKNOWN`
        where there is none), for the host to compare with what it keeps.
    """
    marks = sampled.serials.new_empty((2, len(sampled.serials)))
    _note_tokens(state, sampled, marks)
    return marks


def send_tokens(
    state: CanaryState,
    sampled: SampledTokens,
    findings: Tensor,
    other_findings: Tensor | None = None,
) -> Tensor:
    """Note what was sampled, as `note_tokens` does, and join all that a step sends to
    the host.

    Args:
        findings: int64 [STATUS_WORDS + R]; other_findings: of a second group of slots,
            united with them from RING on.

    Returns:
        int64, the tokens, the findings and the marks, one after the other.
    """
    size = 3 * len(sampled.tokens) + len(findings)
    words = findings.new_empty(size)
    _send_tokens(state, sampled, findings, other_findings, words)
    return words


def finish_accepted(
    state: CanaryState,
    draft: CanaryState,
    path: AcceptedPath,
    *,
    salts: Tensor,
    checks: bool = True,
) -> AcceptedWords:
    """End a verification: check what it accepted, and note the last token gained of
    each row as `note_tokens` does; the first node in doubt of a row is an ACCEPT_PATH.
    Then the rows' lineages advance over the tokens whose KV stays, and findings are
    gathered in both pools.

    Every node of the path must follow its predecessor in the tree and be the token
    that this one's prediction names; tokens gained must be the predictions, and these
    the target's choices where they are given; then no node may go on from the last one
    by its choice.

    Args:
        state: of the target's pool; draft: of the draft's.
        salts: int64 [b], as in `ForwardView`.
        checks: whether the path is checked; False where acceptance is made up.
    """
    words = AcceptedWords.of(path)
    _finish_accepted(state, draft, path, salts, checks, words)
    return words


def note_carried(state: CanaryState, rows: CarriedRows) -> None:
    """Note the sums of rows that a later forward will use, where they are made; their
    places differ."""
    _carry(state, rows, False)


def check_carried(state: CanaryState, rows: CarriedRows) -> None:
    """Compare the sums of rows with those noted in their places, where they are used;
    another sum is a CARRIED_STATE, with the sums as lineages."""
    _carry(state, rows, True)


def finish_step(state: CanaryState, view: ForwardView) -> Tensor:
    """Finish a forward whose `write_tail` did not advance: the rows' lineages advance
    over their new tokens, or those that stay (from the seed where the prefix is empty),
    then `gather_findings` of the rows. Called where tokens are published. No row may
    read a lineage that another one writes.

    Raises:
        ValueError: `view` has a tree; only an accepted path has a lineage.
    """
    if view.parent_index is not None:
        raise ValueError("finish_step: view.parent_index must be None")
    findings = _new_findings(state, view.num_rows)
    _finish_step(state, view, findings)
    return findings


def gather_findings(state: CanaryState, req_rows: Tensor) -> Tensor:
    """Gather findings about request rows [R] int64, and clear their verdicts. Row 0 may
    repeat: it yields 0 and keeps its verdict. Other rows must differ.

    Returns:
        int64 [STATUS_WORDS + R] on the device; ring and counters stay.
    """
    findings = _new_findings(state, len(req_rows))
    _gather_findings(state, req_rows, findings)
    return findings


def _new_findings(state: CanaryState, rows: int) -> Tensor:
    return state.counters.new_empty(STATUS_WORDS + rows)
