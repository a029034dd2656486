"""Which request has which row of SGLang's `req_to_token`, and after which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.engines.namespaces import namespace_salt
from kv_canary.records import draft_seed, extend_lineage
from kv_canary.serials import SerialMap


@dataclass(slots=True, kw_only=True)
class RegisteredRow:
    """A row of the table and its request.

    Fields:
        number: number of the row.
        length: tokens with KV before its next forward.
        lineage: their lineage; shifted: the lineage of the tokens after each of them,
            which the slots of a draft model hold, after `seed`.
    """

    rid: str
    number: int
    serial: int
    salt: int
    length: int = 0
    lineage: int = 0
    shifted: int = 0
    seed: int = 0


class RowRegistry:
    """Rows by request.

    Attributes:
        serials: requests by serial.
        has_draft: whether `RegisteredRow.shifted` is kept.
    """

    def __init__(self) -> None:
        self.serials = SerialMap()
        self.has_draft = False
        self._by_number: dict[int, RegisteredRow] = {}
        self._by_rid: dict[str, RegisteredRow] = {}
        self._next_serial = 1

    def announce(self, request: Any) -> RegisteredRow:
        """Register a request that is about to prefill, and return its row."""
        number, rid, salt = (
            int(request.req_pool_idx),
            str(request.rid),
            request_salt(request),
        )
        row = self._by_number.get(number)
        if row is None or (row.rid, row.salt) != (rid, salt):
            row = self._give(number, rid, salt)
        prefix = len(request.prefix_indices)
        if prefix < row.length:
            row.length, row.lineage = 0, 0
        if self.has_draft:
            if not row.length:
                first = int(request_tokens(request, 0, 1)[0])
                row.seed = row.shifted = draft_seed(first, salt)
            row.shifted = _extended(row, row.shifted, request, prefix, shift=1)
        row.lineage = _extended(row, row.lineage, request, prefix)
        row.length = prefix
        return row

    def _give(self, number: int, rid: str, salt: int) -> RegisteredRow:
        old = self._by_number.get(number)
        if old is not None and self._by_rid.get(old.rid) is old:
            del self._by_rid[old.rid]
        row = RegisteredRow(rid=rid, number=number, serial=self._next_serial, salt=salt)
        self._next_serial += 1
        self._by_number[number] = self._by_rid[rid] = row
        self.serials.add(row.serial, rid)
        return row

    def find_rows(self, rids: Sequence[str]) -> list[RegisteredRow]:
        """Return the rows of requests.

        Raises:
            RuntimeError: a request was never announced.
        """
        try:
            return [self._by_rid[rid] for rid in rids]
        except KeyError as error:
            raise RuntimeError(
                f"kv_canary: the forward has a row of request {error}, which never "
                "went through ScheduleBatch.prepare_for_extend"
            ) from None

    def rows(self) -> list[RegisteredRow]:
        """Return all rows that were given out."""
        return list(self._by_number.values())


def _extended(
    row: RegisteredRow, lineage: int, request: Any, prefix: int, *, shift: int = 0
) -> int:
    """Return the lineage after the tokens of slots [row.length, prefix)."""
    tokens = request_tokens(request, row.length + shift, prefix + shift)
    if len(tokens) != prefix - row.length:
        raise RuntimeError(
            f"kv_canary: request {row.rid!r} has {prefix} tokens in its KV, but only "
            f"{row.length + len(tokens)} are known"
        )
    return extend_lineage(lineage, tokens, start_position=row.length, salt=row.salt)


def request_tokens(request: Any, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Return tokens [begin, end) of a request's prompt and output."""
    prompt, output = request.origin_input_ids, request.output_ids
    n = len(prompt)
    parts = [
        np.asarray(prompt[begin:end], dtype=np.int64),
        np.asarray(output[max(begin - n, 0) : max(end - n, 0)], dtype=np.int64),
    ]
    return np.concatenate(parts)


def request_salt(request: Any) -> int:
    """Return the namespace of a request's KV: its adapter and its cache key."""
    adapter, tenant = (getattr(request, n, None) for n in ("lora_id", "extra_key"))
    return namespace_salt(adapter=adapter, tenant=tenant)
