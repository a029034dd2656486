"""Triton kernels of the canary that note what was sampled and accepted; see
`launches.py`.

`state` and `path` are tuples of `triton_args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.carried import FACTOR as CARRIED_FACTOR
from kv_canary.carried import KEY as CARRIED_KEY
from kv_canary.checks import Reason
from kv_canary.findings import RING as FINDINGS_RING
from kv_canary.kernels.triton_ends import STATUS, gather_findings
from kv_canary.kernels.triton_hash import lineage_term, mix64, pack_word0
from kv_canary.kernels.triton_report import Finding, report_one
from kv_canary.kernels.triton_rows import SALT_KEY
from kv_canary.records import UNKNOWN as RECORDS_UNKNOWN
from kv_canary.records import Expected, Request

CARRIED = tl.constexpr(int(Reason.CARRIED_STATE))
FACTOR = tl.constexpr(CARRIED_FACTOR)
KEY = tl.constexpr(CARRIED_KEY)
ACCEPT = tl.constexpr(int(Reason.ACCEPT_PATH))
NODE_TILE = tl.constexpr(64)
UNKNOWN = tl.constexpr(RECORDS_UNKNOWN)
NEXT_WORD = tl.constexpr(int(Request.NEXT_WORD0))
SERIAL_WORD = tl.constexpr(int(Request.SERIAL))
REQUEST_WORDS = tl.constexpr(len(Request))
RING = tl.constexpr(FINDINGS_RING)
LINEAGE_ROW = tl.constexpr(int(Expected.LINEAGE))
SEED_ROW = tl.constexpr(int(Expected.SEED))
SERIAL_ROW = tl.constexpr(int(Expected.SERIAL))


@triton.jit(do_not_specialize=["num_rows"])
def expect_kernel(
    expected_lineage, requests, seeds, rows, values, num_rows, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    req = tl.load(rows + i, mask=mask, other=0)
    lineage = tl.load(values + LINEAGE_ROW * num_rows + i, mask=mask, other=0)
    tl.store(expected_lineage + req, lineage, mask=mask)
    serial = tl.load(values + SERIAL_ROW * num_rows + i, mask=mask, other=0)
    known = requests + req * REQUEST_WORDS
    tl.store(known + SERIAL_WORD, serial, mask=mask)
    tl.store(known + NEXT_WORD, tl.zeros_like(serial) + UNKNOWN, mask=mask)
    if seeds is not None:
        seed = tl.load(values + SEED_ROW * num_rows + i, mask=mask, other=0)
        tl.store(seeds + req, seed, mask=mask)


@triton.jit
def _note(requests, marks, row, num_rows, req, serial, token, position, mask):
    """Note the tokens that rows must have next, and mark them."""
    word0 = tl.where(token >= 0, pack_word0(token, position), UNKNOWN)
    tl.store(requests + req * REQUEST_WORDS + NEXT_WORD, word0, mask=mask & (req != 0))
    tl.store(marks + row, serial, mask=mask)
    tl.store(marks + num_rows + row, word0, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_findings"])
def note_kernel(
    requests,
    req_rows,
    serials,
    tokens,
    prefix_lens,
    extend_lens,
    findings,
    other_findings,
    words,
    num_rows,
    num_findings,
    BLOCK: tl.constexpr,
):
    """Notes, and in `words` the marks, or, with findings, tokens, findings and marks;
    `other_findings` of a second group of slots are united with them."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    marks = words
    if findings is not None:
        marks = words + num_rows + num_findings
        step = tl.num_programs(0) * BLOCK
        for begin in range(tl.program_id(0) * BLOCK, num_findings, step):
            i = begin + tl.arange(0, BLOCK)
            inside = i < num_findings
            found = tl.load(findings + i, mask=inside, other=0)
            if other_findings is not None:
                found |= tl.load(other_findings + i, mask=inside & (i >= RING), other=0)
            tl.store(words + num_rows + i, found, mask=inside)
    req = tl.load(req_rows + row, mask=mask, other=0)
    serial = tl.load(serials + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=-1)
    if findings is not None:
        tl.store(words + row, token, mask=mask)
    position = tl.load(prefix_lens + row, mask=mask, other=0)
    position += tl.load(extend_lens + row, mask=mask, other=0)
    _note(requests, marks, row, num_rows, req, serial, token, position, mask)


@triton.jit
def _has_child(path, root, parent, token):
    """Whether a node of the tree at `root` is a child of `parent` with this token."""
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
    """(place on the path, wanted token, found token) of the first node of a row's path
    that is in doubt; place -1: none."""
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
    """Report the first node of a row's path that is in doubt."""
    doubt, wanted, found = _find_doubt(path, row, length)
    if (req != 0) & (doubt >= 0):
        position = prefix + doubt
        finding = Finding(
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
            # The verification's own tail has advanced the clock.
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
    """Let the lineage of a row advance over its root and the drafts that stay."""
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
    # All threads have read the old value before one stores the new.
    tl.debug_barrier()
    tl.store(lineage, after, mask=req != 0)


@triton.jit
def _send_gained(path, words, row, BLOCK: tl.constexpr):
    """The tokens that a row gained."""
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
    BLOCK: tl.constexpr,
):
    """A program per row: its path is checked, its last token noted, its lineage
    advanced. The last program gathers the findings of both pools.

    `words` is the vector of `AcceptedWords`.
    """
    row = tl.program_id(0).to(tl.int64)
    num_gained = num_rows * path.width
    findings = words + num_gained + num_rows
    draft_findings = findings + STATUS + num_rows
    marks = draft_findings + STATUS + num_rows
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
        _note(
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
    # The program's findings are there before it says that it is done.
    tl.debug_barrier()
    if tl.atomic_add(state.ticket, 1) == tl.num_programs(0) - 1:
        tl.store(state.ticket, 0)
        gather_findings(state, path.req_rows, findings, num_rows)
        gather_findings(draft, path.req_rows, draft_findings, num_rows)


@triton.jit
def _carried_term(words, place):
    mixed = (words.to(tl.int64) + (place + 1).to(tl.int64) * KEY) * FACTOR
    return mixed ^ (mixed >> 32)


@triton.jit(do_not_specialize=["num_rows", "tag", "group", "row_stride"])
def carried_kernel(
    state,
    places,
    req_rows,
    serials,
    positions,
    words,
    ids,
    bits,
    sums,
    num_rows,
    tag,
    group,
    row_stride,
    WIDTH: tl.constexpr,
    KNOWN: tl.constexpr,
    KNOWN_BLOCK: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per row: its sum is noted or, with CHECKS, compared."""
    row = tl.program_id(0).to(tl.int64)
    inside = row < num_rows
    request = row // group
    req = tl.load(req_rows + request, mask=inside, other=0)
    place = tl.load(places + row, mask=inside, other=-1)
    if inside & (req != 0) & (place >= 0):
        serial = tl.load(serials + request)
        found = serial * FACTOR
        found = found ^ (found >> 32)
        if words is not None:
            terms = tl.zeros([BLOCK], dtype=tl.int64)
            for begin in range(0, WIDTH, BLOCK):
                j = begin + tl.arange(0, BLOCK)
                mask = j < WIDTH
                at = words + row * row_stride + j
                term = _carried_term(tl.load(at, mask=mask, other=0), j)
                terms += tl.where(mask, term, 0)
            found += tl.sum(terms, axis=0)
        if ids is not None:
            k = tl.arange(0, KNOWN_BLOCK)
            mask = k < KNOWN
            at = row * KNOWN + k
            first = WIDTH + 2 * k
            terms = _carried_term(tl.load(ids + at, mask=mask, other=0), first)
            terms += _carried_term(tl.load(bits + at, mask=mask, other=0), first + 1)
            found += tl.sum(tl.where(mask, terms, 0), axis=0)
        if CHECKS:
            due = tl.load(sums + place)
            if due != found:
                finding = Finding(
                    reasons=CARRIED,
                    req_row=req,
                    serial=serial,
                    slot=-1,
                    position=tl.load(positions + request),
                    expected_word0=None,
                    found_word0=None,
                    expected_lineage=due,
                    found_lineage=found,
                    found_word3=None,
                    clock=tl.load(state.clock),
                    batch_row=request,
                    expected_slot=-1,
                    found_fingerprint=None,
                    computed_fingerprint=None,
                    tag=tag,
                )
                report_one(state, finding)
        else:
            tl.store(sums + place, found)
