"""Adaptive draft shapes on the CPU: the demo model and its EAGLE3 head on code.

python benchmark/cpu/bench_shapes.py [--batch-size 1 4 16] [--rounds 11]
python benchmark/cpu/bench_shapes.py --model-path FOLDER --tokens 64   with n-grams

Requests are served to their end: without speculation, with each shape of the ladder,
and with the shape that is chosen, in alternating rounds. One round that is not timed
comes first, for all of them: a choice needs some tokens to settle, and `settling` is
its speed there over its later one. Tokens per second of the process's own time, so that
other processes count less; medians of rounds. `share` is the adaptive speed over that
of the best of the others, the median of what it is within each round. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.draft_shapes import FixedShape
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.spec_prompts import code_prompts

DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": True,
}


NGRAMS = {"speculative_algorithm": "NGRAM", "speculative_adaptive": True}


class Served:
    """A scheduler that serves prompts to their end.

    Args:
        model: folder; None is the demo model.
    """

    def __init__(self, model: str | None, **flags: Any) -> None:
        self._io = ListIO()
        args = ServerArgs(
            **({} if model is None else {"model_path": model}),
            device="cpu",
            skip_tokenizer_init=True,
            max_total_tokens=32768,
            disable_radix_cache=True,
            log_level="error",
            **flags,
        )
        self.scheduler: Scheduler = build_scheduler(args, self._io)
        self._prompts = code_prompts(model)
        self._asked = self._served = 0

    def speed(self, rows: int, tokens: int) -> float:
        """Return tokens per second of this process."""
        for _ in range(rows):
            prompt = self._prompts[self._asked % len(self._prompts)]
            self._asked += 1
            self._served += 1
            self._io.requests.append(
                GenerateReq(
                    rid=str(self._served),
                    # No n-gram comes from an earlier answer to the same prompt.
                    extra_key=str(self._served),
                    input_ids=prompt,
                    sampling_params=SamplingParams(
                        max_new_tokens=tokens, temperature=0.0, ignore_eos=True
                    ),
                )
            )
        began = time.process_time()
        while self.scheduler.step() or self.scheduler.has_work():
            pass
        self._io.responses.clear()
        return rows * tokens / (time.process_time() - began)


def shape_name(shape: TreeShape | None) -> str:
    if shape is None:
        return "none"
    return f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}"


def measure(rows: int, args: argparse.Namespace, *engines: Served) -> dict[str, float]:
    """Return the speed of each mode, and of the choice its share and settling."""
    plain, drafting = engines
    shapes = drafting.scheduler.shapes
    chosen = shapes.policy
    modes = {"plain": None} | {
        shape_name(shape): FixedShape(index)
        for index, shape in enumerate(shapes.ladder)
    }
    modes["adaptive"] = chosen
    found: dict[str, list[float]] = {name: [] for name in modes}
    order = random.Random(rows)
    for _ in range(1 + args.rounds):
        # No mode always follows the same one.
        for name in order.sample(list(modes), len(modes)):
            policy, engine = modes[name], drafting
            if policy is None:
                engine = plain
            else:
                shapes.policy = policy
            # All modes get the same prompts.
            engine._asked = 0
            found[name].append(engine.speed(rows, args.tokens))
    shapes.policy = chosen
    first = found["adaptive"][0]
    timed = {name: speeds[1:] for name, speeds in found.items()}
    speeds = {name: statistics.median(each) for name, each in timed.items()}
    own = timed.pop("adaptive")
    best = timed[max(timed, key=lambda name: speeds[name])]
    shares = [a / b for a, b in zip(own, best, strict=True)]
    settling = first / speeds["adaptive"]
    return speeds | {"share": statistics.median(shares), "settling": settling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--model-path")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = args.model_path
    engines = Served(model), Served(model, **(DRAFTS if model is None else NGRAMS))
    results = []
    for rows in args.batch_size:
        found = measure(rows, args, *engines)
        results.append({"rows": rows} | found)
        shares = {name: found.pop(name) for name in ("share", "settling")}
        each = [f"{name} {speed:.0f}" for name, speed in found.items()]
        each += [f"{name} {value:.3f}" for name, value in shares.items()]
        print(f"{rows:3d}", *each, sep="  ", flush=True)
    print(json.dumps({"benchmark": "bench_shapes", "results": results}))


if __name__ == "__main__":
    main()
