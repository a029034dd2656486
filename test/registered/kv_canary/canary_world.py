"""Healthy pools with requests in them, for the tests of the canary's kernels.

`World` lays out requests in pages, runs their prefill through the torch reference and
builds the rows and the read table of the next forward.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.checks import Reason
from kv_canary.findings import STATUS_WORDS
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.op import native_available
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import Ring, WriterKind, draft_seed, extend_lineage
from kv_canary.state import CanaryState, create_state
from kv_canary.view import ForwardView, KVReadView

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQ_ROWS, WIDTH = 8, 320
LENS = [11, 6, 20]
LAYERS, HEADS, DIM = 3, 2, 8


class Backend(NamedTuple):
    """One form of all launches, by name: `launch.verify`, `launch.write_head`, ..."""

    name: str
    launch: SimpleNamespace


def _launches(form: str) -> SimpleNamespace:
    found = {}
    for op in vars(launches).values():
        if hasattr(op, "reference"):
            at = getattr(op, form)
            if isinstance(at, str):
                module, _, name = at.partition(":")
                at = getattr(importlib.import_module(module), name)
            found[op.reference.__name__] = at
    return SimpleNamespace(**found)


def backends() -> list[Backend]:
    """Implementations that can run here, the reference first."""
    names = ["reference"]
    if DEVICE == "cpu" and native_available():
        names.append("native")
    if find_spec("triton") is not None:
        names.append("triton")
    return [Backend(name, _launches(name)) for name in names]


each_backend = pytest.mark.parametrize("backend", backends(), ids=lambda b: b.name)


def long(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def entries(state: CanaryState) -> list[tuple[int, ...]]:
    n = min(int(state.ring_count), state.ring.shape[0])
    return sorted(tuple(row) for row in state.ring[:n].tolist())


def findings(state: CanaryState) -> list[tuple[Reason, int, int, int]]:
    """(reasons, request row, slot, position) of each ring entry, sorted."""
    columns = (Ring.REASONS, Ring.REQ_ROW, Ring.SLOT, Ring.POSITION)
    found = [tuple(entry[c] for c in columns) for entry in entries(state)]
    return sorted((Reason(r), row, slot, p) for r, row, slot, p in found)


@dataclasses.dataclass(kw_only=True)
class World:
    """Requests in rows 1 .. of `req_to_token`; `lens` are their prefix lengths."""

    lens: list[int]
    page_size: int = 1
    mode: FingerprintMode = FingerprintMode.NONE
    period: int = 4
    draft: bool = False
    seed: int = 0
    ring_capacity: int = 4096

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        torch.manual_seed(self.seed)
        n, page = len(self.lens), self.page_size
        self.pages_each = -(-WIDTH // page)
        pages = [1 + i for i in range(n * self.pages_each)]
        self.random.shuffle(pages)
        self.num_slots = page * (len(pages) + 1)
        self.req_to_token = torch.zeros(
            REQ_ROWS, WIDTH, dtype=torch.int32, device=DEVICE
        )
        for i in range(n):
            own = pages[i * self.pages_each : (i + 1) * self.pages_each]
            slots = [page * q + j for q in own for j in range(page)][:WIDTH]
            self.req_to_token[i + 1] = torch.tensor(slots, dtype=torch.int32)
        self.tokens = torch.randint(
            0, 50_000, (REQ_ROWS, WIDTH + 1), dtype=torch.int32
        ).to(DEVICE)
        self.salts = [self.random.getrandbits(62) for _ in range(n)]
        self.serials = [self.random.getrandbits(40) for _ in range(n)]
        self.k = torch.randn(LAYERS, self.num_slots, HEADS, DIM).to(DEVICE)
        self.v = torch.randn(LAYERS, self.num_slots, HEADS, DIM).to(DEVICE)
        group = LayerGroup(name="full", k=self.k, v=self.v)
        self.fingerprint: Fingerprint = create_fingerprint(
            self.mode,
            PoolLayout(groups=(group,), page_size=self.page_size),
            rotation_period=self.period,
        )
        self.state = create_state(
            num_slots=self.num_slots,
            req_rows=REQ_ROWS,
            ring_capacity=self.ring_capacity,
            num_managers=2,
            device=DEVICE,
            pool=3,
        )
        self._prefill()

    @property
    def offset(self) -> int:
        return int(self.draft)

    def token(self, request: int, position: int) -> int:
        """The token that the pool holds at a position (a draft pool holds the next)."""
        return int(self.tokens[request + 1, position + self.offset])

    def published(self) -> Tensor:
        """Tokens that the inputs must be: of slot p, that of position p + offset."""
        return self.tokens

    def seed_of(self, request: int) -> int:
        first = int(self.tokens[request + 1, 0])
        return draft_seed(first, self.salts[request]) if self.draft else 0

    def lineage(self, request: int, length: int) -> int:
        return extend_lineage(
            self.seed_of(request),
            [self.token(request, p) for p in range(length)],
            start_position=0,
            salt=self.salts[request],
        )

    def slot(self, request: int, position: int) -> int:
        return int(self.req_to_token[request + 1, position])

    def _prefill(self) -> None:
        rows = self.rows(prefixes=[0] * len(self.lens), extends=self.lens)
        self.write(backends()[0], self.state, rows, WriterKind.EXTEND)
        for i, n in enumerate(self.lens):
            self.state.expected_lineage[i + 1] = self.lineage(i, n)
        assert int(self.state.ring_count) == 0
        self.state.counters.zero_()

    def rows(
        self,
        *,
        extends: list[int],
        prefixes: list[int] | None = None,
        pad: int = 0,
    ) -> ForwardView:
        """The next forward, chains; `pad` padded rows at the end."""
        prefixes = prefixes or self.lens
        new = [
            (i, p + j)
            for i, (p, e) in enumerate(zip(prefixes, extends, strict=True))
            for j in range(e)
        ]
        indptr = [sum(extends[:i]) for i in range(len(extends) + 1)]
        total = indptr[-1]
        zeros, n = [0] * pad, len(prefixes)
        return ForwardView(
            req_rows=long([i + 1 for i in range(n)] + zeros),
            prefix_lens=long(prefixes + [7] * pad),
            extend_lens=long(extends + [1] * pad),
            input_ids=long([self.token(i, p) for i, p in new] + zeros),
            positions=long([p for _, p in new] + zeros),
            out_cache_loc=long([self.slot(i, p) for i, p in new] + zeros),
            serials=long(self.serials + zeros),
            salts=long(self.salts + zeros),
            qo_indptr=(
                None
                if all(e == 1 for e in extends)
                else long(indptr + [total + i + 1 for i in range(pad)])
            ),
            seeds=long([self.seed_of(i) for i in range(n)] + zeros)
            if self.draft
            else None,
        )

    def table(
        self,
        rows: ForwardView,
        *,
        flat: bool = False,
        window: int | None = None,
        with_new: bool = True,
    ) -> KVReadView:
        """Slots that are read: a page table, or flat indices; of a window or all."""
        lens = rows.prefix_lens + (rows.extend_lens if with_new else 0)
        first = torch.zeros_like(lens)
        if window is not None:
            first = (rows.prefix_lens - window).clamp(min=0)
            if not flat:
                first = first // self.page_size * self.page_size
        read = lens - first
        if flat:
            parts = [
                self.req_to_token[int(q), int(f) : int(f) + int(n)]
                for q, f, n in zip(rows.req_rows, first, read, strict=True)
            ]
            ends = read.cumsum(0)
            return KVReadView(
                read_lens=read,
                page_size=self.page_size,
                indptr=torch.cat([ends.new_zeros(1), ends]),
                slot_indices=torch.cat(parts),
                first_position=None if window is None else first,
                takes_new=with_new,
            )
        pages = self.req_to_token[:, :: self.page_size]
        if window is None:
            return KVReadView(
                read_lens=read,
                page_size=self.page_size,
                page_table=pages,
                row_index=rows.req_rows,
                takes_new=with_new,
            )
        shifted = torch.stack(
            [
                pages[int(q)].roll(-int(f) // self.page_size)
                for q, f in zip(rows.req_rows, first, strict=True)
            ]
        )
        return KVReadView(
            read_lens=read,
            page_size=self.page_size,
            page_table=shifted,
            first_position=first,
            takes_new=with_new,
        )

    def verify(
        self,
        backend: Backend,
        state: CanaryState,
        rows: ForwardView,
        table: KVReadView,
        *,
        tokens: Tensor | None = None,
        manager: int = -1,
        sweep: bool = False,
    ) -> None:
        view = dataclasses.replace(rows, manager=manager)
        backend.launch.verify(
            state, view, self.checks(tokens=tokens, sweep=sweep), table
        )

    def checks(
        self,
        *,
        tokens: Tensor | None = None,
        published: Tensor | None = None,
        sweep: bool = False,
    ) -> PoolChecks:
        return PoolChecks(
            page_size=self.page_size,
            fingerprint=self.fingerprint,
            req_to_token=None if sweep else self.req_to_token,
            tokens=tokens,
            token_offset=self.offset,
            published=published,
        )

    def write(
        self,
        backend: Backend,
        state: CanaryState,
        rows: ForwardView,
        kind: WriterKind = WriterKind.DECODE,
        *,
        manager: int = -1,
        oracle: tuple[Tensor, Tensor] | None = None,
        published: Tensor | None = None,
    ) -> None:
        self.head(
            backend,
            state,
            rows,
            kind,
            manager=manager,
            oracle=oracle,
            published=published,
        )
        self.tail(backend, state, rows, kind, manager=manager)

    def head(
        self,
        backend: Backend,
        state: CanaryState,
        rows: ForwardView,
        kind: WriterKind = WriterKind.DECODE,
        *,
        manager: int = -1,
        oracle: tuple[Tensor, Tensor] | None = None,
        published: Tensor | None = None,
    ) -> None:
        view = dataclasses.replace(
            rows, writer_kind=kind, manager=manager, oracle=oracle
        )
        kept = self.k.clone(), self.v.clone()
        backend.launch.write_head(state, view, self.checks(published=published))
        # The model stores what the world already holds.
        self.k.copy_(kept[0])
        self.v.copy_(kept[1])

    def advance(
        self, backend: Backend, state: CanaryState, rows: ForwardView
    ) -> Tensor:
        """Lineages after the new tokens; the findings."""
        findings = long([0] * (STATUS_WORDS + rows.num_rows))
        backend.launch.finish_step(state, rows, findings)
        return findings

    def tail(
        self,
        backend: Backend,
        state: CanaryState,
        rows: ForwardView,
        kind: WriterKind = WriterKind.DECODE,
        *,
        manager: int = -1,
        advance: bool = False,
        findings: Tensor | None = None,
    ) -> None:
        view = dataclasses.replace(rows, writer_kind=kind, manager=manager)
        backend.launch.write_tail(state, view, self.checks(), advance, findings)


def small_world(**options: object) -> World:
    """Three requests of a few tokens."""
    return World(lens=LENS.copy(), **options)  # type: ignore[arg-type]


def decode(w: World) -> ForwardView:
    """One new token per request, and a padded row."""
    return w.rows(extends=[1] * len(w.lens), pad=1)


def step(backend: Backend, w: World, rows: ForwardView) -> None:
    """A forward whose new tokens all stay."""
    w.verify(backend, w.state, rows, w.table(rows))
    w.write(backend, w.state, rows)
    w.advance(backend, w.state, rows)
    extends = rows.extend_lens.tolist()
    w.lens = [n + e for n, e in zip(w.lens, extends, strict=False)]
