"""Training of the demo model's EAGLE head (Li et al., "EAGLE: Speculative Sampling
Requires Rethinking Feature Uncertainty", 2024).

The loss is the paper's: smooth L1 on the target's next state and cross-entropy against
the target's distribution, with uniform noise on the states that are fed. It is summed
over a few steps in which the head reads its own state (the training-time test of
EAGLE-3), because a head that only saw true states diverges after the first step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.demo_model.acceptance import head_matcher
from lab.demo_model.distill import (
    Distiller,
    Lesson,
    load_weights,
    parse_args,
    soft_cross_entropy,
)
from lab.demo_model.draft_heads import EagleHead
from lab.demo_model.model import DemoConfig

CONFIG = DemoConfig(num_hidden_layers=1, intermediate_size=448)
UNROLL = 4
STEP_DECAY = 0.8
REGRESSION_WEIGHT = 0.2
NOISE = 0.1


def eagle_loss(head: EagleHead, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum over the steps, and the accuracy of each."""
    hidden = lesson.states.hidden
    shares = lesson.logits.float().softmax(-1)
    best = lesson.logits.argmax(-1)
    noisy = hidden + (torch.rand_like(hidden) - 0.5) * 2 * NOISE
    total = torch.zeros((), device=hidden.device)
    parts: dict[str, Tensor] = {}
    for j, step in enumerate(head.unroll(lesson.ids, noisy, steps=UNROLL)):
        span = slice(j + 1, j + 1 + step.logits.shape[1])
        entropy = soft_cross_entropy(step.logits, shares[:, span]).mean()
        regression = F.smooth_l1_loss(step.hidden.float(), hidden[:, span].float())
        total = total + STEP_DECAY**j * (entropy + REGRESSION_WEIGHT * regression)
        right = step.logits.argmax(-1) == best[:, span]
        parts[f"right_{j}"] = right.float().mean()
        parts[f"regression_{j}"] = regression.detach()
    return total, parts


def main() -> None:
    args = parse_args(__doc__, name="eagle", lr=2e-3)
    distiller = Distiller(args, unroll=UNROLL)
    head = EagleHead(CONFIG, distiller.embedding).to(distiller.device)
    if args.resume is not None:
        load_weights(head, args.resume / "draft.safetensors")
    report = distiller.train(head, lambda lesson: eagle_loss(head, lesson))
    matcher = head_matcher(
        head,
        distiller.target,
        lambda states: states.hidden,
        None,
        device=distiller.device,
    )
    distiller.save(report, head.state_dict(), matcher)


if __name__ == "__main__":
    main()
