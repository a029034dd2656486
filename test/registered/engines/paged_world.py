"""A paged pool and a scheduler of three lines, for the canary inside engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kv_canary.engines.engine_canary import EngineCanary
from kv_canary.engines.group_canary import Group
from kv_canary.engines.page_probe import learn_latent_pages, learn_pages, page_axis
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.step import Admission, ForwardReads, GroupReads, RowStep, Step

PAGE, PAGES, LAYERS, HEADS, DIM = 8, 24, 3, 2, 16
MAX_LEN, COLUMNS = 96, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("one allocation", "K before V", "K transposed")
HALVED_PAGES = "K before V in each page"
HEADS_FIRST = "heads before slots"
"""As vLLM's backends on GPUs store it, K and V of a head side by side."""
LATENT, ROTATED = "one latent per token", 16
"""Values of a token: those of all heads, and some that are rotated by position."""


class Pool:
    """KV of three layers, stored as engines do it."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        if layout == "one allocation":
            shape: tuple[int, ...] = (LAYERS, PAGES, PAGE, HEADS, 2 * DIM)
            self.layers = list(torch.zeros(shape, dtype=dtype, device=DEVICE))
        elif layout == "K before V":
            shape = (2, PAGES, PAGE, HEADS, DIM)
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(LAYERS)
            ]
        elif layout == HEADS_FIRST:
            shape = (PAGES, HEADS, PAGE, 2 * DIM)
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(LAYERS)
            ]
        elif layout == LATENT:
            shape = (PAGES, PAGE, HEADS * DIM + ROTATED)
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(LAYERS)
            ]
        elif layout == HALVED_PAGES:
            shape = (PAGES, 2, PAGE, HEADS, DIM)
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(LAYERS)
            ]
        else:
            shape = (PAGES, HEADS, 2, PAGE * DIM)
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(LAYERS)
            ]

    def store(self, kv: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Keys and values [n, heads, dim] of one layer; slots below 0 are skipped."""
        for i, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, PAGE)
            if slot < 0:
                continue
            if self.layout == "one allocation":
                kv[page, offset, :, :DIM], kv[page, offset, :, DIM:] = k[i], v[i]
            elif self.layout == "K before V":
                kv[0, page, offset], kv[1, page, offset] = k[i], v[i]
            elif self.layout == LATENT:
                kv[page, offset, : HEADS * DIM] = k[i].flatten()
                kv[page, offset, HEADS * DIM :] = v[i].flatten()[:ROTATED]
            elif self.layout == HEADS_FIRST:
                kv[page, :, offset, :DIM], kv[page, :, offset, DIM:] = k[i], v[i]
            elif self.layout == HALVED_PAGES:
                kv[page, 0, offset], kv[page, 1, offset] = k[i], v[i]
            else:
                kv[page, :, 0, offset::PAGE] = k[i]
                kv[page, :, 1, offset * DIM : (offset + 1) * DIM] = v[i]

    def group(self, name: str = "full", window: int | None = None) -> Group:
        kv = self.layers[0]
        like = torch.ones((1, HEADS, DIM), dtype=kv.dtype, device=DEVICE)
        where: Any = {
            "name": "layer 0",
            "axis": page_axis(kv, PAGES, "layer 0"),
            "page_size": PAGE,
        }

        def store(k: Tensor, v: Tensor, slots: Tensor) -> None:
            self.store(kv, k, v, slots)

        if self.layout == LATENT:
            parts = (like.flatten()[None], like.flatten()[None, :ROTATED])
            pages = learn_latent_pages(kv, store, parts=parts, **where)
        else:
            pages = learn_pages(kv, store, k_like=like, v_like=like, **where)
        return Group(
            name=name, layers=self.layers, pages=pages, num_blocks=PAGES, window=window
        )


def found_since(canary: EngineCanary, before: int) -> list[tuple[str, int, int, str]]:
    """Return (request, slot, position, reasons) of all that was found after so many
    incidents."""
    return [
        (v["rid"], v["slot"], v["position"], "+".join(v["reasons"]))
        for incident in list(canary.reporter.incidents)[before:]
        for v in incident["violations"]
    ]


class World:
    """Requests by name, with their blocks; what the canary is told and what is read.

    Attributes:
        canary: of the pool, mode `log`.
        tables: block numbers that attention reads, by request: faults go here.
        is_synchronous: whether the host knows sampled tokens before the next step.
        judges_ahead: whether it plans the next step before it knows how many proposals
            were accepted, and which they were.
        in_attention: by layer, what its attention does besides.
    """

    def __init__(
        self,
        layout: str = LAYOUTS[0],
        *,
        real_data: str = "rotate",
        window: int | None = None,
        is_cached: bool = True,
        mode: Mode = Mode.LOG,
        dtype: torch.dtype = torch.float32,
        is_synchronous: bool = True,
        in_pass: bool = False,
        sample: float = 1.0,
        judges_ahead: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.pool = Pool(layout, dtype)
        self.canary = EngineCanary(
            [self.pool.group(window=window)],
            Settings(mode=mode, real_data=real_data, sample=sample),
            num_rows=8,
            max_len=MAX_LEN,
            is_cached=is_cached,
            judges_ahead=judges_ahead,
        )
        self.judges_ahead = judges_ahead
        self._unheard: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.is_synchronous = is_synchronous
        self.canary.groups[0].compares_in_pass = in_pass
        self.in_attention: dict[int, Callable[[], None]] = {}
        self._next_block = 1

    def blocks(self, count: int) -> list[int]:
        """Blocks that nobody had before."""
        begin, self._next_block = self._next_block, self._next_block + count
        return list(range(begin, begin + count))

    def admission(
        self, rid: str, tokens: Sequence[int], blocks: Sequence[int], computed: int = 0
    ) -> Admission:
        self.tables[rid], self.tokens[rid] = list(blocks), list(tokens)
        self.computed[rid] = computed
        return Admission(
            rid=rid, tokens=list(tokens), blocks=[list(blocks)], computed=computed
        )

    def slot(self, rid: str, position: int) -> int:
        return self.tables[rid][position // PAGE] * PAGE + position % PAGE

    def forward(
        self,
        rows: dict[str, int],
        *,
        skipped: Sequence[tuple[str, int]] = (),
        slots: dict[tuple[str, int], int] | None = None,
        seq_lens: dict[str, int] | None = None,
        inputs: dict[tuple[str, int], int] | None = None,
        proposed: dict[str, list[int]] | None = None,
        accepted: dict[str, int] | None = None,
        **step: Any,
    ) -> list[tuple[str, int, int, str]]:
        """One step in which requests get new tokens; (request, slot, position,
        reasons) of all that is found.

        Args:
            skipped: (request, position) that the model does not store.
            slots: by (request, position), where it is told to store instead.
            seq_lens: by request, what attention is told to read.
            inputs: by (request, position), the token that the model gets instead.
            proposed: by request, its last new tokens.
            accepted: by request, how many of them the sampler takes; none by default.

        A row with more new tokens than are known gets proposals, all accepted.
        """
        before = len(self.canary.reporter.incidents)
        proposed, accepted = dict(proposed or {}), dict(accepted or {})
        for rid, count in rows.items():
            more = self.computed[rid] + count - len(self.tokens[rid])
            if rid not in proposed and more > 0:
                proposed[rid] = [self.random.randrange(1000) for _ in range(more)]
                accepted[rid] = more
        scheduled = [
            self._row_step(rid, count, proposed.get(rid, ()))
            for rid, count in rows.items()
        ]
        self.canary.plan(Step(rows=scheduled, **step))
        ids: list[int] = []
        positions: list[int] = []
        written: list[int] = []
        stored: list[int] = []
        starts = [0]
        for rid, count in rows.items():
            begin = self.computed[rid]
            known = [*self.tokens[rid], *proposed.get(rid, ())]
            for position in range(begin, begin + count):
                token = (inputs or {}).get((rid, position), known[position])
                ids.append(token)
                positions.append(position)
                place = (slots or {}).get((rid, position), self.slot(rid, position))
                written.append(place)
                stored.append(-1 if (rid, position) in skipped else place)
            starts.append(len(ids))
        table = torch.zeros((len(rows), COLUMNS), dtype=torch.int32, device=DEVICE)
        for row, rid in enumerate(rows):
            blocks = self.tables[rid]
            table[row, : len(blocks)] = torch.tensor(blocks, device=DEVICE)
        lens = [
            (seq_lens or {}).get(rid, self.computed[rid] + count)
            for rid, count in rows.items()
        ]
        self.canary.before(
            ForwardReads(
                rids=list(rows),
                num_tokens=len(ids),
                input_ids=torch.tensor(ids, dtype=torch.int32, device=DEVICE),
                positions=torch.tensor(positions, device=DEVICE),
                query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
                seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
                groups=[
                    GroupReads(
                        block_table=table,
                        slot_mapping=torch.tensor(written, device=DEVICE),
                    )
                ],
            )
        )
        for layer, kv in enumerate(self.pool.layers):
            k, v = torch.randn(2, len(ids), HEADS, DIM).to(kv)
            self.pool.store(kv, k, v, torch.tensor(stored))
            if self.canary.groups[0].compares_in_pass:
                self.canary.groups[0].attend(layer)
            self.in_attention.get(layer, lambda: None)()
        self.canary.after()
        self._sample(scheduled, proposed, accepted)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.canary.poll()
        return found_since(self.canary, before)

    def _row_step(self, rid: str, count: int, proposed: Sequence[int]) -> RowStep:
        computed = self.computed[rid]
        if self.judges_ahead:
            computed += self._unheard.pop(rid, 0)
            proposed = [-1] * len(proposed)
        return RowStep(rid, computed, count, proposed)

    def _sample(
        self,
        rows: Sequence[RowStep],
        proposed: dict[str, list[int]],
        accepted: dict[str, int],
    ) -> None:
        """Draw the next token of each row, after the proposed ones that are taken; for
        a row whose prompt goes on, one that nobody takes."""
        width = 1 + max(row.drafts for row in rows)
        drawn = torch.full((len(rows), width), -1, dtype=torch.int32, device=DEVICE)
        for line, row in zip(drawn, rows, strict=True):
            taken = accepted.get(row.rid, 0)
            mine = proposed.get(row.rid, [])
            new = [*mine[:taken], self.random.randrange(1000)]
            line[: len(new)] = torch.tensor(new)
            tokens = self.tokens[row.rid]
            self.computed[row.rid] += row.scheduled - row.drafts + taken
            self._unheard[row.rid] = row.drafts - taken
            if self.computed[row.rid] >= len(tokens):
                tokens += new
                if self.is_synchronous:
                    self.canary.note_tokens(row.rid, new)
        self.canary.sampled(drawn)

    def start(self, rid: str = "A", count: int = 20) -> list[int]:
        """A request of `count` tokens, prefilled and found clean; its blocks."""
        blocks = self.blocks(-(-(count + 12) // PAGE))
        tokens = [self.random.randrange(1000) for _ in range(count)]
        new = self.admission(rid, tokens, blocks)
        assert self.forward({rid: count}, admitted=[new]) == []
        return blocks
