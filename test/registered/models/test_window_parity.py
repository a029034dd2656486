"""Logits of tiny models with sliding windows, scaled and partial rotations, sinks and
caps equal transformers', through every way to fill the KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from sglang.srt.forward.batch import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=15, suite="cpu")

TOLERANCE = 2e-4
WINDOW = 12
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 40, 150)
# Whole pages of every size, and more than the window.
SHARED = 128
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
# Name -> architecture and config.json.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2-mixed": ("Qwen2ForCausalLM", MIXED | {"num_hidden_layers": 3}),
    "qwen3-mixed": ("Qwen3ForCausalLM", MIXED),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"num_hidden_layers": 3}),
    "gpt-oss": ("GptOssForCausalLM", {}),
}
ROPES = {
    "yarn": YARN,
    "yarn-deepseek": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6},
    "llama3": LLAMA3,
    "linear": LINEAR,
    "yarn-partial": YARN | {"partial_rotary_factor": 0.5},
    "linear-partial": LINEAR | {"partial_rotary_factor": 0.25},
}


def reference_of(folder: Path, **options: Any) -> Callable[[list[int]], Tensor]:
    """Logits of all positions, [T, V], of transformers' model."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, **options).eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    logits.model = model  # type: ignore[attr-defined]
    return logits


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 264, (length,), generator=generator).tolist()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def check_every_way(
    harness: ForwardHarness, reference: Callable[[list[int]], Tensor], *, seed: int
) -> None:
    """Prompts whole, in chunks shorter and longer than the window, after a cached
    prefix, and decode past the window."""
    rows = [harness.new_row(prompt(n, seed + n)) for n in LENGTHS]
    whole = harness.extend([(row, len(harness.tokens(row))) for row in rows])
    for row, logits in zip(rows, whole, strict=True):
        assert_close(logits, reference(harness.tokens(row))[-1])
    owner, expected = rows[-1], reference(harness.tokens(rows[-1]))
    chunked, done = harness.new_row(harness.tokens(owner)), 0
    for size in (5, WINDOW, 2 * WINDOW + 3, 1, LENGTHS[-1]):
        done = min(done + size, LENGTHS[-1])
        assert_close(harness.extend([(chunked, done)])[0], expected[done - 1])
    tails = [prompt(n, seed) for n in (1, 30)]
    start = harness.tokens(owner)[:SHARED]
    borrowers = [harness.new_row(start + t, borrow=(owner, SHARED)) for t in tails]
    logits = harness.extend([(row, len(harness.tokens(row))) for row in borrowers])
    for row, row_logits in zip(borrowers, logits, strict=True):
        assert_close(row_logits, reference(harness.tokens(row))[-1])
    rows += [*borrowers, chunked]
    for step in range(WINDOW + 3):
        for row in rows:
            harness.append(row, (7 * step + row) % 264)
        logits = harness.forward(ForwardMode.DECODE, [(row, None) for row in rows])
        if step % 7:
            continue
        for row, row_logits in zip(rows, logits, strict=True):
            assert_close(row_logits, reference(harness.tokens(row))[-1])


@pytest.fixture(scope="module", params=[*MODELS])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[list[int]], Tensor]]:
    folder = tmp_path_factory.mktemp("model")
    architecture, config = MODELS[request.param]
    write_tiny_model(folder, architecture, **config)
    return folder, reference_of(folder)


@pytest.mark.parametrize(
    ("page_size", "backend"),
    [(1, "cpu_native"), (4, "torch_native"), (16, "cpu_native"), (64, "cpu_native")],
)
def test_windows(model, page_size: int, backend: str) -> None:
    folder, reference = model
    harness = ForwardHarness(folder, page_size=page_size, attention_backend=backend)
    secondary = harness.runner.allocator.secondary
    is_mixed = len(set(harness.runner.model_config.layer_types)) > 1
    assert len(secondary) == is_mixed
    check_every_way(harness, reference, seed=page_size)
    for group in secondary:
        held = harness.runner.allocator.owned_pages()
        assert not group.has(held).all(), "no token left a window"


@pytest.mark.parametrize(
    ("page_size", "backend"), [(1, "torch_native"), (16, "cpu_native")]
)
def test_windows_without_slots_of_their_own(model, page_size: int, backend: str):
    folder, reference = model
    harness = ForwardHarness(
        folder,
        page_size=page_size,
        attention_backend=backend,
        disable_hybrid_swa_memory=True,
    )
    if len(set(harness.runner.model_config.layer_types)) == 1:
        pytest.skip("layers of one kind have one kind of slots")
    assert not harness.runner.allocator.secondary
    check_every_way(harness, reference, seed=page_size)


def test_the_windows_of_these_models_matter(model) -> None:
    """Without its window each of them says something else after enough tokens."""
    folder, reference = model
    harness = ForwardHarness(folder)
    for layer in harness.runner.model.model.layers:
        layer.self_attn.attn.window = -1
    row = harness.new_row(prompt(40, seed=1))
    logits = harness.extend([(row, 40)])[0]
    expected = reference(harness.tokens(row))[-1]
    assert float((logits - expected).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("backend", ["cpu_native", "torch_native"])
@pytest.mark.parametrize("name", [*ROPES])
def test_rotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    """Beside a window in half of the layers; partial rotations as Phi-3 applies them,
    for transformers' Llama rotates whole heads alone."""
    architecture = "Qwen2ForCausalLM"
    config = MIXED
    if "partial" in name:
        architecture, config = "LlamaForCausalLM", {}
        monkeypatch.setattr(
            modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb
        )
    write_tiny_model(tmp_path, architecture, **config, rope_parameters=ROPES[name])
    harness = ForwardHarness(tmp_path, page_size=4, attention_backend=backend)
    reference = reference_of(tmp_path)
    tokens = prompt(100, seed=3)
    row = harness.new_row(tokens)
    expected = reference(tokens)
    assert_close(harness.extend([(row, 90)])[0], expected[89])
    for end in range(91, 100):
        logits = harness.forward(ForwardMode.DECODE, [(row, None)])
        assert_close(logits[0], expected[end - 1])


CAP, FINAL_CAP, SCALAR = 3.0, 2.0, 40.0


def capped_attention_with_sinks(module, q, k, v, mask, *, scaling, **_: Any):
    """Eager attention: [1, H, T, D] -> [1, T, H, D]; sinks [H] of the module."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * SCALAR**-0.5 / CAP) * CAP + mask
    sinks = module.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("backend", ["cpu_native", "torch_native"])
def test_sinks_caps_and_scale_reach_the_kernels(tmp_path: Path, backend: str) -> None:
    name = "capped_with_sinks"
    transformers.AttentionInterface.register(name, capped_attention_with_sinks)
    transformers.AttentionMaskInterface.register(
        name, transformers.masking_utils.eager_mask
    )
    write_tiny_model(
        tmp_path,
        "MistralForCausalLM",
        sliding_window=WINDOW,
        attn_logit_softcapping=CAP,
        final_logit_softcapping=FINAL_CAP,
        query_pre_attn_scalar=SCALAR,
    )
    plain = reference_of(tmp_path, attn_implementation=name)
    harness = ForwardHarness(tmp_path, page_size=4, attention_backend=backend)
    generator = torch.Generator().manual_seed(0)
    ours = harness.runner.model.model.layers
    theirs = plain.model.model.layers
    for layer, reference_layer in zip(ours, theirs, strict=True):
        sinks = 2 * torch.randn(4, generator=generator)
        layer.self_attn.attn.sinks = reference_layer.self_attn.sinks = sinks

    def reference(tokens: list[int]) -> Tensor:
        return torch.tanh(plain(tokens) / FINAL_CAP) * FINAL_CAP

    check_every_way(harness, reference, seed=8)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
