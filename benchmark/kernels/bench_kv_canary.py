"""Speed of the KV canary's launches (verify, head, tail) per batch and mode.

python benchmark/kernels/bench_kv_canary.py [--modes none,partial,rotate,all]
On CUDA the calls are in one graph, each after a write that empties L2, whose time is
subtracted; bytes are compared with the copy rate of the same run. Without CUDA the
native ops run on a small pool. Prints tables, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cuda_timing import bandwidths, graph_us
from torch import Tensor

from kv_canary import launches
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import WriterKind
from kv_canary.state import create_state
from kv_canary.view import ForwardView, KVReadView

Call = Callable[[], object]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# K and V of Llama-3.1-8B: 8 heads of 128 bfloat16 channels.
LAYERS, HEADS, DIM = (32, 8, 128) if CUDA else (2, 2, 32)
CONTEXT, EXTEND = (1088, 8192) if CUDA else (136, 1024)
BATCHES = (1, 16, 64, 256) if CUDA else (1, 16)
PERIOD = 1024
# Reads of a slot: two records, its entry in two tables.
RECORD_BYTES, TABLE_BYTES = 64, 8
REPEATS = 8


class Pool:
    """Rows of `CONTEXT` tokens in random slots, their records written by a prefill."""

    def __init__(self, batch: int, fingerprint: Fingerprint, num_slots: int) -> None:
        self.batch, self.fingerprint = batch, fingerprint
        width = max(CONTEXT, EXTEND)
        self.state = create_state(
            num_slots=num_slots,
            req_rows=batch + 1,
            ring_capacity=1024,
            num_managers=1,
            device=DEVICE,
        )
        used = width if batch == 1 else CONTEXT
        self.req_to_token = torch.zeros(
            batch + 1, used, dtype=torch.int32, device=DEVICE
        )
        slots = 1 + torch.randperm(num_slots - 1, device=DEVICE)[: batch * used]
        self.req_to_token[1:] = slots.view(batch, used)
        self.tokens = torch.randint(0, 100_000, (batch + 1, used), device=DEVICE)
        self.salts = torch.arange(batch, device=DEVICE) * 77

    def rows(self, prefix: int, extend: int) -> ForwardView:
        span = slice(prefix, prefix + extend)
        counts = torch.arange(self.batch + 1, device=DEVICE)
        ones = torch.ones_like(self.salts)
        return ForwardView(
            req_rows=counts[1:],
            prefix_lens=ones * prefix,
            extend_lens=ones * extend,
            input_ids=self.tokens[1:, span].flatten().contiguous(),
            positions=torch.arange(prefix, prefix + extend, device=DEVICE).repeat(
                self.batch
            ),
            out_cache_loc=self.req_to_token[1:, span].flatten().long().contiguous(),
            serials=counts[1:] * 3,
            salts=self.salts,
            qo_indptr=None if extend == 1 else counts * extend,
        )

    def table(self, rows: ForwardView) -> KVReadView:
        return KVReadView(
            read_lens=rows.prefix_lens + rows.extend_lens,
            page_table=self.req_to_token,
            row_index=rows.req_rows,
        )

    def calls(self, rows: ForwardView) -> tuple[Call, Call, Call]:
        """(verify, head, tail) of the forward with these rows."""
        view = replace(rows, writer_kind=WriterKind.EXTEND)
        checks = PoolChecks(
            fingerprint=self.fingerprint, req_to_token=self.req_to_token
        )
        verify = partial(launches.verify, self.state, view, checks, self.table(rows))
        head = partial(launches.write_head, self.state, view, checks)
        tail = partial(launches.write_tail, self.state, view, checks)
        return verify, head, tail


def call_us(calls: Sequence[Call], cold: Call) -> float:
    """Return the us of the last of `calls` on a cold cache, after the others."""
    with_all = [step for call in calls for step in (cold, call)]
    without = with_all[:-1]
    if CUDA:
        return sum_us(with_all * REPEATS, REPEATS) - sum_us(without * REPEATS, REPEATS)
    best = []
    for _ in range(50):
        for call in calls[:-1]:
            call()
        begin = time.perf_counter()
        calls[-1]()
        best.append((time.perf_counter() - begin) * 1e6)
    return sorted(best)[len(best) // 2]


def sum_us(calls: Sequence[Call], rounds: int) -> float:
    return graph_us(calls) * len(calls) / rounds


def whole_bytes(slots: int) -> int:
    return slots * 2 * LAYERS * HEADS * DIM * 2


def hashed_bytes(mode: FingerprintMode, slots: int, *, writes: bool) -> int:
    if mode is FingerprintMode.NONE:
        return 0
    if mode is FingerprintMode.PARTIAL:
        return slots * 32
    share = PERIOD if mode is FingerprintMode.ROTATE and not writes else 1
    return whole_bytes(slots) // share


def bench(
    mode: FingerprintMode, buffers: tuple[Tensor, Tensor], limit: float
) -> list[dict[str, Any]]:
    k, v = buffers
    layout = PoolLayout(groups=(LayerGroup(name="full", k=k, v=v),))
    fingerprint = create_fingerprint(mode, layout, rotation_period=PERIOD)
    dirt = torch.empty(256 << 20 if CUDA else 1, dtype=torch.uint8, device=DEVICE)
    found = []
    shapes = [(batch, CONTEXT - 1, 1) for batch in BATCHES] + [(1, 0, EXTEND)]
    for batch, prefix, extend in shapes:
        pool = Pool(batch, fingerprint, k.shape[1])
        if prefix:
            past = pool.rows(0, prefix)
            for call in pool.calls(past)[1:]:
                call()
            launches.finish_step(pool.state, past)
        verify, head, tail = pool.calls(pool.rows(prefix, extend))
        for call in (verify, head, tail):
            call()  # compiles outside of any capture
        new, old = batch * extend, batch * prefix
        times = {
            "verify": (
                call_us([verify], dirt.zero_),
                old * (RECORD_BYTES + TABLE_BYTES)
                + new * (TABLE_BYTES + 8)
                + hashed_bytes(mode, old, writes=False),
            ),
            "head": (call_us([head], dirt.zero_), new * RECORD_BYTES),
            "tail": (
                call_us([head, tail], dirt.zero_),
                new * RECORD_BYTES + hashed_bytes(mode, new, writes=True),
            ),
        }
        entries = int(pool.state.ring_count)
        if entries:
            raise RuntimeError(f"{entries} findings on a healthy pool: a wrong kernel")
        for name, (us, nbytes) in times.items():
            gbs = nbytes / us / 1e3
            print(
                f"{mode.name.lower():>8} {name:>7} {batch:>4} x {prefix + extend:<5}"
                f"{us:>10.2f} us {gbs:>8.1f} GB/s {gbs / limit:>7.1%}"
            )
            row = {"mode": mode.name.lower(), "launch": name, "batch": batch}
            row |= {"prefix": prefix, "extend": extend, "us": us, "gbs": gbs}
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="none,partial,rotate,all")
    modes = [FingerprintMode[m.upper()] for m in parser.parse_args().modes.split(",")]
    num_slots = max(BATCHES[-1] * CONTEXT, EXTEND) + 64
    shape = (LAYERS, num_slots, HEADS, DIM)
    buffers = (
        torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE),
    )
    for buffer in buffers:
        for layer in buffer:
            layer.normal_()
    if CUDA:
        speeds = bandwidths()
        name = torch.cuda.get_device_name()
    else:
        a, b = torch.zeros(1 << 25), torch.zeros(1 << 25)
        b.copy_(a)
        begin = time.perf_counter()
        b.copy_(a)
        b.copy_(a)
        speeds = {"copy": 4 * a.nbytes / (time.perf_counter() - begin) / 1e9}
        name = "cpu"
    print(f"copy {speeds['copy']:.0f} GB/s (the 100 %)")
    rows = [row for mode in modes for row in bench(mode, buffers, speeds["copy"])]
    facts = {"device": name, "torch": torch.__version__, "bandwidths": speeds}
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
