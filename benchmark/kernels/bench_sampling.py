"""Speed of filtered sampling on a GPU: the cut of top-k, top-p and min-p, and a step.

python benchmark/kernels/bench_sampling.py [--vocab 128256] [--rows 1,16,64,256]
For each batch, filter and shape of the distribution: the Triton kernel and the sorted
reference, alone and within the whole choice of tokens (edits, softmax, draw), beside a
greedy choice; then the nodes of 16 trees of 64. Everything runs in CUDA graphs on
logits that L2 does not hold. Prints a table with the floor (reading the
logits once at the measured bandwidth) and whether both forms chose the same tokens, and
as the last line one JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cuda_timing import bandwidths, copies_for, graph_us
from torch import Tensor

from sglang.srt.sampling import sampler
from sglang.srt.sampling.ops.draw.op import draw, draw_ref
from sglang.srt.sampling.ops.keep_prefix.op import (
    Filters,
    keep_prefix,
    keep_prefix_ref,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams

DEVICE = "cuda"
FILTERS = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "all three": {"top_k": 200, "top_p": 0.95, "min_p": 0.02},
}
SHAPES = ("flat", "peaked")
TREES = (16, 64)
FORMS = {"us": (keep_prefix, draw), "reference_us": (keep_prefix_ref, draw_ref)}


def make_logits(shape: str, rows: int, vocab: int) -> Tensor:
    """Return bfloat16 logits, whose ties are as frequent as a model's."""
    logits = torch.randn(rows, vocab, device=DEVICE)
    if shape == "peaked":
        logits = logits * 2 + 14 * (torch.rand_like(logits) < 1e-4)
    return logits.bfloat16()


def make_info(rows: int, vocab: int, filters: dict[str, float]) -> SamplingBatchInfo:
    params = SamplingParams(**{"temperature": 0.8, **filters})
    made = [SamplingRow(params=params, seed=i) for i in range(rows)]
    return SamplingBatchInfo.from_rows(made, vocab_size=vocab, device=DEVICE)


def cut(form: Callable[..., Tensor], probs: Tensor, info: SamplingBatchInfo) -> Tensor:
    """Filter a copy, because `form` may overwrite `probs`; `measure` times copies."""
    filters = Filters(
        rows=info.filter_rows,
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        max_top_k=info.max_top_k,
        min_ps=info.min_ps if info.needs_min_p else None,
    )
    return form(probs.clone(), filters)


def choose(info: SamplingBatchInfo, nodes: int, logits: Tensor) -> Tensor:
    positions = torch.arange(logits.shape[0], device=DEVICE)
    if nodes == 1:
        return sampler.Sampler()(logits, info, positions=positions).token_ids
    return sampler.node_choices(
        logits, info, nodes=nodes, positions=positions, history=None
    ).token_ids


def measure(
    requests: int, nodes: int, *, shape: str, filters: str, vocab: int
) -> dict[str, Any]:
    """Time each form, and compare what they choose."""
    rows = requests * nodes
    copies = copies_for(2 * rows * vocab, most=40)
    batches = [make_logits(shape, rows, vocab) for _ in range(copies)]
    info = make_info(requests, vocab, FILTERS[filters])
    greedy = make_info(requests, vocab, {"temperature": 0.0})
    row: dict[str, Any] = {"greedy_us": step_us(greedy, nodes, batches)}
    chosen = []
    probs = [torch.softmax(batch.float() / 0.8, dim=-1) for batch in batches[:4]]
    repeated = info.repeat_rows(nodes)
    row["copy_us"] = graph_us([partial(torch.clone, p) for p in probs])
    for name, (keep, draws) in FORMS.items():
        row[f"cut_{name}"] = (
            graph_us([partial(cut, keep, p, repeated) for p in probs]) - row["copy_us"]
        )
        sampler.draw = draws
        row[f"step_{name}"] = step_us(info, nodes, batches)
        chosen.append([choose(info, nodes, batch) for batch in batches])
    sampler.draw = draw
    row["same_tokens"] = all(map(torch.equal, *chosen))
    return row


def step_us(info: SamplingBatchInfo, nodes: int, batches: list[Tensor]) -> float:
    return graph_us([partial(choose, info, nodes, batch) for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", default="1,16,64,256")
    args = parser.parse_args()
    read = bandwidths()["read"]
    batches = [(int(rows), 1) for rows in args.rows.split(",")]
    measured: list[dict[str, Any]] = []
    print(
        f"{'rows':>8} {'logits':>7} {'filter':>10} {'floor':>7} {'greedy':>8} "
        f"{'cut':>8} {'sorted':>9} {'step':>8} {'sorted':>9} same   (us)"
    )
    for requests, nodes in (*batches, TREES):
        floor = 2 * requests * nodes * args.vocab / read / 1e3
        for shape in SHAPES:
            for filters in FILTERS:
                row = measure(
                    requests, nodes, shape=shape, filters=filters, vocab=args.vocab
                )
                name = str(requests) if nodes == 1 else f"{requests}x{nodes}"
                print(
                    f"{name:>8} {shape:>7} {filters:>10} {floor:>7.1f} "
                    f"{row['greedy_us']:>8.1f} {row['cut_us']:>8.1f} "
                    f"{row['cut_reference_us']:>9.1f} {row['step_us']:>8.1f} "
                    f"{row['step_reference_us']:>9.1f} {row['same_tokens']}",
                    flush=True,
                )
                key = {"requests": requests, "nodes": nodes, "logits": shape}
                measured.append({**key, "filter": filters, "floor_us": floor, **row})
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "vocab": args.vocab, "rows": measured}))


if __name__ == "__main__":
    main()
