"""Where the two generations of vLLM's runners keep what a fault changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kv_canary.engines.hooks import wrap_of

Undo = Callable[[], None]
Place = Callable[[str], int]
"""Returns the place of a request's first new token in the forward."""
Rids = Callable[[], Sequence[str]]
ROW_KEPT_BY_V2 = "req_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the forward that begins is about to get.

    Fields:
        ids, positions: of the new tokens. slots: where group 0 stores them.
        seq_lens: by row. place, row: of a request in these.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    place: Place
    row: Place


Change = Callable[[Inputs], None]


class Runner(Protocol):
    """A runner, as planters need it."""

    def point_to(self, group: int, rid: str, index: int, block: int) -> Undo:
        """Replace an entry of a request's table."""

    def with_inputs(self, rids: Rids, change: Change) -> Undo:
        """Let `change` alter what forwards get that have all of these requests."""

    def place(self, rid: str) -> int | None:
        """The place of a request's first new token in the forward that runs, if any."""


def of_runner(runner: Any) -> Runner:
    return V2Runner(runner) if hasattr(runner, ROW_KEPT_BY_V2) else V1Runner(runner)


def _all(steps: tuple[Undo, ...]) -> None:
    for step in steps:
        step()


def _put(table: Any, place: tuple[int, int], block: int) -> Undo:
    """Replace an entry of a table, which is an array or a tensor."""
    before = int(table[place])
    table[place] = block

    def undo() -> None:
        table[place] = before

    return undo


class V1Runner:
    """`gpu_model_runner.py`, and the CPU runner that extends it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def point_to(self, group: int, rid: str, index: int, block: int) -> Undo:
        batch = self._runner.input_batch
        row = batch.req_id_to_index[rid]
        table = batch.block_table[group].get_numpy_array()
        return _put(table, (row, index), block)

    def with_inputs(self, rids: Rids, change: Change) -> Undo:
        runner = self._runner
        slots: list[Tensor] = []

        def keep_slots(method: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            slots[:] = [result[0][0]]
            return result

        def build(method: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if any(rid not in runner.input_batch.req_id_to_index for rid in rids()):
                return result
            for metadata in {id(m): m for m in result[0].values()}.values():
                metadata.seq_lens = metadata.seq_lens.clone()
                change(
                    Inputs(
                        ids=runner.input_ids.gpu,
                        positions=runner.positions,
                        slots=slots[0],
                        seq_lens=metadata.seq_lens,
                        place=self._place,
                        row=self._row,
                    )
                )
            return result

        undo = (
            wrap_of(runner, "_get_slot_mappings", keep_slots),
            wrap_of(runner, "_build_attention_metadata", build),
        )
        return lambda: _all(undo)

    def place(self, rid: str) -> int | None:
        is_there = rid in self._runner.input_batch.req_id_to_index
        return self._place(rid) if is_there else None

    def _row(self, rid: str) -> int:
        return int(self._runner.input_batch.req_id_to_index[rid])

    def _place(self, rid: str) -> int:
        return int(self._runner.query_start_loc.np[self._row(rid)])


class V2Runner:
    """`gpu/model_runner.py`, and the CPU runner that extends it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._batch: Any = None
        # Until tokens are sampled; a draft then asks for slots of its own.
        self._is_target = False
        self._seq_lens: Tensor | None = None
        # For as long as the runner lives.
        wrap_of(runner, "prepare_inputs", self._prepare_inputs)
        wrap_of(runner, "sample", self._sample)

    def _prepare_inputs(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch, self._seq_lens = method(*args, **kwargs), None
        self._is_target = True
        return self._batch

    def _sample(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        # What lengths tell the sampler is no part of a fault in what attention reads:
        # a row that seems to be in the middle of its prompt would never end.
        self._is_target = False
        if self._seq_lens is not None:
            self._batch.seq_lens.copy_(self._seq_lens)
        return method(*args, **kwargs)

    def point_to(self, group: int, rid: str, index: int, block: int) -> Undo:
        table = self._runner.block_tables.block_tables[group].gpu
        row = self._runner.req_states.req_id_to_index[rid]
        return _put(table, (row, index), block)

    def with_inputs(self, rids: Rids, change: Change) -> Undo:
        def build(method: Any, *args: Any, **kwargs: Any) -> Any:
            slots = method(*args, **kwargs)
            batch = self._batch
            is_due = self._is_target and all(rid in batch.req_ids for rid in rids())
            if not is_due:
                return slots
            self._seq_lens = batch.seq_lens.clone()
            change(
                Inputs(
                    ids=batch.input_ids,
                    positions=batch.positions,
                    slots=slots[0],
                    seq_lens=batch.seq_lens,
                    place=self._place,
                    row=batch.req_ids.index,
                )
            )
            return slots

        return wrap_of(self._runner.block_tables, "compute_slot_mappings", build)

    def with_rejected(self, rid: str, change: Callable[[Tensor], None]) -> Undo:
        """Let `change` alter how many of a request's proposals count as rejected."""

        def count(
            method: Any,
            rows: Any,
            tokens: Any,
            sampled: Any,
            rejected: Tensor,
            *rest: Any,
        ) -> Any:
            if rid in self._batch.req_ids:
                rejected = rejected.clone()
                row = self._batch.req_ids.index(rid)
                change(rejected[row : row + 1])
            return method(rows, tokens, sampled, rejected, *rest)

        return wrap_of(self._runner, "postprocess_sampled", count)

    def place(self, rid: str) -> int | None:
        return self._place(rid) if rid in self._batch.req_ids else None

    def _place(self, rid: str) -> int:
        return int(self._batch.query_start_loc_np[self._batch.req_ids.index(rid)])
