"""The shipped folder: sizes, index, tokenizer, chat template, and a card whose numbers
are the measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers

from lab.demo_model import export_drafts
from lab.demo_model.card import render_card
from lab.demo_model.export import MAX_SHARD_BYTES
from lab.demo_model.model import DemoConfig
from lab.demo_model.pack import render_chat
from lab.demo_model.paths import ASSETS, IM_END_ID, SPECIAL_TOKENS
from lab.demo_model.train_tokenizer import tokenizer_config
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

MAX_TARGET_BYTES = 24_000_000
MAX_DRAFT_BYTES = 10_000_000
MAX_PACKAGE_BYTES = 33_000_000


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ASSETS / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_sizes_are_within_the_limits() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    target = sum(p.stat().st_size for p in files if p.parent == ASSETS)
    assert max(path.stat().st_size for path in files) <= MAX_SHARD_BYTES
    assert target <= MAX_TARGET_BYTES
    assert sum(path.stat().st_size for path in files) <= MAX_PACKAGE_BYTES


def test_index_names_every_tensor_once() -> None:
    index = read_json("model.safetensors.index.json")
    found: dict[str, str] = {}
    total = 0
    for shard in sorted(ASSETS.glob("model-*.safetensors")):
        with safe_open(shard, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = shard.name
                tensor = reader.get_tensor(name)
                assert str(tensor.dtype) == "torch.bfloat16"
                total += tensor.nbytes
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    assert "lm_head.weight" not in found
    assert total == 2 * read_json("metrics.json")["training"]["parameters"]


def test_configuration_files_are_what_the_scripts_write() -> None:
    assert read_json("config.json") == DemoConfig().to_transformers()
    assert read_json("tokenizer_config.json") == tokenizer_config()
    assert read_json("generation_config.json")["eos_token_id"] == [0, IM_END_ID]


def test_card_is_rendered_from_the_metrics() -> None:
    metrics = read_json("metrics.json")
    card = (ASSETS / "README.md").read_text(encoding="utf-8")
    assert card == render_card(metrics)
    evaluation = metrics["evaluation"]
    greedy = evaluation["greedy"]
    assert greedy["count"] == 200
    assert greedy["parse_share"] >= 0.6
    assert 0.0 < greedy["distinct_4gram"] <= 1.0
    assert 0.0 < evaluation["loss"]["code_nats_per_token"] < 2.0
    for number in (
        evaluation["loss"]["code_nats_per_token"],
        evaluation["loss"]["code_nats_per_byte"],
        greedy["distinct_4gram"],
        f"{100 * greedy['parse_share']:.1f} % of 200",
    ):
        assert str(number) in card
    for licence in ("PSF-2.0", "BSD-3-Clause"):
        assert licence in card


def test_heldout_share_and_reported_best_agree() -> None:
    metrics = read_json("metrics.json")
    files = [metrics["corpus"][split]["files"] for split in ("train", "heldout")]
    assert 0.01 < files[1] / sum(files) < 0.03
    best = min(run["best_heldout_loss"] for run in metrics["runs"])
    assert metrics["training"]["best_heldout_loss"] == best


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_returns_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_has_every_byte(tokenizer: Tokenizer) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert all(tokenizer.token_to_id(char) is not None for char in alphabet)
    assert tokenizer.get_vocab_size() == DemoConfig().vocab_size
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token).ids == [index]


def test_source_code_survives_and_is_compressed(tokenizer: Tokenizer) -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(source).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == source
    assert len(source) / len(ids) > 2.5


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    text = "def f(x):\n    return x + 10\n\n\tnaïve = '\u65e5\u672c'  # <|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == IM_END_ID


def test_chat_template_renders_as_in_training() -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    messages = [
        {"role": "system", "content": "You write Python code."},
        {"role": "user", "content": "Write f."},
        {"role": "assistant", "content": "def f():\n    pass"},
    ]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou write Python code.<|im_end|>\n"
        "<|im_start|>user\nWrite f.<|im_end|>\n"
        "<|im_start|>assistant\ndef f():\n    pass<|im_end|>\n"
    )
    sample = {key["role"]: key["content"] for key in messages}
    assert render_chat(sample) == rendered
    prompt = theirs.apply_chat_template(
        messages[:2], tokenize=False, add_generation_prompt=True
    )
    assert rendered.startswith(prompt)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Write f."}]}]
    assert theirs.apply_chat_template(parts, tokenize=False) == (
        "<|im_start|>user\nWrite f.<|im_end|>\n"
    )


def test_shipped_drafts_fit_and_their_cards_are_measured() -> None:
    shipped = [draft for draft in export_drafts.DRAFTS if draft.folder.is_dir()]
    if not shipped:
        pytest.skip("no draft has been trained and exported yet")
    assert len(shipped) == len(export_drafts.DRAFTS)
    files = [
        path for draft in shipped for path in draft.folder.rglob("*") if path.is_file()
    ]
    total = sum(path.stat().st_size for path in files)
    target = sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file())
    assert total < MAX_DRAFT_BYTES and total + target <= MAX_PACKAGE_BYTES
    for draft in shipped:
        metrics = json.loads((draft.folder / "metrics.json").read_text())
        card = (draft.folder / "README.md").read_text(encoding="utf-8")
        assert card == export_drafts.render_card(draft, metrics)
        config = json.loads((draft.folder / "config.json").read_text())
        assert config == draft.config()
        if draft.has_tokenizer:
            theirs = (ASSETS / "tokenizer.json").read_bytes()
            assert (draft.folder / "tokenizer.json").read_bytes() == theirs


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
