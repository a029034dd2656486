"""Training of the demo model on packed tokens; keeps the checkpoint that is best on the
held-out files.

Knows the optimiser and the clock; refuses to know text and the exported format. The
learning rate follows whichever is further along, steps or seconds, so that a run ends
with a finished schedule on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.demo_model.data import Tokens, batches, cut_windows, join, load_split
from lab.demo_model.model import DemoConfig, DemoModel, parameter_count
from lab.demo_model.paths import PACK, RUN

WARMUP_STEPS = 100
COMPILE_STEPS = 3
EVALS_PER_RUN = 30
LAST_LR_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. `seconds` counts from the end of compilation."""

    steps: int
    seconds: float
    batch: int
    length: int
    lr: float
    weight_decay: float
    dropout: float
    chat_share: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Best:
    """The best held-out loss so far and the weights that reached it."""

    loss: float = math.inf
    step: int = 0
    epoch: int = 0
    state: dict[str, Tensor] | None = None


def learning_rate(config: TrainConfig, *, step: int, progress: float) -> float:
    """Return the rate: linear warm-up, then a cosine from `lr` to `LAST_LR_SHARE`."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * warm * (LAST_LR_SHARE + (1.0 - LAST_LR_SHARE) * cosine)


def build_optimizer(
    model: DemoModel, config: TrainConfig, device: torch.device
) -> torch.optim.AdamW:
    """Build AdamW that decays matrices but not norm weights."""
    matrices = [w for w in model.parameters() if w.dim() >= 2]
    vectors = [w for w in model.parameters() if w.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )


def to_device(windows: Tokens, device: torch.device) -> Tensor:
    """Copy int64 windows to the device, asynchronously if it has a stream."""
    host = torch.from_numpy(windows.astype(np.int64))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


class Trainer:
    """One model, its data and its clock. `run` returns the report."""

    def __init__(
        self, config: TrainConfig, *, pack: Path, device: torch.device, compiled: bool
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.device = device
        self.train_split = load_split(pack / "train.npz")
        heldout = load_split(pack / "heldout.npz")
        self.heldout = {
            "code": cut_windows(join(heldout.code), length=config.length),
            "chat": cut_windows(join(heldout.chat), length=config.length),
        }
        self.model = DemoModel(DemoConfig(), dropout=config.dropout).to(device)
        self.optimizer = build_optimizer(self.model, config, device)
        self.loss = torch.compile(self.model.loss) if compiled else self.model.loss
        self.best = Best()
        self.history: list[dict[str, float]] = []

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def heldout_loss(self, kind: str) -> float:
        """Return the mean nats per token on held-out "code" or "chat" windows."""
        self.model.eval()
        windows = self.heldout[kind]
        total = 0.0
        with self.autocast():
            for start in range(0, len(windows), self.config.batch):
                part = to_device(
                    windows[start : start + self.config.batch], self.device
                )
                total += self.model.loss(part).item() * len(part)
        self.model.train()
        return total / len(windows)

    def step(self, windows: Tokens, lr: float) -> Tensor:
        """Run one update; return the loss on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.autocast():
            loss: Tensor = self.loss(to_device(windows, self.device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def evaluate(self, *, step: int, epoch: int, train: float, seconds: float) -> None:
        """Measure, prints, and keeps the weights when they are the best yet."""
        code, chat = self.heldout_loss("code"), self.heldout_loss("chat")
        row = {
            "step": step,
            "epoch": epoch,
            "seconds": round(seconds, 1),
            "train_loss": round(train, 4),
            "heldout_loss": round(code, 4),
            "heldout_chat_loss": round(chat, 4),
        }
        self.history.append(row)
        print(json.dumps(row), flush=True)
        if code < self.best.loss:
            state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
            self.best = Best(loss=code, step=step, epoch=epoch, state=state)

    def run(self) -> dict[str, object]:
        config = self.config
        stream = batches(
            self.train_split,
            length=config.length,
            batch=config.batch,
            chat_share=config.chat_share,
            seed=config.seed,
        )
        begin = started = time.monotonic()
        step, epoch, progress, next_eval = 0, 0, 0.0, 1.0 / EVALS_PER_RUN
        running = torch.zeros((), device=self.device)
        since = 0
        while progress < 1.0:
            epoch, windows = next(stream)
            lr = learning_rate(config, step=step, progress=progress)
            running += self.step(windows, lr)
            since += 1
            step += 1
            if step == COMPILE_STEPS:
                running.item()
                started = time.monotonic()
            seconds = time.monotonic() - started if step > COMPILE_STEPS else 0.0
            progress = max(step / config.steps, seconds / config.seconds)
            if progress >= next_eval or progress >= 1.0:
                self.evaluate(
                    step=step,
                    epoch=epoch,
                    train=running.item() / since,
                    seconds=seconds,
                )
                running.zero_()
                since = 0
                next_eval = progress + 1.0 / EVALS_PER_RUN
        seconds = time.monotonic() - started
        tokens = (step - COMPILE_STEPS) * config.batch * config.length
        return {
            "config": asdict(config),
            "model": asdict(self.model.config),
            "parameters": parameter_count(self.model),
            "steps": step,
            "epochs": epoch + 1,
            "tokens_seen": step * config.batch * config.length,
            "seconds": round(seconds, 1),
            "compile_seconds": round(started - begin, 1),
            "tokens_per_second": round(tokens / max(seconds, 1e-9)),
            "best_step": self.best.step,
            "best_heldout_loss": round(self.best.loss, 4),
            "history": self.history,
        }


def device_kind(device: torch.device) -> str:
    """Describe the machine for the card."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return "CPU"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, default=RUN)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--seconds", type=float, default=390.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--chat-share", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    config = TrainConfig(
        steps=args.steps,
        seconds=args.seconds,
        batch=args.batch,
        length=args.length,
        lr=args.lr,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        chat_share=args.chat_share,
        seed=args.seed,
    )
    trainer = Trainer(
        config, pack=args.pack, device=device, compiled=not args.no_compile
    )
    report = trainer.run()
    report["machine"] = device_kind(device)
    report["torch"] = torch.__version__
    args.out.mkdir(parents=True, exist_ok=True)
    if trainer.best.state is None:
        raise RuntimeError("no held-out measurement was finite: training diverged")
    state = {k: v.cpu().contiguous() for k, v in trainer.best.state.items()}
    save_file(state, args.out / "checkpoint.safetensors")
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "history"}))


if __name__ == "__main__":
    main()
