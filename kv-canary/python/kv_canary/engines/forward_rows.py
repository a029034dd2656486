"""The rows of an engine's forwards: requests, prefixes, and what is sampled for
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import ge
from typing import TYPE_CHECKING, NamedTuple

from kv_canary import launches
from kv_canary.engines.batch_rows import BatchRows
from kv_canary.engines.inputs import SampledRows, known_inputs, sampled_counts
from kv_canary.engines.proposals import Proposals, RowLengths
from kv_canary.records import WriterKind
from kv_canary.runtime.uploads import upload_vectors
from kv_canary.view import ForwardView

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kv_canary.engines.block_ledger import BlockLedger
    from kv_canary.engines.step import ForwardReads, RowStep
    from kv_canary.state import CanaryState


class RowsOfForward(NamedTuple):
    """The rows of a forward.

    Fields:
        batch: their requests. steps: what they do. prefix: tokens before the forward,
            as the host knows them.
        view: makes the view of a group from its slots and tables.
        oracle: tokens and positions that are due, as in `ForwardView`.
    """

    batch: BatchRows
    steps: list[RowStep]
    prefix: list[int]
    view: Callable[..., ForwardView]
    oracle: tuple[Tensor, Tensor] | None


class ForwardRows:
    """Knows the rows of the newest forward.

    Args:
        num_rows: requests that may hold blocks at once.
        judges_ahead: see `EngineCanary`.

    Attributes:
        steps: what each request does in the planned step.
        judges_ahead: as given.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        device: torch.device,
        *,
        num_rows: int,
        judges_ahead: bool,
    ) -> None:
        self._ledger = ledger
        self._device = device
        self._lengths = RowLengths(num_rows, device) if judges_ahead else None
        self.judges_ahead = judges_ahead
        self.steps: Mapping[str, RowStep] = {}
        # The rows of the newest forward, while nobody begins or ends.
        self._batch: BatchRows | None = None
        # They, until their next tokens are known.
        self._sampling: SampledRows | None = None

    def plan(self, steps: Mapping[str, RowStep], state: CanaryState) -> None:
        """Begin a step. If nothing was sampled in the last one, the next inputs of its
        rows are unknown."""
        if self._sampling is not None:
            self._sampling.forget(state)
            self._sampling = None
        self.steps = steps

    def change(self) -> None:
        """Note that requests began or ended."""
        self._batch = None

    def begin(self, reads: ForwardReads) -> RowsOfForward:
        """Return the rows of the forward that is about to begin.

        Raises:
            RuntimeError: one of them was never announced.
        """
        batch, steps = self._batch_of(reads.rids)
        prefix = [step.computed for step in steps]
        # Each row has one new token, which was sampled last.
        is_plain = reads.num_tokens == len(steps) and all(map(ge, prefix, batch.given))
        if is_plain and self._lengths is not None:
            is_plain = not any(request.is_estimated for request in batch.requests)
        view = self._view(reads, batch, steps, prefix, is_plain=is_plain)
        oracle = None if is_plain else known_inputs(reads, self.steps, self._ledger)
        return RowsOfForward(batch, steps, prefix, view, oracle)

    def sampled(
        self, tokens: Tensor, counts: Tensor | None, states: Sequence[CanaryState]
    ) -> None:
        """See `EngineCanary.sampled`.

        Args:
            states: of all groups.
        """
        rows, self._sampling = self._sampling, None
        if rows is None:
            return
        if counts is None:
            counts = sampled_counts(tokens)
        launches.note_tokens(states[0], rows.next_inputs(tokens, counts))
        if self._lengths is not None and rows.proposals is not None:
            if counts is None:
                counts = (tokens[:, 0] >= 0).long()
            self._lengths.judge(rows.proposals, tokens, counts, states)

    def _batch_of(self, rids: Sequence[str]) -> tuple[BatchRows, list[RowStep]]:
        """Return the rows of a forward, and what they do in this step."""
        try:
            rows = [self.steps[rid] for rid in rids]
            if self._batch is None or self._batch.rids != rids:
                requests = [self._ledger[rid] for rid in rids]
                self._batch = BatchRows(rids, requests, self._device)
        except KeyError as error:
            raise RuntimeError(
                f"kv_canary: the forward has a row of request {error}, which the "
                "scheduler did not announce"
            ) from None
        return self._batch, rows

    def _view(
        self,
        reads: ForwardReads,
        batch: BatchRows,
        rows: Sequence[RowStep],
        before: Sequence[int],
        *,
        is_plain: bool,
    ) -> Callable[..., ForwardView]:
        """Return a function that makes the forward's view in a group, and note the rows
        that will be sampled.

        Args:
            before: tokens before the forward, by row.
            is_plain: whether each row has one new token, which was sampled last.
        """
        each_is_due = is_plain
        ids = reads.input_ids[: reads.num_tokens].long()
        proposals = None
        if is_plain:
            (prefix,) = upload_vectors([before], self._device)
            extend, ahead = batch.ones, batch.zeros
        else:
            known_ahead = [
                request.sampled_ahead(row)
                for request, row in zip(batch.requests, rows, strict=True)
            ]
            each_is_due = all(number >= 0 for number in known_ahead)
            scheduled = [row.scheduled for row in rows]
            drafts = [row.drafts for row in rows]
            if self._lengths is not None:
                before = [
                    -1 if request.is_estimated else length
                    for request, length in zip(batch.requests, before, strict=True)
                ]
            prefix, extend, ahead, drafted = upload_vectors(
                [before, scheduled, known_ahead, drafts], self._device
            )
            if self._lengths is not None:
                prefix = self._lengths.prefix_lens(batch.req_rows, prefix)
                proposals = Proposals(
                    req_rows=batch.req_rows,
                    salts=batch.salts,
                    prefix_lens=prefix,
                    extend_lens=extend,
                    drafts=drafted,
                    input_ids=ids,
                )
        is_decode = reads.num_tokens == len(rows)
        self._sampling = SampledRows(
            req_rows=batch.req_rows,
            serials=batch.serials,
            prefix_lens=prefix,
            ahead=ahead,
            each_is_due=each_is_due,
            proposals=proposals,
        )
        return partial(
            ForwardView,
            req_rows=batch.req_rows,
            prefix_lens=prefix,
            extend_lens=extend,
            serials=batch.serials,
            salts=batch.salts,
            qo_indptr=reads.query_start_loc[: len(rows) + 1].long(),
            input_ids=ids,
            positions=reads.positions[: reads.num_tokens].long(),
            writer_kind=WriterKind.DECODE if is_decode else WriterKind.EXTEND,
        )
