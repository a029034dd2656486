"""A model runner driven forward by forward, without a scheduler, for tests."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_canary.evidence import Owner
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.kv_canary.api import install_canary, watcher_bytes_per_slot
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import extend_rows
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    HostLens,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.test.scale import with_canary


@dataclasses.dataclass(eq=False, kw_only=True)
class _Row:
    """A request as the canary sees it."""

    tokens: array[int]
    salt: int = 0
    serial: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.tokens)


class ForwardHarness:
    """Keeps rows of tokens and how many of them have KV; runs one forward at a time."""

    def __init__(
        self,
        model: Path,
        *,
        slots: int = 2048,
        is_draft_worker: bool = False,
        **server_args: Any,
    ) -> None:
        args = ServerArgs(
            model_path=str(model), max_total_tokens=slots, **with_canary(server_args)
        )
        self.runner = ModelRunner(
            server_args=args,
            model_config=ModelConfig.from_path(model),
            is_draft_worker=is_draft_worker,
            watcher_bytes_per_slot=watcher_bytes_per_slot(args),
        )
        self.runner.initialize()
        self.canary = install_canary(server_args=args, model_runner=self.runner)
        self.pool = self.runner.req_to_token_pool
        self.cache = ChunkCache(
            req_to_token_pool=self.pool, allocator=self.runner.allocator
        )
        self._tokens: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}

    def new_row(
        self, tokens: Sequence[int], *, borrow: tuple[int, int] | None = None
    ) -> int:
        """Allocate a row for these tokens; `borrow` (row, n) shares another's slots."""
        rows = self.pool.alloc(1)
        assert rows is not None
        row = rows[0]
        self._tokens[row], self._written[row] = list(tokens), 0
        if borrow is not None:
            other, count = borrow
            self.pool.write(row, 0, self.pool.row_slots(other, 0, count))
            self._written[row] = count
        return row

    def release(self, row: int) -> None:
        """Free a row and all of its slots; nothing may have borrowed them."""
        slots = self.pool.row_slots(row, 0, self._written.pop(row))
        self.runner.allocator.free(slots)
        self.pool.free([row])
        del self._tokens[row]

    def tokens(self, row: int) -> list[int]:
        return self._tokens[row]

    def append(self, row: int, token: int) -> None:
        self._tokens[row].append(token)

    def extend(self, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Prefill each (row, end); return the last tokens' logits, float32 [R, V]."""
        return self.forward(ForwardMode.EXTEND, spans)

    def forward(
        self, mode: ForwardMode, spans: Sequence[tuple[int, int | None]]
    ) -> torch.Tensor:
        """Run each (row, end) and return the logits; end None: one more token."""
        return self.forward_output(mode, spans).next_token_logits

    def forward_output(
        self, mode: ForwardMode, spans: Sequence[tuple[int, int | None]]
    ) -> LogitsProcessorOutput:
        return self.run(self.prepare(mode, spans))

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run a prepared forward; the KV canary, if on, must find nothing.

        The output may be views of a graph's memory: see `CudaGraphRunner.replay`.
        """
        output = self.runner.forward(batch)
        manager = self.canary
        if manager is not None and manager.take(manager.finish_step(batch).tolist()):
            manager.report(
                owner_of=lambda slot: Owner("unknown"),
                tokens_of=lambda serial: self._tokens.get(serial),
            )
        return output

    def prepare(
        self, mode: ForwardMode, spans: Sequence[tuple[int, int | None]]
    ) -> ForwardBatch:
        """Allocate the slots and build the forward batch."""
        rows = [row for row, _ in spans]
        starts = [self._written[row] for row in rows]
        ends = [
            start + 1 if end is None else end
            for start, (_, end) in zip(starts, spans, strict=True)
        ]
        slots = extend_rows(self.cache, rows=rows, prefix_lens=starts, seq_lens=ends)
        assert slots is not None
        intervals = list(zip(rows, starts, ends, strict=True))
        lens = torch.tensor(ends) - torch.tensor(starts)
        indptr = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
        for row, end in zip(rows, ends, strict=True):
            self._written[row] = end
            # As the scheduler does: inputs are compared with what was published.
            known = torch.tensor(self._tokens[row])
            self.pool.write_tokens([row], [0], [len(known)], known)
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        if self.canary is not None and mode is ForwardMode.EXTEND:
            owners = [
                _Row(tokens=array("q", self._tokens[row]), serial=row) for row in rows
            ]
            indices = torch.tensor(rows, device=self.runner.device)
            self.canary.expect_prefixes(owners, starts, indices)
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=torch.tensor(
                [
                    t
                    for row, start, end in intervals
                    for t in self._tokens[row][start:end]
                ]
            ),
            positions=torch.from_numpy(
                np.concatenate([np.arange(start, end) for _, start, end in intervals])
            ),
            out_cache_loc=slots,
            req_pool_indices=torch.tensor(rows),
            prefix_lens=torch.tensor(starts),
            extend_lens=lens,
            seq_lens=torch.tensor(ends),
            req_serial=torch.tensor(rows),
            salt=zeros,
            rids_int=zeros,
            qo_indptr=None if mode.is_decode else indptr,
            lens_cpu=HostLens(prefix_lens=starts, extend_lens=lens.tolist()),
            logits_rows=None if mode.is_decode else indptr[1:] - 1,
        )
        return _on_device(batch, self.runner.device)


def _on_device(batch: ForwardBatch, device: str) -> ForwardBatch:
    moved: dict[str, Any] = {
        field.name: value.to(device)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)
