"""transformers loads the shipped folder and agrees with the training code's model; the
weights are trained ones."""

from __future__ import annotations

import ast

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from lab.demo_model.model import DemoConfig, DemoModel, parameter_count
from lab.demo_model.paths import ASSETS, IM_END_ID
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="cpu")

CODE = '''\
def count_words(lines):
    """Return a dictionary that maps each word to how often it occurs."""
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts
'''


def load_reference(dtype: torch.dtype) -> DemoModel:
    model = DemoModel(DemoConfig())
    state: dict[str, Tensor] = {}
    for shard in sorted(ASSETS.glob("model-*.safetensors")):
        state.update(load_file(shard))
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def theirs() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(
        ASSETS, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@torch.no_grad()
def test_logits_agree_in_fp32(theirs: transformers.LlamaForCausalLM) -> None:
    ids = torch.randint(4096, (2, 300), generator=torch.Generator().manual_seed(0))
    expected = theirs(input_ids=ids).logits
    actual = load_reference(torch.float32)(ids)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_logits_agree_up_to_the_last_position(
    theirs: transformers.LlamaForCausalLM,
) -> None:
    length = DemoConfig().max_position_embeddings
    ids = torch.randint(4096, (1, length), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids).logits[0, -4:]
    actual = load_reference(torch.float32)(ids)[0, -4:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-4)


@torch.no_grad()
def test_bf16_stays_close_to_fp32(tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode(CODE).ids])
    narrow = transformers.LlamaForCausalLM.from_pretrained(ASSETS, dtype="auto").eval()
    assert narrow.dtype == torch.bfloat16
    actual = narrow(input_ids=ids).logits.float()
    expected = load_reference(torch.float32)(ids)
    error = (actual - expected).norm() / expected.norm()
    assert error < 0.03
    same = (actual.argmax(-1) == expected.argmax(-1)).float().mean()
    assert same > 0.9


def test_every_tensor_was_loaded(theirs: transformers.LlamaForCausalLM) -> None:
    reference = load_reference(torch.float32).state_dict()
    loaded = theirs.state_dict()
    assert set(loaded) - set(reference) == {"lm_head.weight"}
    for name, tensor in reference.items():
        assert torch.equal(loaded[name], tensor), name
    assert torch.equal(loaded["lm_head.weight"], reference["model.embed_tokens.weight"])
    assert parameter_count(load_reference(torch.float32)) < 12_000_000


@torch.no_grad()
def test_code_is_more_likely_than_shuffled_code(tokenizer: Tokenizer) -> None:
    model = load_reference(torch.float32)
    ids = torch.tensor([tokenizer.encode(CODE).ids])
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))
    assert model.loss(ids).item() < 2.5
    assert model.loss(ids[:, order]).item() > 6.0


def test_chat_answer_is_code_and_ends(
    theirs: transformers.LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    prompt = (
        "<|im_start|>user\nWrite a Python function that reverses a string.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = theirs.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=160,
        do_sample=False,
    )
    reply = out[0, ids.shape[1] :].tolist()
    assert reply[-1] == IM_END_ID
    tree = ast.parse(tokenizer.decode(reply[:-1]))
    assert isinstance(tree.body[0], ast.FunctionDef)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
