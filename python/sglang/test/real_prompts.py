"""Prompts of real text, and what `transformers` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.utils.hf_tokenizer import Tokenizer

LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"
SHORT_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    "Grüße aus München! Das Wetter ist heute",
    "こんにちは。今日は",
    "🎉🎊 Emoji are",
    "Q: What is 7 times 8?\nA:",
)
# Tokens of the licence: around pages and chunks, up to 1,500.
LONG_LENS = (31, 64, 65, 127, 255, 256, 400, 511, 640, 900, 1200, 1500)


def real_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twenty prompts of 5 to 1,500 tokens, with what the tokenizer puts before them."""
    licence = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))
    begin = [tokenizer.bos_token_id] if licence[0] == tokenizer.bos_token_id else []
    texts = [tokenizer.encode(text) for text in SHORT_TEXTS]
    starts = (len(begin) + 37 * number for number in range(len(LONG_LENS)))
    parts = [
        begin + licence[start : start + length - len(begin)]
        for start, length in zip(starts, LONG_LENS, strict=True)
    ]
    return texts + parts


class Reference:
    """A model in float32 as `transformers` loads it.

    Greedy output is checked, not made: the tokens after a prompt are greedy if each is
    the most likely one after those before it, which takes one forward.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, **options).eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def greedy(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The most likely token at each place of `output`."""
        logprobs = self._logprobs(prompt, output)
        return logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()

    def prompt_logprobs(
        self, prompt: Sequence[int], output: Sequence[int]
    ) -> torch.Tensor:
        """Log probabilities [prompt - 1] of the prompt's own tokens but the first."""
        logprobs = self._logprobs(prompt, output)[: len(prompt) - 1]
        return logprobs.gather(1, torch.tensor(prompt)[1:, None])[:, 0]

    def _logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        tokens = (*prompt, *output)
        if tokens not in self._known:
            self._known = {}  # of one sequence at a time: [tokens, vocabulary] each
            with torch.inference_mode():
                logits = self.model(torch.tensor([tokens])).logits[0]
            self._known[tokens] = logits.log_softmax(-1)
        return self._known[tokens]
