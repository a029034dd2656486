"""Speculative decoding: speed over steps, top-k and draft tokens, without a real model.

python benchmark/e2e/bench_spec.py cycle [--trees 8,5,64 1,3,4] [--batch-size 1 16]
python benchmark/e2e/bench_spec.py adaptive [--rates 0.3 0.8] [--batch-size 1 64]

`cycle` (a GPU): one draft + verify + extend cycle of a real model shape with dummy
weights and an EAGLE3 head of one layer, or with --algorithm NEXTN the head inside the
shape; random weights accept nothing, so the time of
a cycle is what counts. `--accept-length` adds the tokens per second of a simulated
accept length beside decoding without speculation. With `--temperature` and `--top-p`
tokens are drawn.
`adaptive` (a GPU): the same model, plain, with each shape of the ladder of
--speculative-adaptive, and with the shape that it chooses, for simulated rates of
acceptance; `share` is its speed over that of the best of the others.
A tree is written topk,steps,draft tokens. The last line is one JSON document. Real text
is what `bench_spec_text.py` is for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_draft_shape, write_shape
from served import in_scheduler
from spec_trees import Tree

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.environ import envs
from sglang.srt.managers.messages.io_struct import AbortReq, GenerateReq
from sglang.srt.managers.scheduler.draft_shapes import FixedShape
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.managers.scheduler.shape_chooser import ShapeChooser
from sglang.srt.sampling.sampling_params import SamplingParams

WARM_STEPS = 8


def submit(
    io: ListIO,
    rid: str,
    ids: list[int],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> None:
    params = SamplingParams(
        max_new_tokens=new_tokens,
        temperature=temperature,
        top_p=top_p,
        ignore_eos=True,
    )
    io.requests.append(GenerateReq(rid=rid, input_ids=ids, sampling_params=params))


# -- cycle -----------------------------------------------------------------------------


def step_ms(
    scheduler: Scheduler, io: ListIO, *, rows: int, args: argparse.Namespace
) -> dict[str, float]:
    """Measure the median round of the scheduler loop while all requests decode.

    Also returns their throughput.
    """
    vocab = scheduler.model_config.vocab_size
    generator = torch.Generator().manual_seed(rows)
    room = (
        scheduler.server_args.tree_shape.accept_width if is_drafting(scheduler) else 1
    )
    for i in range(rows):
        ids = torch.randint(0, vocab, (args.input_len,), generator=generator)
        submit(
            io,
            f"{rows}-{i}",
            ids.tolist(),
            (args.steps + 64) * room,
            temperature=args.temperature,
            top_p=args.top_p,
        )
    while scheduler.running is None or len(scheduler.running) < rows:
        scheduler.step()
    for _ in range(WARM_STEPS):
        scheduler.step()
    torch.cuda.synchronize()
    before = scheduler.stats_snapshot().generation_tokens_total
    times, began = [], time.perf_counter()
    for _ in range(args.steps):
        start = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tokens = scheduler.stats_snapshot().generation_tokens_total - before
    drop_all(scheduler, io)
    return {
        "rows": rows,
        "ms_median": statistics.median(times) * 1e3,
        "ms_mean": seconds / args.steps * 1e3,
        "tok_s": tokens / seconds,
    }


def is_drafting(scheduler: Scheduler) -> bool:
    return scheduler.server_args.speculative_algorithm is not None


def time_cycles(
    scheduler: Scheduler,
    io: ListIO,
    *,
    tree: Tree | None,
    layout: str | None,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    name = f"{tuple(tree)} {layout}" if tree else "none"
    results = []
    for rows in args.batch_size:
        found = step_ms(scheduler, io, rows=rows, args=args)
        results.append(found | {"tree": tree, "layout": layout})
        print(
            f"{name:25}  {rows:5d}  "
            f"{found['ms_median']:8.3f}  {found['ms_mean']:6.3f}  "
            f"{found['tok_s']:7.1f}",
            flush=True,
        )
    return results


def served_shape(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write the shape into `folder`, and return the flags that serve it."""
    return {
        "model_path": str(write_shape(args.shape, folder / "target")),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": args.context_length,
        "max_running_requests": max(args.batch_size),
        "page_size": args.page_size,
        "attention_backend": args.attention_backend,
        "device": "cuda",
    }


def cycle(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    common = served_shape(folder, args)
    draft = common["model_path"]
    if args.algorithm != "NEXTN":
        draft = str(write_draft_shape(args.shape, folder / "draft"))
    results: list[dict[str, Any]] = []
    print("tree (topk, steps, nodes)  batch  cycle ms  (mean)  tok/s")
    with_layouts = itertools.product(args.trees, args.draft_layouts)
    for tree, layout in [(None, None), *with_layouts]:
        flags: dict[str, Any] = {}
        simulated: Any = nullcontext()
        if tree is not None:
            flags = tree.flags() | {
                "speculative_algorithm": args.algorithm,
                "speculative_draft_model_path": draft,
                "speculative_draft_layout": layout,
            }
            if args.accept_length:
                simulated = envs.SGLANG_SIMULATE_ACC_LEN.override(args.accept_length)
        with simulated:
            results += in_scheduler(
                partial(time_cycles, tree=tree, layout=layout, args=args),
                **common,
                **flags,
            )
    return {
        "shape": args.shape,
        "algorithm": args.algorithm,
        "page_size": args.page_size,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "results": results,
    }


# -- adaptive --------------------------------------------------------------------------


def time_steps(
    scheduler: Scheduler,
    io: ListIO,
    *,
    rows: int,
    args: argparse.Namespace,
) -> tuple[float, dict[str, int]]:
    """Return the tokens per second of `rows` requests that decode for `--seconds`,
    after `--settle` seconds, and the iterations of each shape. All have about the same
    contexts, which count: a choice may not settle longer than a fixed shape."""
    submit_rows(scheduler, io, rows=rows, args=args)
    speed, used = 0.0, Counter[str]()
    for seconds in (args.settle, args.seconds):
        torch.cuda.synchronize()
        used.clear()
        before = scheduler.stats_snapshot().generation_tokens_total
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            scheduler.step()
            used[shape_name(scheduler.batches.shape)] += 1
        torch.cuda.synchronize()
        tokens = scheduler.stats_snapshot().generation_tokens_total - before
        speed = tokens / (time.perf_counter() - began)
    drop_all(scheduler, io)
    return speed, dict(used)


def submit_rows(
    scheduler: Scheduler, io: ListIO, *, rows: int, args: argparse.Namespace
) -> None:
    vocab = scheduler.model_config.vocab_size
    generator = torch.Generator().manual_seed(rows)
    most = args.context_length - args.input_len - 64
    for i in range(rows):
        ids = torch.randint(0, vocab, (args.input_len,), generator=generator)
        submit(io, f"{rows}-{i}", ids.tolist(), most)
    while scheduler.running is None or len(scheduler.running) < rows:
        scheduler.step()


def drop_all(scheduler: Scheduler, io: ListIO) -> None:
    io.requests.append(AbortReq(abort_all=True, message="measured"))
    while scheduler.has_work():
        scheduler.step()
    scheduler.cache.reset()
    io.responses.clear()


def time_ladder(
    scheduler: Scheduler, io: ListIO, *, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure each shape, and the choice, for every rate and batch size."""
    shapes, results = scheduler.shapes, []
    chosen = shapes.policy
    assert isinstance(chosen, ShapeChooser)
    for rows in args.batch_size:
        costs = [chosen.costs.measured(i, rows) for i in range(len(shapes.ladder))]
        print(f"{rows:5d}  measured ms:", [round(1e3 * cost, 2) for cost in costs])
    for rows, rate in itertools.product(args.batch_size, args.rates):
        with envs.SGLANG_SIMULATE_ACC_RATE.override(rate):
            for index, shape in [*enumerate(shapes.ladder), (-1, None)]:
                shapes.policy = chosen if index < 0 else FixedShape(index)
                name = "adaptive" if index < 0 else shape_name(shape)
                speed, used = time_steps(scheduler, io, rows=rows, args=args)
                results.append({"rows": rows, "rate": rate, "shape": name})
                results[-1] |= {"tok_s": speed, "used": used}
                counts = used if index < 0 else ""
                print(
                    f"{rows:5d}  {rate:4.2f}  {name:12}  {speed:8.1f}  {counts}",
                    flush=True,
                )
    return results


def shape_name(shape: TreeShape | None) -> str:
    if shape is None:
        return "none"
    return f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}"


def adaptive(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    common = served_shape(folder, args)
    drafts = args.trees[0].flags() | {
        "speculative_algorithm": args.algorithm,
        "speculative_draft_model_path": str(
            write_draft_shape(args.shape, folder / "draft")
        ),
        "speculative_adaptive": True,
    }

    def plain(scheduler: Scheduler, io: ListIO) -> dict[int, float]:
        return {
            rows: time_steps(scheduler, io, rows=rows, args=args)[0]
            for rows in args.batch_size
        }

    speeds = {} if args.without_plain else in_scheduler(plain, **common)
    print("without speculation:", {n: round(v, 1) for n, v in speeds.items()})
    print(" rows  rate  shape            tok/s")
    began = time.perf_counter()
    with envs.SGLANG_SIMULATE_ACC_RATE.override(args.rates[0]):
        results = in_scheduler(partial(time_ladder, args=args), **common, **drafts)
    print(f"(in {time.perf_counter() - began:.0f} s with the start)")
    print(" rows  rate  adaptive  best of the others     share")
    for rows, rate in itertools.product(args.batch_size, args.rates):
        of_case = [r for r in results if (r["rows"], r["rate"]) == (rows, rate)]
        others = {r["shape"]: r["tok_s"] for r in of_case}
        own = others.pop("adaptive")
        if rows in speeds:
            others["plain"] = speeds[rows]
        best = max(others, key=others.__getitem__)
        print(
            f"{rows:5d}  {rate:4.2f}  {own:8.1f}  {best:12} {others[best]:8.1f}  "
            f"{own / others[best]:6.3f}",
            flush=True,
        )
    return {"shape": args.shape, "plain": speeds, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    timed = modes.add_parser("cycle")
    timed.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    timed.add_argument("--algorithm", choices=("EAGLE3", "NEXTN"), default="EAGLE3")
    timed.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    timed.add_argument("--input-len", type=int, default=1024)
    timed.add_argument("--steps", type=int, default=96)
    timed.add_argument("--context-length", type=int, default=8192)
    timed.add_argument("--accept-length", type=float, default=0.0)
    timed.add_argument("--temperature", type=float, default=0.0)
    timed.add_argument("--top-p", type=float, default=1.0)
    timed.add_argument("--trees", type=Tree.parse, nargs="+")
    timed.add_argument(
        "--draft-layouts",
        nargs="+",
        choices=("region", "paged"),
        default=["region"],
        help="of the branches' slots, one after the other",
    )
    timed.set_defaults(run=cycle, trees=[Tree(8, 5, 64), Tree(1, 3, 4)], page_size=64)
    chosen = modes.add_parser("adaptive")
    chosen.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    chosen.add_argument("--algorithm", choices=("EAGLE3",), default="EAGLE3")
    chosen.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16, 64])
    chosen.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    chosen.add_argument("--input-len", type=int, default=512)
    chosen.add_argument("--context-length", type=int, default=8192)
    chosen.add_argument("--seconds", type=float, default=1.0)
    chosen.add_argument("--settle", type=float, default=1.5)
    chosen.add_argument("--without-plain", action="store_true")
    chosen.add_argument("--trees", type=Tree.parse, nargs=1, default=[Tree(4, 5, 8)])
    chosen.set_defaults(run=adaptive, page_size=64)
    for mode in (timed, chosen):
        mode.add_argument("--page-size", type=int)
        mode.add_argument("--attention-backend")
    args = parser.parse_args()
    document = {"benchmark": f"bench_spec {args.mode}", "torch": torch.__version__}
    if torch.cuda.is_available():
        document["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(document | args.run(args)))


if __name__ == "__main__":
    main()
