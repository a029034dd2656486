"""The canary's launches. Each runs natively, as a Triton kernel, or in torch.

A forward runs `before_model` (verify and head write), the model, and `write_tail`;
sweeps only use `verify`. None of them allocates lasting memory or waits for the device,
except in torch. Knows no requests and no pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from torch import Tensor

from kv_canary.accepted import AcceptedPath, AcceptedWords
from kv_canary.findings import STATUS_WORDS
from kv_canary.kernels.reference import (
    accepted,
    before,
    carried,
    drawn,
    ends,
    notes,
    records,
    slot_sums,
    state_parts,
    state_sums,
    states,
    write,
)
from kv_canary.kernels.reference import verify as reference_verify
from kv_canary.op import Op
from kv_canary.records import (
    KIND_MASK,
    POISON_WORD,
    SERIAL_BITS,
    Launch,
    Record,
    WriterKind,
)

if TYPE_CHECKING:
    from kv_canary.accepted import SampledTokens
    from kv_canary.drawn import DrawnTokens
    from kv_canary.layout import Fingerprint
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.state_parts import StateParts
    from kv_canary.state_rows import StateRows
    from kv_canary.view import ForwardView

P = ParamSpec("P")
R = TypeVar("R")


def _op(reference: Callable[P, R], *, is_native: bool = True) -> Op[P, R]:
    """Make an op of the functions with one name: the Triton one lies in a file of the
    same name as the torch reference, the native one in `native.py`."""
    module, name = reference.__module__.rpartition(".")[-1], reference.__name__
    return Op(
        reference=reference,
        triton=f"kv_canary.kernels.triton.{module}:{name}",
        native=f"kv_canary.kernels.native:{name}" if is_native else None,
    )


verify = _op(reference_verify.verify)
write_head = _op(write.write_head)
carry = _op(carried.carry)
sum_slots = _op(slot_sums.sum_slots)
_before_model = _op(before.before_model)
_write_tail = _op(write.write_tail)
_poison = _op(records.poison)
_announce_heads = _op(records.announce_heads, is_native=False)
_move_records = _op(records.move_records, is_native=False)
_finish_step = _op(ends.finish_step)
_gather_findings = _op(ends.gather_findings)
_expect_rows = _op(notes.expect_rows)
_note_tokens = _op(notes.note_tokens)
_send_tokens = _op(notes.send_tokens, is_native=False)
_check_drawn = _op(drawn.check_drawn)
_finish_accepted = _op(accepted.finish_accepted)
_sum_states = _op(state_parts.sum_states, is_native=False)
_compare_states = _op(state_sums.compare_states, is_native=False)
_check_states = _op(states.check_states, is_native=False)
_note_states = _op(states.note_states, is_native=False)


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Verify every one of `view.reads`, then write the head records. The first read and
    the head write are one launch, which steps the phase."""
    if len(view.reads) > 1:
        for table in view.reads[1:]:
            verify(state, view, checks, table, steps_phase=False)
    _before_model(state, view, checks)


def stamp(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Write the head records of all rows and announce them as tails. Call it before any
    `verify` of a forward whose rows may read what its other rows write.

    Until `write_tail` the tails of these slots have no fingerprint, so `checks` leaves
    their bytes out (`skips_new`), as `SlotBytes` does. `view` has no manager.
    """
    write_head(state, view, checks)
    if view.out_cache_loc.numel():
        _announce_heads(state, view.out_cache_loc)


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    *,
    advance: bool = False,
    findings: Tensor | None = None,
) -> None:
    """Check that the head records still belong to this forward, write the tail records
    with fingerprints of the bytes, and advance the clock. Call it after the model.

    `view` and `checks` must be the ones given to `before_model`, and `expected_lineage`
    unchanged since. The phase changes from AFTER_HEAD to IDLE.

    Args:
        advance: also advance the rows' lineages, as `finish_step` does.
        findings: int64 [>= STATUS_WORDS + R], filled as by `gather_findings`
            afterwards; the rows must be distinct. Without findings `finish_step` does
            both, which it must for trees.

    Raises:
        ValueError: `advance` with a tree, whose accepted path is not known yet, or
            findings without `advance`.
    """
    if advance and view.parent_index is not None:
        raise ValueError(
            "write_tail: a tree's lineages cannot advance; use finish_step"
        )
    if findings is not None and not advance:
        raise ValueError("write_tail: findings need a launch that advances")
    _write_tail(state, view, checks, advance, findings)


def poison(state: CanaryState, slots: Tensor, *, n_live: Tensor | None = None) -> None:
    """Poison slots [n] int64, or the first `n_live` [1] int64 of them. A poisoned slot
    keeps its first freeing step; ids outside the pool are skipped."""
    if slots.numel():
        _poison(state, slots, n_live)


def move_records(state: CanaryState, *, dst: Tensor, src: Tensor) -> None:
    """Set records[dst] = records[src], int64 [n] each, as if all were read first. dst
    may only repeat with equal sources; ids must lie in the pool."""
    if dst.numel():
        _move_records(state, dst, src)


def mark_copied(state: CanaryState, dst: Tensor) -> None:
    """Note, after `move_records`, that slots `dst` [n] int64 hold copies: whoever reads
    one need not have written it. A copy of nothing goes on to say when that was
    freed."""
    for half in (state.head, state.tail):
        words = half[dst, Record.WORD3]
        moved = words & ~(KIND_MASK << SERIAL_BITS) | WriterKind.MOVE << SERIAL_BITS
        is_held = half[dst, Record.WORD0] != POISON_WORD
        half[dst, Record.WORD3] = moved.where(is_held, words)


def check_states(state: CanaryState, rows: StateRows, source: Fingerprint) -> None:
    """Check, before a model reads them, that the slots of `rows` hold the states of
    their prefixes. Each row with a reason gets one ring entry.

    * READ_SET: the slot is not the row's, or none that can hold a state.
    * VERIFY_FREED: nobody has written it since it was freed.
    * VERIFY_POSITION, VERIFY_LINEAGE: another number of tokens is folded into it, or
      other tokens.
    * ROW_OWNER: another request wrote it, and it was not copied since.
    * VERIFY_REAL_KV: its bytes have another fingerprint than its writer's.
    """
    _check_states(state, rows, source, Launch.VERIFY)


def compare_states(states: Tensor, kept: Tensor, marks: Tensor, slots: Tensor) -> None:
    """Compare states that no operation loads with what was kept of them.

    Args:
        states: [slots, layers, ...] as in `StateCells.of`, contiguous in a layer.
        kept: int64 [slots, layers, cells], contiguous in a layer.
        marks: int32 [slots, layers], contiguous; set to 1 where sums differ, for
            `StateRows.marks`.
        slots: [n] int64.
    """
    _compare_states(states, kept, marks, slots)


def sum_states(
    slots: Tensor, groups: Tensor, turns: Tensor, parts: StateParts
) -> Tensor:
    """Sum up runs of states that lie in another engine's memory; see `state_parts.py`.

    Args:
        slots, groups: [N] int64, states and the groups of layers that they belong to.
        turns: [N] int64, numbers of runs, or `Turn`.

    Returns:
        int64 [2, N, parts]: sums, and how many of their words hold an infinity or NaN.
    """
    found = slots.new_empty((2, len(slots), parts.num_parts))
    _sum_states(slots, groups, turns, parts, found)
    return found


def sweep_states(state: CanaryState, rows: StateRows, source: Fingerprint) -> None:
    """Check slots that no forward reads, as `check_states` does, for no request: any
    may have written them."""
    _check_states(state, rows, source, Launch.SWEEP)


def note_states(
    state: CanaryState,
    rows: StateRows,
    source: Fingerprint,
    *,
    kind: WriterKind,
    ends_forward: bool,
) -> None:
    """Record, after a model wrote them, which prefixes the slots of `rows` hold.
    STATE_FOLDS: a layer has folded another number of tokens into a slot.

    Args:
        ends_forward: also advance the clock.
    """
    _note_states(state, rows, source, kind, ends_forward)


def set_lineage(state: CanaryState, rows: Tensor, values: Tensor) -> None:
    """Set expected_lineage[rows] = values, int64 [n] each, from the host's tokens."""
    state.expected_lineage.index_copy_(0, rows, values)


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None = None
) -> None:
    """Announce a prefill from the host's requests: the lineages that rows [R] int64
    continue, and which requests they belong to. Their next inputs become unknown. Rows
    are distinct.

    Args:
        values: int64 [len(Expected), R], contiguous.
        seeds: int64 [req_rows], set if the pool has seeds, or None.
    """
    if rows.numel():
        _expect_rows(state, rows, values, seeds)


def note_tokens(state: CanaryState, sampled: SampledTokens) -> Tensor:
    """Record what was sampled, from the sampler's own result. The next forward's inputs
    are compared with it. Rows other than 0 are distinct.

    Returns:
        marks, int64 [2, R] on the device: serials, and words 0 of the tokens (`UNKNOWN`
        if there is none), for the host to compare with what it keeps.
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
    """Record what was sampled, as `note_tokens` does, and join everything that a step
    sends to the host.

    Args:
        findings: int64 [STATUS_WORDS + R]; other_findings: from a second group of
            slots, united with them from RING on.

    Returns:
        int64: the tokens, the findings and the marks, one after the other.
    """
    size = 3 * len(sampled.tokens) + len(findings)
    words = findings.new_empty(size)
    _send_tokens(state, sampled, findings, other_findings, words)
    return words


def finish_accepted(
    state: CanaryState,
    draft: CanaryState | None,
    path: AcceptedPath,
    *,
    salts: Tensor,
    checks: bool = True,
) -> AcceptedWords:
    """End a verification. Check what it accepted, and record each row's last token
    gained as `note_tokens` does; a row's first node in doubt is an ACCEPT_PATH. Then
    the rows' lineages advance over the tokens whose KV stays, and findings are gathered
    in both pools.

    Every node of the path must follow its predecessor in the tree and carry the token
    that the predecessor predicts. Tokens gained must be the predictions, which must be
    the target's choices if these are given. Then no child of the last node may carry
    its choice.

    Args:
        state: state of the target's pool; draft: state of the draft's pool, or None for
            drafts without KV.
        salts: int64 [b], as in `ForwardView`.
        checks: whether to check the path; False if acceptance is simulated.
    """
    words = AcceptedWords.of(path, has_draft=draft is not None)
    _finish_accepted(state, draft, path, salts, checks, words)
    return words


def check_drawn(
    state: CanaryState, drawn: DrawnTokens, findings: Tensor | None
) -> None:
    """Check whose logits gave whose token, after the forward's tail. Each token with a
    reason gets one ring entry.

    * LOGITS_ROW: the head read another row than the token is due from. The entry has
      the rows' sums as lineages.
    * GRAMMAR_MASK: the mask row belongs to another request, state of the grammar, or is
      missing; or it forbids the token, and the logits are finite. A mask whose grammar
      failed ends the checks of its token.
    * LOGITS_NOT_FINITE: the row has a NaN or +inf, or the token's own logit is -inf.
    * SAMPLED_TOKEN: the parameters are not the request's; or, unless the logits are not
      finite, they choose another token. `drawn.draws` leaves out the second question.

    Args:
        findings: int64 [STATUS_WORDS + R], gathered for these rows before. It gets the
            ring's count and the verdicts, which then stay out of `state.verdict`.
    """
    _check_drawn(state, drawn, findings)


def finish_step(state: CanaryState, view: ForwardView) -> Tensor:
    """Finish a forward whose `write_tail` did not advance. The rows' lineages advance
    over their new tokens, or those that stay (from the seed if the prefix is empty),
    then `gather_findings` runs on the rows. Call it where tokens are published. No row
    may read a lineage that another one writes.

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
    repeat: it yields 0 and keeps its verdict. Other rows are distinct.

    Returns:
        int64 [STATUS_WORDS + R] on the device. Ring and counters do not change.
    """
    findings = _new_findings(state, len(req_rows))
    gather_into(state, req_rows, findings)
    return findings


def gather_into(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    """Do as `gather_findings`, into int64 [>= STATUS_WORDS + R]."""
    _gather_findings(state, req_rows, findings)


def _new_findings(state: CanaryState, rows: int) -> Tensor:
    return state.counters.new_empty(STATUS_WORDS + rows)
