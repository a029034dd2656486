"""Acceptance of drafts on held-out code: tokens per verification of a greedy chain, on
text that the target generated greedily.

Knows drafts as matches per position; refuses to know training. The measure is exact for
greedy chains: a draft token is accepted if it equals the target's greedy token, and the
chain after the first difference is lost, so a chain that is fed the target's text
accepts the same tokens as one that is fed its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.demo_model.draft_heads import DraftHead
from lab.demo_model.model import DemoModel
from lab.demo_model.paths import ENDOFTEXT_ID, IM_END_ID
from lab.demo_model.target_states import TargetStates, target_states

CHAIN_STEPS = (3, 5)
# matches[n, j]: whether the chain rooted at token n predicts token n + 1 + j.
Matches = npt.NDArray[np.bool_]
Matcher = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutText:
    """ids int64 [R, L]; tokens [prompt_lens, ends) of a row were written greedily."""

    ids: Tensor
    prompt_lens: list[int]
    ends: list[int]
    new_tokens: int


def load_heldout(path: Path) -> HeldoutText:
    """Read the output of draft_text.py; a row ends with its first end mark."""
    with np.load(path) as arrays:
        ids = arrays["ids"].astype(np.int64)
        prompt_lens = arrays["prompt_lens"].tolist()
        new_tokens = int(arrays["new_tokens"])
    ends = []
    for row, start in zip(ids, prompt_lens, strict=True):
        own = row[start : start + new_tokens]
        marks = np.flatnonzero((own == ENDOFTEXT_ID) | (own == IM_END_ID))
        ends.append(start + (int(marks[0]) + 1 if len(marks) else len(own)))
    return HeldoutText(
        ids=torch.from_numpy(ids),
        prompt_lens=prompt_lens,
        ends=ends,
        new_tokens=new_tokens,
    )


def walk(matches: Matches, *, start: int, end: int, steps: int) -> tuple[int, int]:
    """Return (verifications, tokens) of one request.

    Its first token `start` comes from the prefill, its last token is `end - 1`.
    """
    verifications, root = 0, start
    while root < end - 1:
        row = matches[root, :steps]
        accepted = steps if row.all() else int(row.argmin())
        root += min(accepted + 1, end - 1 - root)
        verifications += 1
    return verifications, max(0, end - 1 - start)


def measure(text: HeldoutText, matcher: Matcher, *, rows: int) -> dict[str, object]:
    """Measure tokens per verification by number of steps, and accuracy by depth.

    The means include the bonus token. The accuracy is the share of correct chains at
    each depth among those that are correct up to it.

    `matcher` maps ids [B, L] to bool [B, N, S] by root (see `Matches`).
    """
    totals = {steps: [0, 0] for steps in CHAIN_STEPS}
    alive = np.zeros(max(CHAIN_STEPS) + 1)
    for at in range(0, len(text.ids), rows):
        found = matcher(text.ids[at : at + rows]).cpu().numpy()
        spans = zip(
            text.prompt_lens[at : at + rows], text.ends[at : at + rows], strict=True
        )
        for matches, (start, end) in zip(found, spans, strict=True):
            for steps, total in totals.items():
                cycles, tokens = walk(matches, start=start, end=end, steps=steps)
                total[0] += cycles
                total[1] += tokens
            inner = matches[start : max(start, end - 1 - max(CHAIN_STEPS))]
            alive += [len(inner), *np.logical_and.accumulate(inner, axis=1).sum(0)]
    return {
        "accept_length": {
            str(steps): round(tokens / max(cycles, 1), 4)
            for steps, (cycles, tokens) in totals.items()
        },
        "right_by_depth": [
            round(float(b / max(a, 1.0)), 4)
            for a, b in zip(alive[:-1], alive[1:], strict=True)
        ],
        "requests": len(text.ids),
        "new_tokens": text.new_tokens,
        "tokens": totals[CHAIN_STEPS[0]][1],
    }


def head_matcher(
    head: DraftHead,
    target: DemoModel,
    choose_states: Callable[[TargetStates], Tensor],
    draft_ids: Tensor | None,
    *,
    device: torch.device,
) -> Matcher:
    """Return a matcher of an EAGLE or EAGLE3 head; `draft_ids` maps its vocabulary."""
    steps = max(CHAIN_STEPS)

    @torch.no_grad()
    def matcher(ids: Tensor) -> Tensor:
        ids = ids.to(device)
        states = choose_states(target_states(target, ids))
        # Anchor n has root n + 1; the last positions have no whole chain.
        found = torch.zeros(*ids.shape, steps, dtype=torch.bool, device=device)
        for j, step in enumerate(head.unroll(ids, states, steps=steps)):
            chosen = step.logits.argmax(-1)
            chosen = chosen if draft_ids is None else draft_ids[chosen]
            count = min(chosen.shape[1], ids.shape[1] - 2 - j)
            right = chosen[:, :count] == ids[:, j + 2 : j + 2 + count]
            found[:, 1 : count + 1, j] = right
        return found

    return matcher


def model_matcher(model: DemoModel, *, device: torch.device) -> Matcher:
    """Return the matcher of a language model that drafts by itself (STANDALONE)."""
    steps = max(CHAIN_STEPS)

    @torch.no_grad()
    def matcher(ids: Tensor) -> Tensor:
        ids = ids.to(device)
        right = model(ids)[:, :-1].argmax(-1) == ids[:, 1:]
        found = torch.zeros(*ids.shape, steps, dtype=torch.bool, device=device)
        for j in range(steps):
            found[:, : right.shape[1] - j, j] = right[:, j:]
        return found

    return matcher
