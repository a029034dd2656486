"""Views of K and V that are not the pool's: the engine does not start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.mla_memory_pool import MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")

View = tuple[Tensor, Tensor]
# Gets K and V of a layer and of the layer after it.
Change = Callable[[View, View], View]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    return {
        "mha": write_mock_model(folder / "mha"),
        "window": write_tiny_model(
            folder / "window",
            "Gemma3ForCausalLM",
            num_hidden_layers=len(layers),
            layer_types=layers,
        ),
        "latent": write_tiny_model(folder / "latent", "DeepseekV3ForCausalLM"),
    }


def serve(model: Path) -> EngineHarness:
    return EngineHarness(
        model,
        max_total_tokens=256,
        chunked_prefill_size=64,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )


CHANGES: dict[str, tuple[Change, str]] = {
    "the next layer's K": (lambda own, after: (after[0], own[1]), "K .* address"),
    "the next layer's V": (lambda own, after: (own[0], after[1]), "V .* address"),
    "K one slot further": (lambda own, _: (own[0][1:], own[1]), "K .* address"),
    "V without its last slots": (lambda own, _: (own[0], own[1][:-4]), "V .* shape"),
    "every other slot of K": (lambda own, _: (own[0][::2], own[1]), "K .* shape"),
    "a copy of V": (lambda own, _: (own[0], own[1].clone()), "V .* address"),
}
OF_HEADS: dict[str, tuple[Change, str]] = {
    "heads and channels of K": (
        lambda own, _: (own[0].transpose(1, 2), own[1]),
        "K .* (shape|strides)",
    ),
    "K and V": (lambda own, _: (own[1], own[0]), "K .* address"),
    "half of the channels of V": (
        lambda own, _: (own[0], own[1][..., : own[1].shape[-1] // 2]),
        "V .* heads of",
    ),
}
OF_LATENTS: dict[str, tuple[Change, str]] = {
    "the rotated key as V": (
        lambda own, _: (own[0], own[0][..., own[1].shape[-1] :]),
        "V .* address",
    ),
    "the whole latent as V": (lambda own, _: (own[0], own[0]), "V .* heads of"),
    "one channel less as V": (lambda own, _: (own[0], own[1][..., :-1]), "V .* heads"),
}
CASES = [
    *(("mha", name) for name in (*CHANGES, *OF_HEADS)),
    *(("window", name) for name in (*CHANGES, *OF_HEADS)),
    *(("latent", name) for name in (*CHANGES, *OF_LATENTS)),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_another_view_is_refused_at_start(
    models: dict[str, Path], kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last layer but one of its group."""
    change, message = {**CHANGES, **OF_HEADS, **OF_LATENTS}[name]
    pool: type[KVCache] = MLATokenToKVPool if kind == "latent" else MHATokenToKVPool
    get = pool.get_kv_buffer

    def changed(self: KVCache, layer: int) -> View:
        own = get(self, layer)
        if layer != self.layer_num - 2:
            return own
        return change(own, get(self, layer + 1))

    monkeypatch.setattr(pool, "get_kv_buffer", changed)
    with pytest.raises(RuntimeError, match=f"KV canary: {message}"):
        serve(models[kind])


def test_a_latent_that_is_split_at_the_wrong_width(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide as before, so that every view fits the tensor."""
    init = MLATokenToKVPool.__init__

    def swapped(self: MLATokenToKVPool, **options: int) -> None:
        options["kv_lora_rank"], options["rope_dim"] = (
            options["rope_dim"],
            options["kv_lora_rank"],
        )
        init(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MLATokenToKVPool, "__init__", swapped)
    with pytest.raises(RuntimeError, match="KV canary: V of layer 0 has 1 heads of"):
        serve(models["latent"])


@pytest.mark.parametrize("kind", ["mha", "window", "latent"])
def test_the_pools_own_views_are_accepted(models: dict[str, Path], kind: str) -> None:
    answer = serve(models[kind]).generate([3, 1, 4, 1, 5], max_new_tokens=4)
    assert len(answer.output_ids) == 4
    assert torch.tensor(answer.output_ids).min() >= 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
