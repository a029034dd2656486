"""Evaluation of an exported model folder through transformers: evaluation.json.

Knows the held-out files and the exported weights; refuses to know the training code.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from lab.demo_model.completions import (
    MIN_CODE_LINES,
    Cut,
    PromptCase,
    choose_cases,
    count_code_lines,
    cut_completion,
    distinct_ratio,
    does_parse,
    pooled_distinct_ratio,
)
from lab.demo_model.data import cut_windows, join, load_split
from lab.demo_model.paths import (
    ASSETS,
    ENDOFTEXT_ID,
    IM_END,
    IM_END_ID,
    IM_START,
    PACK,
    RUN,
)

CONTEXT_LENGTH = 2048
MAX_NEW_TOKENS = 256
CASE_COUNT = 200
CHAT_COUNT = 100
SAMPLE_COUNT = 4
SAMPLED_TEMPERATURE = 0.7
SEED = 0
CHAT_PROMPTS = (
    "Write a Python function that reverses a string.",
    "Write a function that checks if a number is prime.",
    "Write a Python function to read a file and return its lines.",
    "How do I merge two dictionaries in Python?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Generated ids without the end mark; `is_truncated`: the length limit ended it."""

    ids: list[int]
    end_id: int | None

    @property
    def is_truncated(self) -> bool:
        return self.end_id is None


class Runner:
    """Batched generation and loss on one loaded model."""

    def __init__(self, *, model: Path, device: torch.device, batch: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.to(device).eval()
        self.device = device
        self.batch = batch

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @torch.no_grad()
    def loss_sum(self, windows: Tensor) -> float:
        """Return the total nats of windows int64 [N, T + 1]."""
        total = 0.0
        for start in range(0, len(windows), self.batch):
            part = windows[start : start + self.batch].to(self.device)
            logits = self.model(input_ids=part[:, :-1]).logits.float()
            targets = part[:, 1:].flatten()
            nats = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            total += nats.item()
        return total

    def generate(
        self, prompts: list[list[int]], *, temperature: float = 0.0
    ) -> list[Reply]:
        """Generate; greedy at temperature 0.

        Prompts that are too long for the context keep their last tokens.
        """
        keep = CONTEXT_LENGTH - MAX_NEW_TOKENS
        prompts = [prompt[-keep:] for prompt in prompts]
        # Prompts of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        replies: dict[int, Reply] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            rows = self._generate([prompts[i] for i in part], temperature)
            replies.update(zip(part, rows, strict=True))
            print(f"generated {len(replies)} of {len(prompts)}", flush=True)
        return [replies[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], temperature: float) -> list[Reply]:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), ENDOFTEXT_ID)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature > 0
            else {"do_sample": False}
        )
        out = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=[ENDOFTEXT_ID, IM_END_ID],
            pad_token_id=ENDOFTEXT_ID,
            **sampling,
        )
        return [read_reply(row) for row in out[:, width:].tolist()]


def read_reply(ids: list[int]) -> Reply:
    """Split generated ids at the first end mark."""
    for index, token in enumerate(ids):
        if token in (ENDOFTEXT_ID, IM_END_ID):
            return Reply(ids=ids[:index], end_id=token)
    return Reply(ids=ids, end_id=None)


def measure_loss(runner: Runner, pack: Path) -> dict[str, float]:
    """Measure the held-out loss of files and chats, per token and per byte of text."""
    split = load_split(pack / "heldout.npz")
    found: dict[str, float] = {}
    for name, documents, size in (
        ("code", split.code, split.code_bytes),
        ("chat", split.chat, split.chat_bytes),
    ):
        stream = join(documents)
        windows = cut_windows(stream, length=CONTEXT_LENGTH)
        nats = runner.loss_sum(torch.from_numpy(windows.astype(np.int64)))
        rest = stream[windows.size - len(windows) :]
        if len(rest) > 1:
            nats += runner.loss_sum(torch.from_numpy(rest.astype(np.int64))[None])
        found[f"{name}_nats_per_token"] = round(nats / (len(stream) - 1), 4)
        found[f"{name}_nats_per_byte"] = round(nats / size, 4)
        found[f"{name}_tokens"] = len(stream) - 1
        found[f"{name}_bytes"] = size
    return found


def measure_completions(
    runner: Runner, cases: list[PromptCase], *, temperature: float
) -> tuple[dict[str, float], list[Cut]]:
    """Measure shares over `cases`; also return the cuts in the order of the cases."""
    torch.manual_seed(SEED)
    replies = runner.generate(
        [runner.encode(case.prompt) for case in cases], temperature=temperature
    )
    cuts = [
        cut_completion(case, runner.decode(reply.ids), is_truncated=reply.is_truncated)
        for case, reply in zip(cases, replies, strict=True)
    ]
    good = [does_parse(case, cut) for case, cut in zip(cases, cuts, strict=True)]
    short = [count_code_lines(cut.text) < MIN_CODE_LINES for cut in cuts]
    ids = [runner.encode(cut.text) for cut in cuts]
    return {
        "count": len(cases),
        "temperature": temperature,
        "parse_share": round(sum(good) / len(cases), 4),
        "too_short_share": round(sum(short) / len(cases), 4),
        "closed_share": round(sum(cut.is_closed for cut in cuts) / len(cases), 4),
        "distinct_4gram": round(distinct_ratio(ids), 4),
        "distinct_4gram_pooled": round(pooled_distinct_ratio(ids), 4),
        "mean_tokens": round(sum(map(len, ids)) / len(cases), 1),
    }, cuts


def chat_prompt(user: str) -> str:
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n"


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return bool(text.strip())


def measure_chat(runner: Runner, pack: Path) -> dict[str, object]:
    """Measure greedy answers to held-out requests and to fixed ones for the card."""
    with (pack / "chat_heldout.jsonl").open(encoding="utf-8") as reader:
        users = list(dict.fromkeys(json.loads(line)["user"] for line in reader))
    order = np.random.default_rng(SEED).permutation(len(users))[:CHAT_COUNT]
    asked = [users[i] for i in order] + list(CHAT_PROMPTS)
    replies = runner.generate([runner.encode(chat_prompt(user)) for user in asked])
    heldout = replies[: len(order)]
    ended = [reply.end_id == IM_END_ID for reply in heldout]
    parsed = [is_python(runner.decode(reply.ids)) for reply in heldout]
    both = sum(a and b for a, b in zip(ended, parsed, strict=True))
    return {
        "count": len(heldout),
        "ended_share": round(sum(ended) / len(heldout), 4),
        "ended_and_parse_share": round(both / len(heldout), 4),
        "samples": [
            {
                "user": user,
                "assistant": runner.decode(reply.ids),
                "ended": reply.end_id == IM_END_ID,
            }
            for user, reply in zip(CHAT_PROMPTS, replies[len(order) :], strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, default=RUN / "evaluation.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--cases", type=int, default=CASE_COUNT)
    args = parser.parse_args()
    begin = time.monotonic()
    runner = Runner(
        model=args.model, device=torch.device(args.device), batch=args.batch
    )
    with (args.pack / "heldout.jsonl").open(encoding="utf-8") as reader:
        files = [(item["path"], item["text"]) for item in map(json.loads, reader)]
    cases = choose_cases(files, count=args.cases, seed=SEED)
    greedy, cuts = measure_completions(runner, cases, temperature=0.0)
    sampled, _ = measure_completions(runner, cases, temperature=SAMPLED_TEMPERATURE)
    references = [runner.encode(case.reference)[:MAX_NEW_TOKENS] for case in cases]
    report = {
        "loss": measure_loss(runner, args.pack),
        "greedy": greedy,
        "sampled": sampled,
        "reference": {
            "distinct_4gram": round(distinct_ratio(references), 4),
            "distinct_4gram_pooled": round(pooled_distinct_ratio(references), 4),
        },
        "chat": measure_chat(runner, args.pack),
        "rules": {
            "context_tokens": CONTEXT_LENGTH - MAX_NEW_TOKENS,
            "max_new_tokens": MAX_NEW_TOKENS,
            "min_code_lines": MIN_CODE_LINES,
            "files": len({case.path for case in cases}),
        },
        "samples": [
            {
                "path": case.path,
                "prompt_end": case.prompt.splitlines()[case.def_line - 1 :],
                "completion": cut.text,
                "parses": does_parse(case, cut),
            }
            for case, cut in list(zip(cases, cuts, strict=True))[:SAMPLE_COUNT]
        ],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    with args.out.with_name("completions.jsonl").open("w") as stream:
        for case, cut in zip(cases, cuts, strict=True):
            row = {"path": case.path, "def_line": case.def_line, **asdict(cut)}
            stream.write(json.dumps(row) + "\n")
    print(json.dumps({k: report[k] for k in ("loss", "greedy", "sampled")}))
    print(json.dumps(report["chat"], indent=1))
    print(f"evaluated in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
