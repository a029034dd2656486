"""Speed of the draft tree and slot ops: native and torch on the CPU, Triton on CUDA.

python benchmark/kernels/bench_tree_ops.py [--batch 1,16] [--vocab 32000]
One row per op, batch and tree shape (topk x steps x draft tokens), in microseconds per
call: on CUDA of a graph, on the CPU of the wall clock, next to the torch reference.
Prints a table, and as the last line one JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from cuda_timing import graph_us
from torch import Tensor

from kv_canary.op import force_reference
from sglang.srt.configs.draft_layout import BranchLayout, TreeShape
from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.tree import op as tree
from sglang.srt.draft_trees.ops.verify import op as verify
from sglang.srt.mem_cache.ops.branch_slots import op as branch_slots
from sglang.srt.sampling.ops import noise

Call = Callable[[], None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((1, 3, 4), (4, 5, 8), (8, 5, 32), (8, 5, 64))
PAGE_SIZE, PREFIX = 64, 1024


def wall_us(call: Call) -> float:
    """Return median microseconds of a call, from samples of at least a millisecond."""
    call()
    begin = time.perf_counter()
    call()
    repeats = max(1, int(1e-3 / max(time.perf_counter() - begin, 1e-7)))
    samples = []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - begin) / repeats)
    return statistics.median(samples) * 1e6


def longs(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=DEVICE)


def tree_calls(
    rows: int, shape: TreeShape, vocab: int, draft_vocab: int
) -> Iterator[tuple[str, Call]]:
    k, nodes = shape.topk, shape.num_draft_tokens
    branches = rows * k
    logits = torch.randn(branches, draft_vocab, device=DEVICE)
    probs, ids = torch.zeros(branches, k, device=DEVICE), longs(branches, k)
    yield "top_k_probs", lambda: tree.top_k_probs(logits, probs=probs, ids=ids)
    tree.top_k_probs(logits, probs=probs, ids=ids)
    levels = DraftLevels.allocate(rows, shape, device=DEVICE)
    hot = torch.arange(draft_vocab, device=DEVICE)
    input_ids, hidden_rows = longs(branches), longs(branches)

    def select(level: int) -> None:
        size = rows if level == 0 else branches
        tree.select_top_k(
            level,
            shape=shape,
            topk_p=probs[:size],
            topk_index=ids[:size],
            hot_token_id=hot,
            levels=levels,
            input_ids=input_ids,
            hidden_rows=hidden_rows,
        )

    for level in range(shape.num_steps):
        select(level)
    if shape.num_steps > 1:
        yield "select_top_k", lambda: select(1)
    built = DraftTree.allocate(rows, shape, device=DEVICE)
    lens = torch.full((rows,), PREFIX, device=DEVICE)

    def build() -> None:
        tree.build_tree(
            levels, shape=shape, root_tokens=lens, seq_lens=lens, tree=built
        )

    build()
    yield "build_tree", build
    result = VerifyResult.allocate(rows, shape, device=DEVICE)
    choices = built.tokens.roll(-1, dims=1).contiguous()
    yield (
        "verify_greedy",
        lambda: verify.verify_tree_greedy(built, choices, result=result),
    )
    target = torch.softmax(torch.randn(rows * nodes, vocab, device=DEVICE), dim=-1)
    totals = target.sum(dim=-1)
    keys = torch.tensor([noise.mix_seed(q) for q in range(rows)], device=DEVICE)

    def sample() -> None:
        verify.verify_tree_target_only(
            built,
            target,
            totals,
            keys=keys,
            threshold_single=1.0,
            threshold_acc=1.0,
            result=result,
        )

    sample()
    yield "verify_sampled", sample
    tokens, places = longs(rows, nodes), longs(rows, shape.accept_width)
    bonus = longs(rows)
    yield (
        "gather_accepted",
        lambda: verify.gather_accepted(
            result, tokens=tokens, node_rows=places, bonus_tokens=bonus
        ),
    )


def slot_calls(rows: int, shape: TreeShape) -> Iterator[tuple[str, Call]]:
    layout = BranchLayout(
        page_size=PAGE_SIZE, topk=shape.topk, num_steps=shape.num_steps
    )
    length = PREFIX + PAGE_SIZE // 2
    width = -(-layout.end_column(length) // PAGE_SIZE) * PAGE_SIZE
    table = torch.arange((rows + 1) * width, dtype=torch.int32, device=DEVICE)
    batch = branch_slots.SlotRows(
        table.view(rows + 1, width),
        torch.arange(1, rows + 1, device=DEVICE),
        torch.full((rows,), length, device=DEVICE),
    )
    branches = rows * shape.topk
    out = longs(shape.num_steps, branches)
    yield (
        "draft_slots",
        lambda: branch_slots.draft_out_cache_loc(batch, layout=layout, out=out),
    )
    pages = torch.zeros(branches, width // PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(branches, width, dtype=torch.int32, device=DEVICE)
    yield (
        "branch_pages",
        lambda: branch_slots.branch_table(batch, layout=layout, paged=True, out=pages),
    )
    yield (
        "branch_tokens",
        lambda: branch_slots.branch_table(
            batch, layout=layout, paged=False, out=tokens
        ),
    )
    if shape.topk > 1:
        steps, k = shape.num_steps, shape.topk
        # Every branch goes on.
        parents = torch.zeros(rows, shape.num_groups, dtype=torch.int64, device=DEVICE)
        for step in range(1, steps - 1):
            first = k + k * k * (step - 1)
            parents[:, 1 + k * step : 1 + k * (step + 1)] = first + k * torch.arange(
                k, device=DEVICE
            )
        paths = branch_slots.BranchPaths(parents, out, batch.seq_lens)
        begins = torch.arange(branches, device=DEVICE) * width
        yield (
            "ancestors",
            lambda: branch_slots.branch_ancestors(
                max(steps - 2, 0), paths, begins=begins, out=tokens.view(-1)
            ),
        )
        src = longs(rows * layout.tail_moves)
        dst = torch.zeros_like(src)
        yield (
            "tail_copies",
            lambda: branch_slots.duplicate_prefix_tail(
                batch, layout=layout, src=src, dst=dst
            ),
        )


def measure(call: Call) -> dict[str, float]:
    if DEVICE == "cuda":
        return {"us": graph_us([call] * 20)}
    times = {"us": wall_us(call)}
    with force_reference():
        times["reference_us"] = wall_us(call)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--vocab", type=int, default=0, help="of the target")
    parser.add_argument("--draft-vocab", type=int, default=0)
    args = parser.parse_args()
    default = (128256, 32000) if DEVICE == "cuda" else (4096, 2048)
    vocab = args.vocab or default[0]
    draft_vocab = args.draft_vocab or default[1]
    rows: list[dict[str, Any]] = []
    print(f"{'op':>16} {'batch':>5} {'tree':>8} {'us':>9} {'torch us':>10}")
    with torch.inference_mode() if DEVICE == "cpu" else nullcontext():
        for batch in map(int, args.batch.split(",")):
            for topk, steps, nodes in SHAPES:
                shape = TreeShape(topk=topk, num_steps=steps, num_draft_tokens=nodes)
                calls = [
                    *tree_calls(batch, shape, vocab, draft_vocab),
                    *slot_calls(batch, shape),
                ]
                name = f"{topk}x{steps}x{nodes}"
                for op, call in calls:
                    row = {"op": op, "batch": batch, "tree": name, **measure(call)}
                    beside = row.get("reference_us", float("nan"))
                    print(
                        f"{op:>16} {batch:>5} {name:>8} {row['us']:>9.2f} "
                        f"{beside:>10.2f}"
                    )
                    rows.append(row)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(json.dumps({"device": device, "vocab": vocab, "rows": rows}))


if __name__ == "__main__":
    main()
