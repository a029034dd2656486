"""llama.cpp's stock grammars compile, and lead outputs to an end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from scripts.gguf_vocabularies import VOCABULARIES
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="real")

NAMES = "arithmetic c chess english japanese json json_arr list"
VOCAB_SIZE = 4096
EOS = 0


@pytest.fixture(scope="module")
def backend() -> Iterator[LLGuidanceBackend]:
    tokenizer = load_tokenizer(str(bundled_demo_model_path()))
    result = LLGuidanceBackend(
        tokenizer.tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[EOS]
    )
    yield result
    result.close()


@pytest.mark.parametrize("name", NAMES.split())
def test_outputs_reach_an_end(name: str, backend: LLGuidanceBackend) -> None:
    file = VOCABULARIES.folder / f"{name}.gbnf"
    if not file.is_file():
        pytest.skip("no grammars: scripts/gguf_vocabularies.py remove, then fetch")
    template = backend.compile("ebnf", file.read_text(encoding="utf-8"))
    rng = random.Random(name)
    ended = 0
    for _ in range(20):
        grammar = template.fork()
        for _ in range(200):
            mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
            grammar.fill_mask(mask)
            bits = mask[:, None] >> torch.arange(32) & 1
            choices = bits.flatten().nonzero()[:, 0].tolist()
            assert choices
            if EOS in choices and rng.random() < 0.5:
                grammar.accept(EOS)
                assert grammar.is_terminated()
                ended += 1
                break
            grammar.accept(rng.choice([one for one in choices if one != EOS] or [EOS]))
    assert ended >= 5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
