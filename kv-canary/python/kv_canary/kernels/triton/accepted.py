"""Triton kernel of the end of a verification: checks paths, records their tokens.

`state` and `path` are tuples from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import path_args, state_args
from kv_canary.kernels.triton.ends import STATUS, gather_in_one
from kv_canary.kernels.triton.hash import lineage_term, mix64, pack_word0
from kv_canary.kernels.triton.notes import note
from kv_canary.kernels.triton.report import RingFinding, report_one
from kv_canary.kernels.triton.rows import SALT_KEY
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER, require_vector

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.accepted import AcceptedPath, AcceptedWords
    from kv_canary.state import CanaryState

ACCEPT = tl.constexpr(int(Reason.ACCEPT_PATH))
NODE_TILE = tl.constexpr(64)


@triton.jit
def _has_child(path, root, parent, token):
    """Return whether `parent` has a child with this token in the tree at `root`."""
    count = root * 0
    for begin in range(0, path.nodes, NODE_TILE):
        number = begin + tl.arange(0, NODE_TILE)
        mask = number < path.nodes
        of = tl.load(path.parent_index + root + number, mask=mask, other=-1)
        its = tl.load(path.tokens + root + number, mask=mask, other=-1)
        is_it = mask & (of == parent) & (its == token)
        count += tl.sum(is_it.to(tl.int64), axis=0)
    return count > 0


@triton.jit
def _find_doubt(path, row, length):
    """Return place, wanted token and found token of the first node in doubt on a row's
    path; the place is -1 if there is none."""
    root = row * path.nodes
    end = root + path.nodes
    doubt = root * 0 - 1
    wanted = root * 0 - 1
    found = length
    if (length < 1) | (length > path.width):
        doubt = root * 0
    steps = tl.minimum(tl.maximum(length, 0), path.width)
    before = root
    due = root * 0
    for i in range(steps):
        node = tl.load(path.accept_index + row * path.width + i)
        gained = tl.load(path.gained + row * path.width + i)
        inside = (node >= root) & (node < end)
        at = tl.where(inside, node, root)
        follows = tl.load(path.predict + at)
        choice = follows
        if path.choices is not None:
            choice = tl.load(path.choices + at)
        parent = tl.load(path.parent_index + at)
        token = tl.load(path.tokens + at)
        is_child = inside & (parent == before) & (token == due)
        sound = tl.where(i == 0, node == root, is_child)
        sound = sound & (gained == follows) & (choice == follows)
        is_first = (sound == 0) & (doubt < 0)
        doubt = tl.where(is_first, i, doubt)
        wanted = tl.where(is_first, choice, wanted)
        found = tl.where(is_first, gained, found)
        before = at
        due = follows
    if path.choices is not None:
        choice = tl.load(path.choices + before)
        is_missed = _has_child(path, root, before, choice)
        is_missed = is_missed & (doubt < 0) & (length < path.width)
        doubt = tl.where(is_missed, length - 1, doubt)
        wanted = tl.where(is_missed, choice, wanted)
        found = tl.where(is_missed, -1, found)
    return doubt, wanted, found


@triton.jit
def _check_path(state, path, row, req, serial, prefix, length, tag):
    """Report the first node in doubt on a row's path."""
    doubt, wanted, found = _find_doubt(path, row, length)
    if (req != 0) & (doubt >= 0):
        position = prefix + doubt
        finding = RingFinding(
            reasons=ACCEPT,
            req_row=req,
            serial=serial,
            slot=-1,
            position=position,
            expected_word0=pack_word0(wanted, position + 1),
            found_word0=pack_word0(found, position + 1),
            expected_lineage=None,
            found_lineage=None,
            found_word3=None,
            # The verification's own tail has already advanced the clock.
            clock=tl.load(state.clock) - 1,
            batch_row=row,
            expected_slot=-1,
            found_fingerprint=None,
            computed_fingerprint=None,
            tag=tag,
        )
        report_one(state, finding)


@triton.jit
def _advance_over_path(
    state, path, salts, row, req, prefix, length, BLOCK: tl.constexpr
):
    """Advance a row's lineage over its root and the drafts that stay."""
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(length, path.width)
    at = path.gained + row * path.width + i - 1
    token = tl.load(at, mask=inside & (i > 0), other=0)
    root = tl.load(path.tokens + row * path.nodes)
    token = tl.where(i == 0, root, token)
    salt = mix64(tl.load(salts + row) ^ SALT_KEY)
    term = lineage_term(pack_word0(token, prefix + i), salt)
    lineage = state.expected_lineage + req
    before = tl.where(prefix > 0, tl.load(lineage), 0)
    after = before + tl.sum(tl.where(inside, term, 0), axis=0)
    # All threads have read the old value before one thread stores the new one.
    tl.debug_barrier()
    tl.store(lineage, after, mask=req != 0)


@triton.jit
def _send_gained(path, words, row, BLOCK: tl.constexpr):
    """Store the tokens that a row gained."""
    i = tl.arange(0, BLOCK)
    mask = i < path.width
    token = tl.load(path.gained + row * path.width + i, mask=mask, other=0)
    tl.store(words + row * path.width + i, token, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "tag"])
def accepted_kernel(
    state,
    draft,
    path,
    salts,
    words,
    num_rows,
    tag,
    CHECKS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check one row's path per program, record its last token, advance its lineage.

    The last program gathers the findings of both pools, or of `state` alone.

    `words` is the vector of `AcceptedWords`.
    """
    row = tl.program_id(0).to(tl.int64)
    num_gained = num_rows * path.width
    findings = words + num_gained + num_rows
    draft_findings = findings + STATUS + num_rows
    marks = draft_findings
    if HAS_DRAFT:
        marks += STATUS + num_rows
    if row < num_rows:
        req = tl.load(path.req_rows + row)
        serial = tl.load(path.serials + row)
        prefix = tl.load(path.prefix_lens + row)
        length = tl.load(path.accept_lens + row)
        if CHECKS:
            _check_path(state, path, row, req, serial, prefix, length, tag)
        _send_gained(path, words, row, BLOCK)
        tl.store(words + num_gained + row, length)
        last = tl.minimum(tl.maximum(length, 1), path.width) - 1
        token = tl.load(path.gained + row * path.width + last)
        note(
            state.requests,
            marks,
            row,
            num_rows,
            req,
            serial,
            token,
            prefix + length,
            req >= 0,
        )
        _advance_over_path(state, path, salts, row, req, prefix, length, BLOCK)
    # The program stores its findings before it announces that it is done.
    tl.debug_barrier()
    if tl.atomic_add(state.ticket, 1) == tl.num_programs(0) - 1:
        tl.store(state.ticket, 0)
        gather_in_one(state, path.req_rows, findings, num_rows)
        if HAS_DRAFT:
            gather_in_one(draft, path.req_rows, draft_findings, num_rows)


def finish_accepted(
    state: CanaryState,
    draft: CanaryState | None,
    path: AcceptedPath,
    salts: Tensor,
    checks: bool,
    words: AcceptedWords,
) -> None:
    path.check_layout()
    require_vector("finish_accepted: salts", salts)
    accepted_kernel[(max(path.num_rows, 1),)](
        state=state_args(state),
        draft=state_args(state if draft is None else draft),
        path=path_args(path),
        salts=salts,
        words=words.words,
        num_rows=path.num_rows,
        tag=ring_tag(Launch.ACCEPT, NO_MANAGER, state.pool),
        CHECKS=checks,
        HAS_DRAFT=draft is not None,
        BLOCK=triton.next_power_of_2(path.width),
        num_warps=1,
    )
