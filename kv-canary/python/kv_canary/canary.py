"""The canary of one pool, for engines without an adapter of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.layout import FingerprintMode, PoolLayout, create_fingerprint
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import request_lineage
from kv_canary.reporter import ReportOptions, ViolationReporter, as_error
from kv_canary.serials import SerialMap
from kv_canary.state import create_state

if TYPE_CHECKING:
    from kv_canary.view import ForwardView
    from kv_canary.violation import Violation


class Canary:
    """Records for every slot of a pool, checked by each forward.

    Args:
        layout: layout of the pool.
        req_to_token: int32 [requests + 1, W], slots by request row and position; row 0
            is padding.
        mode: which bytes are fingerprinted.
        options: how violations are reported.
        ring_capacity: violations that are kept between two calls of `violations`.

    Attributes:
        serials: requests by serial; callers add each request they admit.
        reporter: reporter of everything found so far.

    Raises:
        ValueError: the pool's bytes cannot be fingerprinted, or a size is impossible.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        req_to_token: Tensor,
        mode: FingerprintMode = FingerprintMode.PARTIAL,
        options: ReportOptions | None = None,
        ring_capacity: int = 1024,
    ) -> None:
        self._state = create_state(
            num_slots=layout.num_slots,
            req_rows=req_to_token.shape[0],
            ring_capacity=ring_capacity,
            num_managers=1,
            device=layout.device,
        )
        self._checks = PoolChecks(
            page_size=layout.page_size,
            fingerprint=create_fingerprint(mode, layout),
            req_to_token=req_to_token,
        )
        self._options = options or ReportOptions()
        self.serials = SerialMap()
        self.reporter = ViolationReporter(
            self._options, page_size=layout.page_size, serials=self.serials
        )

    def expect_prefix(self, req_row: int, tokens: Sequence[int], salt: int = 0) -> None:
        """Announce that the next forward of `req_row` continues after these tokens,
        which another request, or an earlier one in this row, has written."""
        row = torch.tensor([req_row], device=self._state.head.device)
        lineage = torch.tensor([request_lineage(list(tokens), salt)]).to(row.device)
        launches.set_lineage(self._state, row, lineage)

    @contextmanager
    def forward(self, view: ForwardView) -> Iterator[None]:
        """Scope of a model forward without a tree. Check the slots of `view.reads`
        before it, then record the new tokens' slots over the bytes that it stored."""
        launches.before_model(self._state, view, self._checks)
        yield
        launches.write_tail(self._state, view, self._checks, advance=True)

    def free(self, slots: Tensor) -> None:
        """Poison slots [n] int64. Reading them before the next write is then
        reported."""
        launches.poison(self._state, slots)

    def move(self, *, dst: Tensor, src: Tensor) -> None:
        """Move the records of slots `src` to `dst` ([n] int64 each), after moving their
        bytes."""
        launches.move_records(self._state, dst=dst, src=src)

    def violations(self) -> list[Violation]:
        """Return, log and keep all violations since the last call. Waits for the
        device."""
        count, capacity = int(self._state.ring_count), self._state.ring.shape[0]
        entries = self._state.ring[: min(count, capacity)].tolist()
        self._state.ring_count.zero_()
        return self.reporter.report(entries, dropped=max(count - capacity, 0))

    def raise_violations(self) -> None:
        """Raise the violations since the last call, if there are any.

        Raises:
            CanaryViolation: its text has all of them.
        """
        found = self.violations()
        if found:
            raise as_error(found, with_tokens=self._options.with_tokens)
