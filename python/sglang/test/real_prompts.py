"""Prompts of real text, the reference outputs of `transformers`, and comparisons with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.model_loader.weight_utils import iterate_weights
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.test.harness import EngineHarness

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
# Token counts of license text, around pages and chunks, up to 1,500.
LONG_LENS = (31, 64, 65, 127, 255, 256, 400, 511, 640, 900, 1200, 1500)

NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
# Tolerance of one log probability in float32.
TOLERANCE = 5e-4
DRAFTS_FOR_ITSELF = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}


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

    Greedy output is checked rather than generated: tokens are greedy if each is the
    most likely one after the preceding ones, which takes one forward.
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
            self._known = {}  # one sequence at a time: [tokens, vocabulary] each
            with torch.inference_mode():
                logits = self.model(torch.tensor([tokens])).logits[0]
            self._known[tokens] = logits.log_softmax(-1)
        return self._known[tokens]


class GreedyOutputs:
    """Greedy tokens of engines, each prompt's compared with the reference once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: dict[tuple[int, ...], list[int]] = {}

    def check(self, prompt: Sequence[int], tokens: list[int]) -> bool:
        """Check the tokens; return whether they were known."""
        key = tuple(prompt)
        is_known = key in self._known
        if not is_known:
            assert len(tokens) == NEW_TOKENS
            assert tokens == self._reference.greedy(prompt, tokens)
            self._known[key] = tokens
        assert tokens == self._known[key]
        return is_known

    def check_cold(
        self, engine: EngineHarness, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Run one prompt after another, with the log probabilities of each."""
        for prompt in prompts:
            answer = engine.generate(
                prompt, **GREEDY, return_logprob=True, logprob_start_len=0
            )
            if self.check(prompt, answer.output_ids):
                continue
            of_prompt = answer.logprobs[0].input_token
            assert of_prompt is not None
            given = [logprob for logprob, _ in of_prompt[1:]]
            torch.testing.assert_close(
                torch.tensor(given),
                self._reference.prompt_logprobs(prompt, answer.output_ids),
                atol=TOLERANCE,
                rtol=0,
            )

    def check_batched(
        self, engine: EngineHarness, prompts: Sequence[Sequence[int]]
    ) -> int:
        """Run all prompts at once; returns the total cached tokens."""
        rids = [engine.submit(prompt, **GREEDY) for prompt in prompts]
        answers = engine.run()
        for rid, prompt in zip(rids, prompts, strict=True):
            self.check(prompt, answers[rid].output_ids)
        return sum(answer.cached_tokens for answer in answers.values())


def check_gguf(folder: Path) -> None:
    """Compare the GGUF file in `folder` with transformers' reading of it, and with the
    checkpoint next to it, in bfloat16.
    """
    pytest.importorskip("accelerate")
    from transformers import GgufConfig

    theirs = Reference(
        folder,
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
    ).model.state_dict()
    converted = dict(iterate_weights(folder))
    names = set()
    for name, tensor in iterate_weights(folder / "model.gguf"):
        names.add(name)
        assert torch.equal(tensor, theirs[name]), name
        assert torch.equal(tensor.bfloat16(), converted[name]), name
    assert names == set(converted) == set(theirs) - {"lm_head.weight"}
