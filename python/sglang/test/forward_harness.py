"""A model runner driven forward by forward, without a scheduler, for tests."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_canary.evidence import Owner
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.kv_canary.api import install_canary, watcher_bytes
from sglang.srt.kv_canary.runner.details import HostBooks
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import extend_rows, release_unread
from sglang.srt.mem_cache.groups.slots import GroupHold, PagedSlots
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.tree_node import TreeNode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.harness import SHARED_GPU_STATES
from sglang.test.scale import with_canary


@dataclasses.dataclass(eq=False, kw_only=True)
class _Row:
    """A request as seen by memory and canary (see `CacheableReq`).

    Slots before `cache_protected_len` are shared with or owned by other rows.
    """

    req_pool_idx: int
    tokens: array[int]
    prefix_slots: torch.Tensor
    committed_len: int = 0
    allocated_len: int = 0
    cache_protected_len: int = 0
    branch_len: int = 0
    holds: tuple[GroupHold, ...] = ()
    unready_len: int = 0
    last_node: TreeNode | None = None
    namespace: str | None = None
    no_cache: bool = True
    salt: int = 0

    def __post_init__(self) -> None:
        self.serial = self.req_pool_idx
        self.sampling_row = SamplingRow(params=SamplingParams(temperature=0.0))

    @property
    def prompt_len(self) -> int:
        return len(self.tokens)

    def fill_ids(self) -> array[int]:
        return self.tokens

    def grow(self, count: int) -> None:
        self.committed_len = self.allocated_len = count

    def share(self, count: int) -> None:
        """Share the first `count` slots of all groups with all rows."""
        self.cache_protected_len = count
        for hold in self.holds:
            assert hold.kept_from <= count, "these tokens have left the window"
            hold.kept_from = count


def _unlocked(slots: PagedSlots) -> GroupHold:
    hold = slots.hold(0)
    hold.has_lock = False
    return hold


class ForwardHarness:
    """Keeps rows of tokens and how many of them have KV; runs one forward at a time.

    Window slots that no later token of a row reads are freed before each forward, and
    filled with NaN.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: int = 2048,
        model_config: ModelConfig | None = None,
        is_draft_worker: bool = False,
        **server_args: Any,
    ) -> None:
        if torch.cuda.is_available() and not server_args.get("disable_radix_cache"):
            server_args.setdefault("max_mamba_cache_size", SHARED_GPU_STATES)
        args = ServerArgs(
            model_path=str(model), max_total_tokens=slots, **with_canary(server_args)
        )
        self.runner = ModelRunner(
            server_args=args,
            model_config=model_config
            or ModelConfig.from_path(model, quantization=args.quantization),
            is_draft_worker=is_draft_worker,
            watcher=watcher_bytes(args, is_draft=is_draft_worker),
        )
        self.runner.initialize()
        self.canary = install_canary(server_args=args, model_runner=self.runner)
        self.pool = self.runner.req_to_token_pool
        self.cache = ChunkCache(
            req_to_token_pool=self.pool, allocator=self.runner.allocator
        )
        self._rows: dict[int, _Row] = {}
        for group in self.runner.token_to_kv_pool.groups:
            if group.slots is not None:
                group.slots.register_on_free(partial(self._poison, group.tensors))

    def new_row(
        self, tokens: Sequence[int], *, borrow: tuple[int, int] | None = None
    ) -> int:
        """Allocate a row for these tokens; `borrow` (row, n) shares another's slots."""
        rows = self.pool.alloc(1)
        assert rows is not None
        row = rows[0]
        shared = torch.empty(0, dtype=torch.int64)
        if borrow is not None:
            other, count = borrow
            shared = self.pool.row_slots(other, 0, count)
            self.pool.write(row, 0, shared)
            self._rows[other].share(count)
        self._rows[row] = _Row(
            req_pool_idx=row,
            tokens=array("q", tokens),
            prefix_slots=shared,
            holds=tuple(map(_unlocked, self.runner.allocator.secondary)),
        )
        if borrow is not None:
            self._rows[row].grow(count)
            self._rows[row].share(count)
        return row

    def release(self, row: int) -> None:
        """Free a row and all of its slots; nothing may have borrowed them."""
        slots = self.pool.row_slots(row, 0, self._rows.pop(row).committed_len)
        self.runner.allocator.free(slots)
        self.pool.free([row])

    def tokens(self, row: int) -> list[int]:
        return self._rows[row].tokens.tolist()

    def books(self) -> HostBooks:
        """What the host knows of the requests, for reports."""
        return HostBooks(reader_of=self._rows.get)

    def append(self, row: int, token: int) -> None:
        self._rows[row].tokens.append(token)

    @staticmethod
    def _poison(tensors: KVCache, slots: torch.Tensor) -> None:
        for layer in range(tensors.layer_num):
            for buffer in tensors.get_kv_buffer(layer):
                buffer[slots.to(buffer.device)] = torch.nan

    def extend(self, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Prefill each (row, end); return the last tokens' logits, float32 [R, V]."""
        return self.forward(ForwardMode.EXTEND, spans)

    def forward(
        self, mode: ForwardMode, spans: Sequence[tuple[int, int | None]]
    ) -> torch.Tensor:
        """Run each (row, end) and return the logits; end None means one more token."""
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
                books=self.books(),
            )
        return output

    def prepare(
        self, mode: ForwardMode, spans: Sequence[tuple[int, int | None]]
    ) -> ForwardBatch:
        """Allocate the slots and build the forward batch."""
        rows = [row for row, _ in spans]
        requests = [self._rows[row] for row in rows]
        release_unread(self.cache, requests)
        starts = [request.committed_len for request in requests]
        ends = [
            start + 1 if end is None else end
            for start, (_, end) in zip(starts, spans, strict=True)
        ]
        slots = extend_rows(self.cache, rows=rows, prefix_lens=starts, seq_lens=ends)
        assert slots is not None
        intervals = list(zip(rows, starts, ends, strict=True))
        lens = torch.tensor(ends) - torch.tensor(starts)
        indptr = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
        for request, end in zip(requests, ends, strict=True):
            request.grow(end)
            # As the scheduler does: inputs are compared with what was published.
            known = torch.tensor(request.tokens)
            row = request.req_pool_idx
            self.pool.write_tokens([row], [0], [len(known)], known)
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        if self.canary is not None and mode is ForwardMode.EXTEND:
            indices = torch.tensor(rows, device=self.runner.device)
            self.canary.expect_prefixes(requests, starts, indices)
            # Tests look at the state, and change it, before they run the batch.
            self.canary.settle()
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=torch.tensor(
                [
                    t
                    for row, start, end in intervals
                    for t in self._rows[row].tokens[start:end]
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
