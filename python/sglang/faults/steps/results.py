"""Faults that assign results to the wrong owner: rows of a batch, accepted paths, and
results on their way to the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.faults.steps.site import Fault, FaultSite, runs_on
from sglang.srt.draft_trees.workspace import RowIdentity
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult

# -- rows and their requests -----------------------------------------------------------

_IDENTITY = ("req_serial", "salt", "rids_int")
_ROWS = (
    "req_pool_indices",
    "input_ids",
    "positions",
    "out_cache_loc",
    "prefix_lens",
    "seq_lens",
)


def swap_rows(site: FaultSite) -> None:
    """Compute two requests in each other's row: swap the contents of the rows, not
    their identities."""
    _swap_in_batch(site, _ROWS)
    _swap_in_iteration(site, (0,))


def swap_identity(site: FaultSite) -> None:
    """Swap the serial, namespace and id of two rows."""
    _swap_in_batch(site, _IDENTITY)
    _swap_in_iteration(site, range(1, len(RowIdentity._fields)))


def _swap_in_batch(site: FaultSite, fields: Sequence[str]) -> None:
    def forward_batch(
        original: Fault, batch: ScheduleBatch, *args: Any, **options: Any
    ) -> Any:
        made: ForwardBatch = original(batch, *args, **options)
        pairs = site.pairs() if site.is_decode else []
        if not pairs:
            return made
        site.harm(*pairs[0])
        order = _order(len(batch), pairs[0])
        return dataclasses.replace(
            made, **{name: getattr(made, name)[order] for name in fields}
        )

    site.wrap(ScheduleBatch, "forward_batch", forward_batch)


def _swap_in_iteration(site: FaultSite, parts: Sequence[int]) -> None:
    def identity(original: Fault, batch: ScheduleBatch) -> Tensor:
        made: Tensor = original(batch)
        pairs = site.pairs()
        if pairs:
            site.harm(*pairs[0])
            order = _order(len(batch), pairs[0])
            for part in parts:
                made[part] = made[part, order]
        return made

    site.wrap(ScheduleBatch, "identity", identity)


def _order(count: int, pair: tuple[int, int]) -> list[int]:
    order = list(range(count))
    order[pair[0]], order[pair[1]] = pair[1], pair[0]
    return order


# -- accepted paths --------------------------------------------------------------------


def accept_foreign_node(site: FaultSite) -> None:
    """Let the end of an accepted path be a node of another request."""

    def change(live: WorkspaceRows, row: int) -> bool:
        result, nodes = live.result, live.tree.tokens.shape[1]
        at = int(result.accept_lens[row]) - 1
        others = [i for i in range(live.bs) if i != row]
        if not others:
            return False
        # The other's root: it was accepted, and something follows it.
        place = site.rng.choice(others) * nodes
        before = int(result.accept_index[row, at])
        result.accept_index[row, at] = place
        predict = result.predict.view(-1)
        return int(predict[place]) != int(predict[before])

    _after_verification(site, change)


def accept_rejected_node(site: FaultSite) -> None:
    """Accept a node that the target's choices do not reach."""

    def change(live: WorkspaceRows, row: int) -> bool:
        result, nodes = live.result, live.tree.tokens.shape[1]
        length = int(result.accept_lens[row])
        if length == result.accept_index.shape[1]:
            return False
        path = set(result.accept_index[row, :length].tolist())
        first = row * nodes
        rest = [i for i in range(first, first + nodes) if i not in path]
        result.accept_index[row, length] = site.rng.choice(rest)
        result.accept_lens[row] += 1
        return True

    _after_verification(site, change)


def choose_rejected_token(site: FaultSite) -> None:
    """Follow the last accepted node with a token that the target did not choose."""

    def change(live: WorkspaceRows, row: int) -> bool:
        result = live.result
        last = result.accept_index[row, result.accept_lens[row] - 1]
        token = result.predict.view(-1)[last]
        token.copy_((token + 1) % site.target.model_config.vocab_size)
        return True

    _after_verification(site, change)


def _after_verification(
    site: FaultSite, change: Callable[[WorkspaceRows, int], bool]
) -> None:
    def verify(original: Fault, live: WorkspaceRows, *args: Any, **options: Any) -> Any:
        decided = original(live, *args, **options)
        for row in site.candidates():
            if change(live, row):
                site.harm(row)
                break
        return decided

    site.wrap(site.worker, "verify", verify)


# -- the host --------------------------------------------------------------------------


def take_neighbours_tokens(site: FaultSite) -> None:
    """Give two requests each other's tokens on the host."""

    def change(result: GenerationBatchResult, words: list[int]) -> tuple[int, ...]:
        bs, stride = result.bs, result.stride
        for a, b in site.pairs():
            before = list(words)
            for i in range(stride):
                first, second = a * stride + i, b * stride + i
                words[first], words[second] = before[second], before[first]
            if result.has_accept_lens:
                first, second = bs * stride + a, bs * stride + b
                words[first], words[second] = before[second], before[first]
            if words != before:
                return a, b
        return ()

    _on_result(site, change)


def take_one_more(site: FaultSite) -> None:
    """Take one token more than was accepted."""
    _shift_length(site, 1)


def take_one_less(site: FaultSite) -> None:
    """Lose the last accepted token."""
    _shift_length(site, -1)


def _shift_length(site: FaultSite, by: int) -> None:
    def change(result: GenerationBatchResult, words: list[int]) -> tuple[int, ...]:
        for row in site.candidates():
            at = result.bs * result.stride + row
            if 1 <= words[at] + by <= result.stride:
                words[at] += by
                return (row,)
        return ()

    _on_result(site, change)


def _on_result(
    site: FaultSite,
    change: Callable[[GenerationBatchResult, list[int]], tuple[int, ...]],
) -> None:
    """Change the words of a decode step's result; `change` returns the rows."""

    def launch(original: Fault, batch: ScheduleBatch, *rest: Any) -> Any:
        result: GenerationBatchResult = original(batch, *rest)
        if site.is_decode:
            packed = result.packed
            words = packed.tolist() if isinstance(packed, torch.Tensor) else packed
            rows = change(result, words)
            if rows:
                site.harm(*rows)
            result.packed = words
        return result

    site.wrap(site.scheduler.worker, "forward_batch_generation", launch)


def drop_token(site: FaultSite) -> None:
    """Lose the tokens of a step between its result and the request."""

    def append(original: Fault, req: Req, new_tokens: Sequence[int]) -> None:
        can_be = runs_on(req) and not site.harmed
        if not can_be or site.rng.random() < 0.5:
            original(req, new_tokens)
            return
        site.harmed = (req.rid,)

    site.wrap(Req, "append", append)
