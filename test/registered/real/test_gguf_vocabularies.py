"""Published vocabularies in GGUF files: the ids that llama.cpp expects of its texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gguf_vocabularies import VOCABULARIES
from sglang.srt.utils.gguf_header import read_gguf_header
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="real")

SEPARATOR = "\n__ggml_vocab_test__\n"
# Of the architectures that are served from GGUF files, then of others.
NAMES = ["llama-bpe", "llama-spm", "deepseek-coder", "deepseek-llm", "qwen2", "qwen35"]
NAMES += ["phi-3", "command-r", "gpt-2", "mpt", "refact", "starcoder"]
REFUSED = {
    "aquila": "pre null",
    "bert-bge": 'model "bert"',
    "falcon": 'pre "falcon"',
    "gemma-4": 'model "gemma4"',
    "gpt-neox": "pre null",
    "nomic-bert-moe": 'model "t5"',
}


def file_of(name: str) -> Path:
    file = VOCABULARIES.folder / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip("no vocabularies: scripts/gguf_vocabularies.py fetch")
    return file


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    file = file_of(name)
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = Path(f"{file}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) >= 47
    tokenizer = load_tokenizer(str(file))
    for text, line in zip(texts, lines[: len(texts)], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token_id) for token_id in line.split()], text
        assert tokenizer.decode(ids) == text


def test_every_word_of_llama_3_is_one_token() -> None:
    file = file_of("llama-bpe")
    tokenizer = load_tokenizer(str(file))
    kinds = read_gguf_header(file).values["tokenizer.ggml.token_type"]
    ids = [token_id for token_id, kind in enumerate(kinds) if kind == 1]
    texts = {token_id: tokenizer.token_bytes(token_id) for token_id in ids}
    split = 0
    for token_id, data in texts.items():
        try:
            text = data.decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        found = tokenizer.encode(text, add_special_tokens=False)
        split += found != [token_id]
    assert split == 0


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        load_tokenizer(str(file_of(name)))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
