"""A paged pool and a scheduler that keeps recurrent states in blocks, as vLLM does: the
state of a request lies in the block of its newest token, and is copied to the next one
before a forward that ends there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from paged_world import (
    DEVICE,
    DIM,
    HEADS,
    LAYOUTS,
    MAX_LEN,
    PAGE,
    PAGES,
    Pool,
    found_since,
)
from torch import Tensor

from kv_canary.engines.engine_canary import EngineCanary
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.state_canary import StateGroup, StatePool
from kv_canary.engines.step import Admission, ForwardReads, GroupReads, RowStep, Step

STATES, KV, MORE_STATES = GROUPS = range(3)
"""The groups of the tables."""
LAYERS = {STATES: (0, 2), MORE_STATES: (3,)}
WORDS = 1600
"""Of the larger part of a state: more than one run of `rotate`."""
Found = list[tuple[str, int, int, str]]
"""(request, block, position, reasons)."""


class StateWorld:
    """
    Args:
        is_one_block: whether a state stays in one block, as without a prefix cache.

    Attributes:
        blocks: by request and group, from index 0 on; 0 where there is none.
        given: by (group, request), the block that the layers get instead of the due
            one.
        before_read: called when states were copied, before they are checked.
        wild: requests of whose states a value becomes NaN.
    """

    def __init__(
        self,
        *,
        real_data: str = "all",
        is_one_block: bool = False,
        sample: float = 1.0,
        sweep_interval: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.tokens_of_block = MAX_LEN if is_one_block else PAGE
        self.kv = Pool(LAYOUTS[0])
        self.parts = {
            group: [
                [
                    torch.zeros(PAGES, 3, 40, dtype=torch.bfloat16, device=DEVICE),
                    torch.zeros(PAGES, 2, WORDS // 2, device=DEVICE),
                ]
                for _ in layers
            ]
            for group, layers in LAYERS.items()
        }
        self.canary = EngineCanary(
            [dataclasses.replace(self.kv.group(), number=KV)],
            Settings(
                mode=Mode.LOG,
                real_data=real_data,
                sample=sample,
                sweep_interval=sweep_interval,
            ),
            num_rows=8,
            max_len=MAX_LEN,
            is_cached=not is_one_block,
            states=StatePool(
                name="state",
                groups=[
                    StateGroup(number=g, layers=self.parts[g], numbers=LAYERS[g])
                    for g in LAYERS
                ],
                num_blocks=PAGES,
                block_tokens=self.tokens_of_block,
            ),
        )
        self.canary.warm_up()
        self.blocks: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.given: dict[tuple[int, str], int] = {}
        self.before_read: Callable[[], None] = lambda: None
        self.wild: set[str] = set()
        self._admitted: list[str] = []
        self._free = list(range(PAGES - 1, 0, -1))

    def admit(
        self, rid: str, tokens: Sequence[int], cached: Sequence[Sequence[int]] = ()
    ) -> None:
        """Let a request begin with the next forward.

        Args:
            cached: blocks of its cached prefix, by group.
        """
        self.tokens[rid] = list(tokens)
        self.blocks[rid] = [list(of_group) for of_group in cached] or [[], [], []]
        self.computed[rid] = len(self.blocks[rid][KV]) * PAGE
        self._admitted.append(rid)

    def cached(self, rid: str, count: int) -> list[list[int]]:
        """Return the cached blocks of a request's first `count` full blocks: of states
        only the last one."""
        blocks = self.blocks[rid]
        last = [[*[0] * (count - 1), blocks[group][count - 1]] for group in LAYERS]
        return [last[0], blocks[KV][:count], last[1]]

    def block(self, rid: str, group: int = STATES) -> int:
        """Return the block of a request's newest state."""
        return self.blocks[rid][group][(self.computed[rid] - 1) // self.tokens_of_block]

    def tensors(self, group: int = STATES) -> list[Tensor]:
        return [tensor for layer in self.parts[group] for tensor in layer]

    def forward(self, rows: dict[str, int], released: Sequence[str] = ()) -> Found:
        """One step in which requests get new tokens; returns what is found."""
        before = len(self.canary.reporter.incidents)
        steps = []
        for rid, count in rows.items():
            begin = self.computed[rid]
            missing = begin + count - len(self.tokens[rid])
            self.tokens[rid] += [self.random.randrange(1000) for _ in range(missing)]
            steps.append(RowStep(rid, begin, count))
        self.canary.plan(self._plan(steps, released))
        for step in steps:
            self._copy(step)
        self.before_read()
        reads, slots = self._reads(steps)
        self.canary.before(reads)
        for kv in self.kv.layers:
            k, v = torch.randn(2, len(slots), HEADS, DIM).to(kv)
            self.kv.store(kv, k, v, slots)
        for step in steps:
            self._fold(step)
        self.canary.after()
        for rid, count in rows.items():
            self.computed[rid] += count
            self.canary.ledger[rid].tokens[:] = self.tokens[rid]
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.canary.poll()
        return found_since(self.canary, before)

    def _plan(self, steps: Sequence[RowStep], released: Sequence[str]) -> Step:
        admitted, grown = [], []
        for step in steps:
            end = step.computed + step.scheduled
            more = [
                self._grow(step.rid, group, -(-end // self._span(group)))
                for group in GROUPS
            ]
            if step.rid in self._admitted:
                self._admitted.remove(step.rid)
                admitted.append(
                    Admission(
                        rid=step.rid,
                        tokens=self.tokens[step.rid],
                        blocks=[list(blocks) for blocks in self.blocks[step.rid]],
                        computed=step.computed,
                    )
                )
            elif any(more):
                grown.append((step.rid, more))
        return Step(rows=steps, admitted=admitted, grown=grown, released=released)

    def _span(self, group: int) -> int:
        return PAGE if group == KV else self.tokens_of_block

    def _grow(self, rid: str, group: int, count: int) -> list[int]:
        """Add blocks up to `count`; of states only the last one is real."""
        blocks = self.blocks[rid][group]
        more = [
            self._free.pop() if group == KV or index == count - 1 else 0
            for index in range(len(blocks), count)
        ]
        blocks += more
        return more

    def _ends(self, step: RowStep, group: int) -> tuple[int, int]:
        """Return the blocks of the state before a step (0: none) and after it."""
        blocks, span = self.blocks[step.rid][group], self._span(group)
        first = blocks[(step.computed - 1) // span] if step.computed else 0
        return first, blocks[(step.computed + step.scheduled - 1) // span]

    def _copy(self, step: RowStep) -> None:
        for group in LAYERS:
            first, last = self._ends(step, group)
            for tensor in self.tensors(group):
                tensor[last] = tensor[first if first else last]

    def _fold(self, step: RowStep) -> None:
        for group in LAYERS:
            block = self.given.get((group, step.rid), self._ends(step, group)[1])
            for tensor in self.tensors(group):
                tensor[block] = torch.randn(tensor[block].shape).to(tensor)
                if step.rid in self.wild:
                    tensor[block].view(-1)[-1] = float("nan")

    def _reads(self, steps: Sequence[RowStep]) -> tuple[ForwardReads, Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        on = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
        table = torch.zeros(len(steps), MAX_LEN // PAGE, dtype=torch.int32)
        for row, step in enumerate(steps):
            end = step.computed + step.scheduled
            ids += self.tokens[step.rid][step.computed : end]
            positions += range(step.computed, end)
            starts.append(len(ids))
            blocks = self.blocks[step.rid][KV]
            table[row, : len(blocks)] = torch.tensor(blocks)
        rows = torch.repeat_interleave(torch.tensor(starts).diff())
        place = torch.tensor(positions)
        slots = table[rows, place // PAGE].long() * PAGE + place % PAGE
        reads = ForwardReads(
            rids=[step.rid for step in steps],
            num_tokens=len(ids),
            input_ids=on(ids),
            positions=place.to(DEVICE),
            query_start_loc=on(starts),
            seq_lens=on([step.computed + step.scheduled for step in steps]),
            groups=[
                GroupReads(block_table=table.to(DEVICE), slot_mapping=slots.to(DEVICE))
            ],
            states=[
                on([self.given.get((g, s.rid), self._ends(s, g)[1]) for s in steps])
                for g in LAYERS
            ],
        )
        return reads, slots
