"""The end of a verification in torch: paths are checked and their tokens recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kv_canary.checks import Reason
from kv_canary.kernels.reference.ends import finish_step, gather_findings
from kv_canary.kernels.reference.notes import note_tokens
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.records import Launch, Ring, pack_word0_tensor
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.accepted import AcceptedPath, AcceptedWords
    from kv_canary.state import CanaryState


class _Doubt(NamedTuple):
    """The first node in doubt of each row's path; int64 [b].

    Fields:
        is_wrong: bool, whether there is one. place: its place on the path.
        wanted, found: tokens; an impossible length is reported as `found`.
    """

    is_wrong: Tensor
    place: Tensor
    wanted: Tensor
    found: Tensor


def finish_accepted(
    state: CanaryState,
    draft: CanaryState | None,
    path: AcceptedPath,
    salts: Tensor,
    checks: bool,
    words: AcceptedWords,
) -> None:
    """See `launches.finish_accepted`."""
    words.gained.copy_(path.gained)
    words.accept_lens.copy_(path.accept_lens)
    if checks:
        _check_path(state, path)
    note_tokens(state, path.last(), words.marks)
    finish_step(state, path.rows(salts), words.findings)
    if draft is not None:
        gather_findings(draft, path.req_rows, words.draft_findings)


def _check_path(state: CanaryState, path: AcceptedPath) -> None:
    """Report the first node in doubt of each row's path."""
    # The verification's own tail has already advanced the clock.
    report = Report(state, Launch.ACCEPT, NO_MANAGER, clock_offset=-1)
    doubt = _find_doubt(path)
    position = path.prefix_lens + doubt.place
    is_wrong = doubt.is_wrong & (path.req_rows != 0)
    report.add(
        {
            Ring.REASONS: flag(Reason.ACCEPT_PATH, is_wrong),
            Ring.REQ_ROW: path.req_rows,
            Ring.SERIAL: path.serials,
            Ring.POSITION: position,
            Ring.EXPECTED_WORD0: pack_word0_tensor(doubt.wanted, position + 1),
            Ring.FOUND_WORD0: pack_word0_tensor(doubt.found, position + 1),
            Ring.BATCH_ROW: torch.arange(path.num_rows, device=path.req_rows.device),
        }
    )


def _find_doubt(path: AcceptedPath) -> _Doubt:
    root = torch.arange(path.num_rows, device=path.req_rows.device) * path.nodes
    length = path.accept_lens.clamp(1, path.width)
    bad = length != path.accept_lens
    place, wanted, found = torch.zeros_like(root), root * 0 - 1, path.accept_lens
    before, due = root, root
    for i in range(path.width):
        node = path.accept_index[:, i]
        inside = (node >= root) & (node < root + path.nodes)
        at = torch.where(inside, node, root)
        follows = path.predict.view(-1)[at]
        if i == 0:
            wrong = node != root
        else:
            wrong = ~inside | (path.parent_index.view(-1)[at] != before)
            wrong |= path.tokens.view(-1)[at] != due
        choice = follows if path.choices is None else path.choices.view(-1)[at]
        wrong |= (path.gained[:, i] != follows) | (choice != follows)
        is_first = wrong & (i < length) & ~bad
        place = torch.where(is_first, i, place)
        wanted = torch.where(is_first, choice, wanted)
        found = torch.where(is_first, path.gained[:, i], found)
        bad |= is_first
        before, due = torch.where(i < length, at, before), follows
    if path.choices is not None:
        choice = path.choices.view(-1)[before]
        missed = _has_child(path, before, choice) & (length < path.width) & ~bad
        place = torch.where(missed, length - 1, place)
        wanted = torch.where(missed, choice, wanted)
        found = torch.where(missed, -1, found)
        bad |= missed
    return _Doubt(bad, place, wanted, found)


def _has_child(path: AcceptedPath, parent: Tensor, token: Tensor) -> Tensor:
    """Return whether a child of each row's node `parent` has its `token`."""
    is_child = path.parent_index == parent[:, None]
    return (is_child & (path.tokens == token[:, None])).any(dim=1)
