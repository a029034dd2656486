"""Training of the small language model that drafts for the demo model by itself
(STANDALONE): distillation of the target's distribution (Hinton et al., 2015) into the
same architecture at a tenth of the size, with the same tokenizer.
"""

from __future__ import annotations

from torch import Tensor

from lab.demo_model.acceptance import model_matcher
from lab.demo_model.distill import (
    Distiller,
    Lesson,
    load_weights,
    parse_args,
    soft_cross_entropy,
)
from lab.demo_model.model import DemoConfig, DemoModel

CONFIG = DemoConfig(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def draft_lm_loss(draft: DemoModel, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross-entropy against the target's distribution, and the agreement."""
    logits = draft(lesson.ids)
    loss = soft_cross_entropy(logits, lesson.logits.float().softmax(-1)).mean()
    right = logits.argmax(-1) == lesson.logits.argmax(-1)
    return loss, {"right": right.float().mean()}


def main() -> None:
    args = parse_args(__doc__, name="draft", lr=3e-3)
    distiller = Distiller(args, unroll=1)
    draft = DemoModel(CONFIG).to(distiller.device)
    if args.resume is not None:
        load_weights(draft, args.resume / "draft.safetensors")
    report = distiller.train(draft, lambda lesson: draft_lm_loss(draft, lesson))
    matcher = model_matcher(draft, device=distiller.device)
    distiller.save(report, draft.state_dict(), matcher)


if __name__ == "__main__":
    main()
