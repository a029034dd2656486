"""Prefill of one prompt, eager and as a breakable CUDA graph, with and without the KV
canary.

python benchmark/e2e/bench_prefill_graph.py --shape Llama-3.1-8B [--draft]

Two model runners with dummy weights in one process, one of them under the canary; per
prompt length the four variants take turns. `ms` is from the call to the end of the
device's work, `host` until the call returns. Beside it the prompt's matrix products
alone (the engine's own, in one graph) and the floor of reading the weights once.
`--draft` measures an EAGLE3 head's half of prefills instead, on hidden states of the
target.
The last line is one JSON document. `--device cpu` replays recordings of a small model:
it shows that the script runs, not a speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_decode import read_bandwidth
from model_shapes import SHAPES, write_draft_shape, write_shape
from served import build_served

from kv_canary.evidence import Owner
from sglang.bench_utils.report import format_table
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.kv_canary.runner.details import HostBooks
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.ops.linear.op import linear
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.cuda_graph_runner import cuda_graph_backend
from sglang.srt.model_executor.memory_plan import prefill_graph_bytes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.utils.memory import available_device_bytes
from sglang.test.forward_harness import ForwardHarness
from sglang.test.recording_backend import RecordingBackend
from sglang.test.tiny_models import write_tiny_eagle, write_tiny_model

WARM_UPS = 3
# Rounds of the four variants.
MIN_ROUNDS, MAX_ROUNDS = 8, 60


def server_flags(args: argparse.Namespace, *, canary: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {"kv_canary": "none"}
    if canary:
        flags = {"kv_canary": "raise", "kv_canary_real_data": args.real_data}
    return flags | {
        "device": args.device,
        "load_format": "dummy" if args.device == "cuda" else "auto",
        "context_length": max(args.tokens) + 64,
        "max_running_requests": len(args.tokens),
        "chunked_prefill_size": max(args.tokens),
        "attention_backend": args.attention_backend,
    }


def prompt(tokens: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, vocab_size, (tokens,), generator=generator).tolist()


class Side:
    """One model runner, its graphs, and a batch of one prompt per length."""

    def __init__(
        self,
        args: argparse.Namespace,
        runner: ModelRunner,
        batches: dict[int, ForwardBatch],
        **graph_options: Any,
    ) -> None:
        self.runner, self.batches = runner, batches
        is_cuda = args.device == "cuda"
        before = available_device_bytes(args.device)
        began = time.perf_counter()
        self.graphs = BreakableCudaGraphRunner(
            runner,
            token_counts=args.tokens,
            make_backend=cuda_graph_backend if is_cuda else RecordingBackend,
            **graph_options,
        )
        self.capture_s = time.perf_counter() - began
        if is_cuda:
            torch.cuda.empty_cache()
        self.graph_bytes = before - available_device_bytes(args.device)

    @classmethod
    def for_target(
        cls, args: argparse.Namespace, folder: Path, *, canary: bool
    ) -> Side:
        harness = ForwardHarness(
            folder,
            slots=sum(args.tokens) + len(args.tokens),
            **server_flags(args, canary=canary),
        )
        runner, batches = harness.runner, {}
        side = cls(args, runner, batches)
        if runner.canary_manager is not None:
            runner.canary_manager.mark_init_finished()
        for tokens in args.tokens:
            row = harness.new_row(prompt(tokens, runner.model_config.vocab_size))
            batches[tokens] = harness.prepare(ForwardMode.EXTEND, [(row, tokens)])
        return side

    @classmethod
    def for_draft(cls, args: argparse.Namespace, folder: Path, *, canary: bool) -> Side:
        """Create a side from the batches that a scheduler gives the draft.

        The scheduler's requests are kept, so that their slots are.
        """
        io = ListIO()
        draft = (
            write_draft_shape(args.shape, folder / "draft")
            if args.device == "cuda"
            else write_tiny_eagle(folder / "draft", folder, algorithm="EAGLE3")
        )
        scheduler = build_served(
            ServerArgs(
                model_path=str(folder),
                skip_tokenizer_init=True,
                disable_cuda_graph=True,
                disable_piecewise_cuda_graph=args.device == "cuda",
                max_total_tokens=2 * sum(args.tokens) + 64 * len(args.tokens),
                speculative_algorithm="EAGLE3",
                speculative_draft_model_path=str(draft),
                speculative_num_steps=3,
                speculative_eagle_topk=1,
                speculative_num_draft_tokens=4,
                **server_flags(args, canary=canary),
            ),
            io,
        )
        worker = scheduler.worker
        assert isinstance(worker, EAGLEWorkerV2)
        drafter = worker.draft_worker
        runner, batches = drafter.draft_runner, {}
        forward = runner.forward
        vocab = runner.model_config.vocab_size
        for tokens in args.tokens:

            def kept(batch: ForwardBatch, of: int = tokens) -> LogitsProcessorOutput:
                batches[of] = batch
                return forward(batch)

            runner.__dict__["forward"] = kept
            params = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
            io.requests.append(
                GenerateReq(
                    rid=str(tokens),
                    input_ids=prompt(tokens, vocab),
                    sampling_params=params,
                )
            )
            while tokens not in batches:
                scheduler.step()
        del runner.__dict__["forward"]
        synchronize()
        return cls(args, runner, batches, **drafter.prefill_graph_options())

    def measure(self, tokens: int, *, replayed: bool) -> tuple[float, float]:
        """Return (ms until the device is done, ms until the call returns)."""
        batch, runner = self.batches[tokens], self.runner
        runner.prefill_graph_runner = self.graphs if replayed else None
        synchronize()
        began = time.perf_counter()
        runner.forward(batch)
        if runner.canary_manager is not None:
            runner.canary_manager.finish_step(batch)
        launched = time.perf_counter()
        synchronize()
        return (time.perf_counter() - began) * 1e3, (launched - began) * 1e3

    def check(self) -> None:
        """Check that every replay was one and the canary found nothing."""
        assert not self.graphs.fallbacks, self.graphs.fallbacks
        manager = self.runner.canary_manager
        if manager is not None:
            found = manager.drain(owner_of=lambda s: Owner("?"), books=HostBooks())
            assert not found, found


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gemm_ms(side: Side, tokens: int) -> float:
    """Time a prompt's matrix products alone: all layers, and the head for one token."""
    model = side.runner.model
    weights = [
        module.weight
        for layer in model.model.layers
        for module in (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
    ]
    inputs = {
        (rows, width): torch.randn(rows, width, device="cuda", dtype=side.runner.dtype)
        for rows in (1, tokens)
        for width in {weight.shape[1] for weight in weights}
    }

    def run() -> None:
        for weight in weights:
            linear(inputs[tokens, weight.shape[1]], weight)
        head = model.lm_head.weight
        linear(inputs[1, head.shape[1]], head)

    return graph_ms(run)


def graph_ms(run: Callable[[], None]) -> float:
    """Return the median milliseconds of `run` captured as one graph."""
    with torch.inference_mode():
        run()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(12):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def weights_read(runner: ModelRunner) -> int:
    """Return the bytes of weights that a prefill reads whole: all but the embedding."""
    # A draft head is a stack itself, a target has one.
    model = runner.model
    embedding = getattr(model, "model", model).embed_tokens.weight
    return sum(
        p.nbytes for p in model.parameters() if p.data_ptr() != embedding.data_ptr()
    )


VARIANTS = {
    "eager": (0, False),
    "replay": (0, True),
    "eager_canary": (1, False),
    "replay_canary": (1, True),
}


def compare(
    sides: tuple[Side, Side], tokens: int, *, seconds: float
) -> dict[str, float]:
    """Return medians of the variants, run in alternating order for about `seconds`."""
    names = list(VARIANTS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    longest = 0.0
    for _ in range(WARM_UPS):
        for which, replayed in VARIANTS.values():
            ms, _ = sides[which].measure(tokens, replayed=replayed)
            longest = max(longest, ms)
    fit = int(seconds * 1e3 / (longest * len(names)))
    for i in range(min(max(fit, MIN_ROUNDS), MAX_ROUNDS)):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            which, replayed = VARIANTS[name]
            times[name].append(sides[which].measure(tokens, replayed=replayed))
    result: dict[str, float] = {"tokens": tokens}
    for name, pairs in times.items():
        result[f"{name}_ms"] = statistics.median(ms for ms, _ in pairs)
        result[f"{name}_host_ms"] = statistics.median(host for _, host in pairs)
    for suffix in ("", "_canary"):
        eager = [ms for ms, _ in times["eager" + suffix]]
        replay = [ms for ms, _ in times["replay" + suffix]]
        result["speedup" + suffix] = statistics.median(
            a / b for a, b in zip(eager, replay, strict=True)
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[32, 128, 512, 2048, 8192]
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--real-data", default="partial")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of rounds, per prompt length"
    )
    args = parser.parse_args()
    is_cuda, folder = args.device == "cuda", Path(tempfile.mkdtemp())
    bandwidth = None
    if is_cuda:
        bandwidth = read_bandwidth()
        torch.cuda.empty_cache()
        folder = write_shape(args.shape, folder)
    else:
        args.shape = "tiny"
        write_tiny_model(folder, "LlamaForCausalLM", max_position_embeddings=16384)
    make = Side.for_draft if args.draft else Side.for_target
    sides = make(args, folder, canary=False), make(args, folder, canary=True)
    plain = sides[0]
    weight_bytes = weights_read(plain.runner)
    planned = prefill_graph_bytes(
        plain.runner.model_config,
        args.tokens,
        dtype=plain.runner.dtype,
        captures_attention=plain.runner.attn_backend.capabilities.captures_prefill,
    )
    graphs = plain.graphs
    segments = graphs.num_segments
    print(
        f"{segments} segments captured in {plain.capture_s:.1f} s, "
        f"{plain.graph_bytes / 2**30:.2f} GiB ({planned / 2**30:.2f} planned), backend "
        f"{plain.runner.attn_backend.name}"
    )
    results = []
    for tokens in args.tokens:
        result: dict[str, float | None] = dict(
            compare(sides, tokens, seconds=args.seconds)
        )
        has_products = is_cuda and not args.draft
        result["gemm_ms"] = gemm_ms(plain, tokens) if has_products else None
        result["floor_ms"] = bandwidth and weight_bytes / bandwidth * 1e3
        results.append(result)
    for side in sides:
        side.check()
    columns = [
        *("tokens", "eager_ms", "replay_ms", "speedup", "eager_host_ms"),
        *("replay_host_ms", "eager_canary_ms", "replay_canary_ms", "speedup_canary"),
        *("gemm_ms", "floor_ms"),
    ]
    print(format_table(columns, [[row[name] for name in columns] for row in results]))
    document = {
        "benchmark": "bench_prefill_graph",
        "model": "draft" if args.draft else "target",
        "shape": args.shape,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "attention_backend": plain.runner.attn_backend.name,
        "real_data": args.real_data,
        "read_bandwidth": bandwidth,
        "graph_bytes": plain.graph_bytes,
        "planned_bytes": planned,
        "capture_s": plain.capture_s,
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
