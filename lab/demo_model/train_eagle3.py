"""Training of the demo model's EAGLE3 head (Li et al., "EAGLE-3: Scaling up Inference
Acceleration of Large Language Models via Training-Time Test", 2025).

The loss is the paper's: cross-entropy against the target's distribution restricted to
the draft vocabulary, summed over steps in which the head reads its own state and
attends to the KV of its own chain; no regression of states.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from lab.demo_model.acceptance import head_matcher
from lab.demo_model.distill import (
    Distiller,
    Lesson,
    load_weights,
    parse_args,
    soft_cross_entropy,
)
from lab.demo_model.draft_heads import Eagle3Head
from lab.demo_model.model import DemoConfig

CONFIG = DemoConfig(num_hidden_layers=1, intermediate_size=640)
DRAFT_VOCAB = 2048
UNROLL = 5
STEP_DECAY = 0.8


def choose_draft_ids(counts: Tensor, size: int = DRAFT_VOCAB) -> Tensor:
    """Return the `size` most frequent tokens, ascending: int64 [size]."""
    return counts.topk(size).indices.sort().values


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t int64 [draft], target id minus draft id, and t2d bool [vocab]."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": t2d}


def read_draft_ids(weights: Path) -> Tensor:
    """Return the draft ids of a head's safetensors file."""
    d2t = load_file(weights)["d2t"]
    return d2t + torch.arange(len(d2t))


def eagle3_loss(
    head: Eagle3Head, draft_ids: Tensor, lesson: Lesson
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum over the steps, and the accuracy of each."""
    return chain_loss(
        head,
        draft_ids,
        ids=lesson.ids,
        aux=lesson.states.aux,
        shares=lesson.logits[..., draft_ids].float().softmax(-1),
        best=lesson.logits.argmax(-1),
        unroll=UNROLL,
    )


def chain_loss(
    head: Eagle3Head,
    draft_ids: Tensor,
    *,
    ids: Tensor,
    aux: Tensor,
    shares: Tensor,
    best: Tensor,
    unroll: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum over `unroll` steps, and the accuracy of each.

    A position whose best token is outside the draft vocabulary has no loss.

    Args:
        draft_ids: int64 [D], the target's ids of the draft vocabulary.
        ids: int64 [B, L].
        aux: [B, L, 3 H], states of three layers of the target.
        shares: fp32 [B, L, D], the target's distribution over the draft vocabulary.
        best: int64 [B, L], the target's greedy token; -1: padding.
    """
    is_known, is_real = torch.isin(best, draft_ids), best >= 0
    total = torch.zeros((), device=shares.device)
    parts: dict[str, Tensor] = {}
    for j, step in enumerate(head.unroll(ids, aux, steps=unroll)):
        span = slice(j + 1, j + 1 + step.logits.shape[1])
        known, real = is_known[:, span], is_real[:, span]
        entropy = soft_cross_entropy(step.logits, shares[:, span]) * known
        total = total + STEP_DECAY**j * entropy.sum() / known.sum().clamp(min=1)
        right = (draft_ids[step.logits.argmax(-1)] == best[:, span]) & real
        parts[f"right_{j}"] = right.sum() / real.sum().clamp(min=1)
    return total, parts


def main() -> None:
    args = parse_args(__doc__, name="eagle3", lr=2e-3)
    distiller = Distiller(args, unroll=UNROLL)
    counts = distiller.token_counts()
    # A resumed head keeps the draft ids of its rows.
    draft_ids = choose_draft_ids(counts)
    if args.resume is not None:
        draft_ids = read_draft_ids(args.resume / "draft.safetensors")
    on_device = draft_ids.to(distiller.device)
    head = Eagle3Head(
        CONFIG,
        distiller.embedding,
        on_device,
        final_norm=distiller.target.model.norm.weight.float(),
    ).to(distiller.device)
    if args.resume is not None:
        load_weights(head, args.resume / "draft.safetensors")
    report = distiller.train(head, lambda lesson: eagle3_loss(head, on_device, lesson))
    report["draft_vocab_share"] = round(
        float(counts[draft_ids].sum() / counts.sum()), 4
    )
    matcher = head_matcher(
        head,
        distiller.target,
        lambda states: states.aux,
        on_device,
        device=distiller.device,
    )
    maps = vocabulary_maps(draft_ids, CONFIG.vocab_size)
    distiller.save(report, {**head.state_dict(), **maps}, matcher)


if __name__ == "__main__":
    main()
