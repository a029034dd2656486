"""Speculative decoding on real text: accept lengths and speed of models and drafts.

python benchmark/e2e/bench_spec_text.py --heldout lab/demo_model/build/corpus/...
python benchmark/e2e/bench_spec_text.py --model-path TARGET --draft-model-path HEAD ...
    --heldout HEAD/heldout.jsonl [--concurrency 1 8 32] [--kv-canary none raise]

Greedy, up to `--new-tokens` or the end that the model chooses, so that what follows an
end does not count. Every line is an engine with one canary mode, one head and one tree,
and a number of requests in flight: a finished one makes room for the next. `faster` is
the speed over that of the plain engine with the same canary and concurrency, `same` the
share of answers that equal the first plain engine's, `4-grams` the share of distinct
ones.
--heldout has one JSON object a line: `ids`, a whole prompt, `text`, whose first tokens
are one, or `turns`, the rows of SPEED-Bench, whose first is asked as a chat. If there
is a `category`, accept lengths are also counted by it.
A tree is written topk,steps,draft tokens; a star after it says that the engine adapts
it. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from served import in_scheduler
from spec_trees import Tree

from sglang.bench_utils.report import format_table
from sglang.srt.managers.messages.io_struct import BatchOutput, GenerateReq
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path

TEXT_CHARS = 4000
TEXT_TOKENS = 128
WARM_TOKENS = 16
HEADER = (
    "algorithm   head         canary  tree     rows  accept   tok/s  faster  same  "
    "4-grams"
)


class Prompt(NamedTuple):
    ids: list[int]
    category: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One engine; `tree` and `head` are None without drafts."""

    algorithm: str | None
    head: str | None
    canary: str
    tree: Tree | None
    is_adaptive: bool = False

    def flags(self) -> dict[str, Any]:
        flags: dict[str, Any] = {"kv_canary": self.canary}
        if self.tree is not None:
            flags |= self.tree.flags()
            flags["speculative_algorithm"] = self.algorithm
            flags["speculative_draft_model_path"] = self.head
            flags["speculative_adaptive"] = self.is_adaptive
        return flags


@dataclass(slots=True)
class Count:
    """Verifications of drafts and the tokens that they gained."""

    verified: int = 0
    gained: int = 0

    @property
    def accept_length(self) -> float:
        return self.gained / self.verified if self.verified else 1.0


@dataclass(slots=True, kw_only=True)
class Answers:
    """Answers to all prompts, in the order of the prompts.

    Fields:
        seconds: from the first request until the last answer.
        counts: by category; those of all are under None.
    """

    outputs: list[list[int]]
    seconds: float = 0.0
    counts: dict[str | None, Count] = field(default_factory=lambda: defaultdict(Count))

    @property
    def speed(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


# -- prompts ---------------------------------------------------------------------------


def read_prompts(path: Path, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield the prompts of a file; texts that are too short are left out."""
    with path.open(encoding="utf-8") as lines:
        for item in map(json.loads, lines):
            ids = encode(item, tokenizer)
            if "text" not in item or len(ids) == TEXT_TOKENS:
                yield Prompt(ids, item.get("category"))


def encode(item: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    ids: list[int]
    if "ids" in item:
        ids = item["ids"]
    elif "turns" in item:
        messages = [{"role": "user", "content": item["turns"][0]}]
        text = tokenizer.apply_chat_template(messages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(item["text"][:TEXT_CHARS])[:TEXT_TOKENS]
    return ids


# -- answers ---------------------------------------------------------------------------


def measure(
    scheduler: Scheduler, io: ListIO, *, prompts: list[Prompt], args: argparse.Namespace
) -> list[Answers]:
    """Answer the prompts once for each `--concurrency`."""
    found = []
    for rows in args.concurrency:
        asked = prompts[: rows * args.rounds or None]
        answer(scheduler, io, asked[:rows], rows=rows, new_tokens=WARM_TOKENS)
        own = answer(scheduler, io, asked, rows=rows, new_tokens=args.new_tokens)
        found.append(own)
    return found


def answer(
    scheduler: Scheduler,
    io: ListIO,
    prompts: list[Prompt],
    *,
    rows: int,
    new_tokens: int,
) -> Answers:
    answers = Answers(outputs=[[] for _ in prompts])
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    began = time.perf_counter()
    submitted = finished = 0
    while finished < len(prompts):
        while submitted < len(prompts) and submitted - finished < rows:
            ids = prompts[submitted].ids
            request = GenerateReq(
                rid=str(submitted), input_ids=ids, sampling_params=params
            )
            io.requests.append(request)
            submitted += 1
        scheduler.step()
        finished += take(io, answers, prompts)
    answers.seconds = time.perf_counter() - began
    while scheduler.has_work():
        scheduler.step()
    io.responses.clear()
    return answers


def take(io: ListIO, answers: Answers, prompts: list[Prompt]) -> int:
    """Take what was answered; return how many requests finished."""
    finished = 0
    for message in io.responses:
        for output in message.outputs if isinstance(message, BatchOutput) else ():
            index = int(output.rid)
            answers.outputs[index].extend(output.output_ids)
            reason = output.finish_reason
            if reason is not None:
                if reason.type == "abort":
                    raise SystemExit(f"prompt {index} is refused: {reason.message}")
                finished += 1
                for name in {None, prompts[index].category}:
                    answers.counts[name].verified += output.spec_verify_ct
                    answers.counts[name].gained += output.spec_accept_tokens
    io.responses.clear()
    return finished


def distinct_4_grams(outputs: list[list[int]]) -> float:
    grams = [tuple(ids[i : i + 4]) for ids in outputs for i in range(len(ids) - 3)]
    return len(set(grams)) / max(len(grams), 1)


# -- settings --------------------------------------------------------------------------


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Yield the plain engine and those with drafts, for each canary mode."""
    for canary in args.kv_canary:
        yield Setting(algorithm=None, head=None, canary=canary, tree=None)
        for head, algorithm, tree in itertools.product(
            args.draft_model_path, args.algorithms, args.trees
        ):
            for is_adaptive in {False, args.adaptive}:
                yield Setting(
                    algorithm=algorithm,
                    head=head,
                    canary=canary,
                    tree=tree,
                    is_adaptive=is_adaptive,
                )


def common_flags(args: argparse.Namespace) -> dict[str, Any]:
    flags = {
        "model_path": args.model_path,
        "page_size": args.page_size,
        "attention_backend": args.attention_backend,
        "random_seed": 0,
        "disable_radix_cache": True,
        "disable_cuda_graph": args.disable_cuda_graph,
        "disable_piecewise_cuda_graph": args.disable_cuda_graph,
        "max_running_requests": max(args.concurrency),
        "dtype": args.dtype,
    }
    if args.context_length:
        flags["context_length"] = args.context_length
    return flags


def row_of(
    setting: Setting, rows: int, own: Answers, *, plain: Answers, first: Answers
) -> dict[str, Any]:
    """Return the figures of one line; `first` holds the answers of the first engine."""
    same = sum(map(list.__eq__, own.outputs, first.outputs)) / len(own.outputs)
    return asdict(setting) | {
        "rows": rows,
        "prompts": len(own.outputs),
        "tokens": sum(map(len, own.outputs)),
        "tok_s": own.speed,
        "faster": own.speed / plain.speed,
        "accept_length": own.counts[None].accept_length,
        "by_category": {
            name: count.accept_length for name, count in own.counts.items() if name
        },
        "same": same,
        "distinct_4_grams": distinct_4_grams(own.outputs),
    }


def show(row: dict[str, Any]) -> None:
    head = Path(row["head"]).name if row["head"] else ""
    tree = ",".join(map(str, row["tree"] or ())) + "*" * row["is_adaptive"]
    print(
        f"{row['algorithm'] or 'none':10}  {head:11}  {row['canary']:6}  {tree:8} "
        f"{row['rows']:4}  {row['accept_length']:6.2f}  {row['tok_s']:6.0f}  "
        f"{row['faster']:6.2f}  {row['same']:4.2f}  {row['distinct_4_grams']:7.3f}",
        flush=True,
    )


def category_table(results: list[dict[str, Any]], rows: int) -> str:
    """Return the accept lengths by category of the first canary mode's engines with
    drafts, with `rows` requests in flight."""
    canary = results[0]["canary"]
    own = [
        row
        for row in results
        if row["tree"] and (row["canary"], row["rows"]) == (canary, rows)
    ]
    names = [name_of(row) for row in own]
    categories = sorted(own[0]["by_category"]) if own else []
    lines = [(name, *(row["by_category"][name] for row in own)) for name in categories]
    return format_table(("category", *names), lines) if lines else ""


def name_of(row: dict[str, Any]) -> str:
    head = Path(row["head"]).name if row["head"] else row["algorithm"]
    return f"{head} {','.join(map(str, row['tree']))}{'*' * row['is_adaptive']}"


def run(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(args.model_path)
    found = read_prompts(args.heldout, tokenizer)
    prompts = list(itertools.islice(found, args.prompts))
    if len(prompts) < args.prompts:
        raise SystemExit(
            f"--heldout {args.heldout} holds only {len(prompts)} long enough prompts; "
            f"lower --prompts {args.prompts}"
        )
    results: list[dict[str, Any]] = []
    first: list[Answers] = []
    plain: list[Answers] = []
    print(HEADER)
    for setting in settings(args):
        answers = in_scheduler(
            partial(measure, prompts=prompts, args=args),
            **common_flags(args),
            **setting.flags(),
        )
        first = first or answers
        plain = plain if setting.tree else answers
        for at, rows in enumerate(args.concurrency):
            own = row_of(setting, rows, answers[at], plain=plain[at], first=first[at])
            results.append(own)
            show(own)
    print(category_table(results, max(args.concurrency)))
    return {
        "model": Path(args.model_path).name,
        "page_size": args.page_size,
        "dtype": args.dtype,
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", default=str(bundled_demo_model_path()))
    add("--draft-model-path", nargs="+", default=[None], help="default: bundled ones")
    add("--heldout", type=Path, required=True)
    add("--prompts", type=int, default=24)
    add("--rounds", type=int, default=0, help="prompts per request in flight; 0: all")
    add("--new-tokens", type=int, default=256)
    add("--concurrency", type=int, nargs="+", default=[1])
    add("--kv-canary", nargs="+", default=["none"], help="modes, one after the other")
    add("--algorithms", nargs="+", default=["EAGLE3"])
    add("--dtype", default="auto")
    trees = [Tree(1, 3, 4), Tree(1, 5, 6), Tree(4, 5, 8), Tree(8, 5, 32)]
    add("--trees", type=Tree.parse, nargs="+", default=trees)
    add("--adaptive", action="store_true", help="also with --speculative-adaptive")
    add("--page-size", type=int, default=1)
    add("--attention-backend")
    add("--context-length", type=int, help="default: the model's")
    add("--disable-cuda-graph", action="store_true", help="a start takes less time")
    args = parser.parse_args()
    document = {"benchmark": "bench_spec_text", "torch": torch.__version__}
    if torch.cuda.is_available():
        document["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(document | run(args)))


if __name__ == "__main__":
    main()
