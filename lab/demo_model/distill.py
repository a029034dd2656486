"""The loop that trains a draft against the frozen target: windows, optimiser, clock.

Knows neither architectures nor losses: a task supplies both. Half of the windows of a
batch are text that the target generated (draft_text.py), the others are documents.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lab.demo_model.acceptance import (
    HeldoutText,
    Matcher,
    load_heldout,
    measure,
)
from lab.demo_model.data import batches, load_split
from lab.demo_model.model import parameter_count
from lab.demo_model.paths import ASSETS, BUILD, PACK
from lab.demo_model.target_states import (
    TargetStates,
    load_target,
    target_logits,
    target_states,
)
from lab.demo_model.train import device_kind

LENGTH = 2048
CHAT_SHARE = 0.15
WARMUP_STEPS = 60
LAST_LR_SHARE = 0.02
REPORTS_PER_RUN = 20
EVAL_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """One run. `seconds` counts from the first step; `length` tokens per window."""

    seconds: float
    batch: int
    length: int
    lr: float
    weight_decay: float
    seed: int
    unroll: int
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """ids int64 [B, L], the target's states and its logits [B, L, V]."""

    ids: Tensor
    states: TargetStates
    logits: Tensor


AnyLesson = TypeVar("AnyLesson")
# Loss of a lesson: fp32 scalar, and the values to print.
LossFunction = Callable[[AnyLesson], tuple[Tensor, dict[str, Tensor]]]


def soft_cross_entropy(logits: Tensor, shares: Tensor) -> Tensor:
    """Return -sum(shares * log softmax(logits)) [B, N], in fp32."""
    total: Tensor = -(shares * logits.float().log_softmax(-1)).sum(-1)
    return total


def windows(config: DistillConfig, *, pack: Path, text: Path) -> Iterator[Tensor]:
    """Yield int64 [batch, length]: half of the rows are the target's own text."""
    own_rows = config.batch // 2
    with np.load(text / "train.npz") as arrays:
        own = arrays["ids"][:, : config.length]
    rng = np.random.default_rng(config.seed)
    documents = batches(
        load_split(pack / "train.npz"),
        length=config.length,
        batch=config.batch - own_rows,
        chat_share=CHAT_SHARE,
        seed=config.seed + 1000,
    )
    while True:
        order = rng.permutation(len(own))
        for start in range(0, len(own) - own_rows + 1, own_rows):
            _, part = next(documents)
            rows = (own[order[start : start + own_rows]], part[:, : config.length])
            yield torch.from_numpy(np.concatenate(rows).astype(np.int64))


def learning_rate(config: DistillConfig, *, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to `LAST_LR_SHARE`."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    share = LAST_LR_SHARE + (1.0 - LAST_LR_SHARE) * cosine
    return config.lr * min(1.0, (step + 1) / WARMUP_STEPS) * share


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on a GPU."""
    is_cuda = device.type == "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_cuda)


def make_optimizer(draft: nn.Module, config: DistillConfig) -> torch.optim.AdamW:
    """AdamW; vectors do not decay."""
    weights = list(draft.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [w for w in weights if w.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=weights[0].is_cuda,
    )


def train_draft(
    draft: nn.Module,
    lessons: Iterator[AnyLesson],
    loss_of: LossFunction[AnyLesson],
    config: DistillConfig,
    device: torch.device,
    *,
    on_report: Callable[[dict[str, float]], None] = lambda row: None,
) -> dict[str, object]:
    """Train in place until the clock or `max_steps`; return the report.

    `on_report` gets each row of its history.
    """
    optimizer = make_optimizer(draft, config)
    history: list[dict[str, float]] = []
    step, progress, next_report = 0, 0.0, 1.0 / REPORTS_PER_RUN
    started = time.monotonic()
    while progress < 1.0:
        lesson = next(lessons)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step=step, progress=progress)
        with autocast(device):
            loss, parts = loss_of(lesson)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 4 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the clock must include the device's work
        seconds = time.monotonic() - started
        progress = max(seconds / config.seconds, step / config.max_steps)
        if progress >= next_report:
            next_report = progress + 1.0 / REPORTS_PER_RUN
            row = {"step": step, "seconds": round(seconds, 1)}
            row["loss"] = round(loss.item(), 4)
            row |= {k: round(v.item(), 4) for k, v in parts.items()}
            history.append(row)
            print(json.dumps(row), flush=True)
            on_report(row)
    return {
        "config": asdict(config),
        "parameters": parameter_count(draft),
        "steps": step,
        "tokens_seen": step * config.batch * config.length,
        "seconds": round(time.monotonic() - started, 1),
        "machine": device_kind(device),
        "torch": torch.__version__,
        "history": history,
    }


def save_weights(state: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; floating point as bfloat16."""
    narrow = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in state.items()
    }
    save_file(narrow, path, metadata={"format": "pt"})


class Distiller:
    """The target, the data and the clock of one run."""

    def __init__(self, args: argparse.Namespace, *, unroll: int) -> None:
        self.config = DistillConfig(
            seconds=args.seconds,
            batch=args.batch,
            length=args.length,
            lr=args.lr,
            weight_decay=args.weight_decay,
            seed=args.seed,
            unroll=unroll,
            max_steps=args.max_steps,
        )
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args = args
        self.device = torch.device(args.device)
        self.is_cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.target = load_target(args.assets, self.device, dtype)

    @property
    def embedding(self) -> Tensor:
        """The target's embedding, fp32 [V, H]."""
        return self.target.model.embed_tokens.weight.float()

    def token_counts(self) -> Tensor:
        """Count each token in the windows of a run, int64 [V]."""
        with np.load(self.args.text / "train.npz") as arrays:
            own = np.bincount(arrays["ids"].ravel(), minlength=4096)
        split = load_split(self.args.pack / "train.npz")
        code = np.bincount(np.concatenate(split.code), minlength=4096)
        return torch.from_numpy(own / own.sum() + code / code.sum())

    def heldout(self) -> HeldoutText:
        return load_heldout(self.args.text / "heldout.npz")

    def train(
        self, draft: nn.Module, loss_of: LossFunction[Lesson]
    ) -> dict[str, object]:
        """Train in place until the clock or `max_steps`; return the report."""
        report = train_draft(draft, self.lessons(), loss_of, self.config, self.device)
        return report | {"own_text_share": 0.5}

    def lessons(self) -> Iterator[Lesson]:
        for ids in windows(self.config, pack=self.args.pack, text=self.args.text):
            if self.is_cuda:
                ids = ids.pin_memory().to(self.device, non_blocking=True)
            states = target_states(self.target, ids)
            logits = target_logits(self.target, states)
            yield Lesson(ids=ids, states=states, logits=logits)

    def save(
        self, report: dict[str, object], state: dict[str, Tensor], matcher: Matcher
    ) -> None:
        """Measure the draft and write `draft.safetensors` and `training.json`."""
        began = time.monotonic()
        with autocast(self.device):
            report["acceptance"] = measure(self.heldout(), matcher, rows=EVAL_ROWS)
        report["acceptance_seconds"] = round(time.monotonic() - began, 1)
        out: Path = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        save_weights(state, out / "draft.safetensors")
        (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report["acceptance"]), flush=True)


def load_weights(draft: nn.Module, path: Path) -> None:
    """Load the weights of an earlier run."""
    state = load_file(path)
    wanted = {k: v.float() for k, v in state.items() if v.is_floating_point()}
    draft.load_state_dict(wanted, strict=True)


def parse_args(description: str | None, *, name: str, lr: float) -> argparse.Namespace:
    """Parse the command line that the three training scripts share."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--text", type=Path, default=BUILD / "draft_text")
    parser.add_argument("--out", type=Path, default=BUILD / "drafts" / name)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--max-steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
