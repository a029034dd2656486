"""Which layers of vLLM's pool are checked as what, from runners without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_canary.engines.engine_canary import EngineCanary
from kv_canary.engines.hooks import Refusal
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.step import Admission, RowStep, Step
from kv_canary.engines.vllm.layers import compare_in_pass
from kv_canary.engines.vllm.pool import draft_groups, read_groups
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

BLOCKS, PAGE, LATENT, ROTATED, HEADS, DIM = 6, 4, 24, 8, 2, 8


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's class of this name."""


class MLAAttentionSpec(FullAttentionSpec):
    """As vLLM's class of this name."""


class CrossAttentionSpec(SimpleNamespace):
    """As vLLM's class of this name."""


class LatentImpl:
    def do_kv_cache_update(
        self,
        latent: Tensor,
        rotated: Tensor,
        kv: Tensor,
        slots: Tensor,
        dtype: str,
        scale: Tensor,
    ) -> None:
        flat = kv.view(-1, kv.shape[-1])
        flat[slots, :LATENT] = latent
        flat[slots, LATENT : LATENT + ROTATED] = rotated[:, 0]


class FullImpl:
    def do_kv_cache_update(
        self, layer: Any, keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor
    ) -> None:
        kv[slots // PAGE, slots % PAGE] = torch.cat([keys, values], dim=-1)

    def forward(self, *args: Any) -> str:
        return "read"


def latent_layer(width: int = LATENT + ROTATED) -> Any:
    return SimpleNamespace(
        kv_cache=torch.zeros(BLOCKS, PAGE, width),
        impl=LatentImpl(),
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        kv_cache_dtype="auto",
        _k_scale=torch.ones(()),
        forward_impl=lambda *args: "read",
    )


def full_layer() -> Any:
    kv = torch.zeros(BLOCKS, PAGE, HEADS, 2 * DIM)
    return SimpleNamespace(kv_cache=kv, impl=FullImpl())


LATENT_SPEC = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT)
FULL_SPEC = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS, head_size=DIM)


def runner_of(
    *groups: tuple[Any, dict[str, Any]], method: str | None = None, **attributes: Any
) -> Any:
    """A runner of the second generation; `attributes` may say otherwise."""
    layers = {name: layer for _, named in groups for name, layer in named.items()}
    config = SimpleNamespace(
        speculative_config=method and SimpleNamespace(method=method),
        model_config=SimpleNamespace(dtype=torch.float32),
        compilation_config=SimpleNamespace(
            static_forward_context=layers, cudagraph_mode=None
        ),
    )
    of_groups = [
        SimpleNamespace(layer_names=list(named), kv_cache_spec=spec)
        for spec, named in groups
    ]
    return SimpleNamespace(
        vllm_config=config,
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=of_groups),
        **{"req_states": None, **attributes},
    )


def test_a_latent_has_one_place_per_value() -> None:
    (group,) = read_groups(
        runner_of((LATENT_SPEC, {"a": latent_layer(), "b": latent_layer()}))
    )
    assert group.name == "latent" and len(group.layers) == 2
    places = torch.cat([group.pages.k, group.pages.v], dim=1)
    width = LATENT + ROTATED
    assert torch.equal(places, torch.arange(PAGE * width).view(PAGE, width))
    assert not any(layer.any() for layer in group.layers)


@pytest.mark.parametrize(
    ("runner", "text"),
    [
        (
            runner_of((CrossAttentionSpec(), {"m": full_layer()})),
            r"group 0 \(m, ...\) is CrossAttentionSpec: not seen",
        ),
        (
            runner_of(
                (FULL_SPEC, {"a": full_layer()}),
                (CrossAttentionSpec(), {"m": full_layer()}),
            ),
            r"group 1 \(m, ...\) is CrossAttentionSpec: not seen",
        ),
        (
            runner_of(
                (LATENT_SPEC, {"indexer": SimpleNamespace(kv_cache=torch.zeros(6, 4))})
            ),
            r"looked for NoneType.do_kv_cache_update",
        ),
        (
            runner_of((LATENT_SPEC, {"a": full_layer()})),
            "looked for kv_lora_rank and qk_rope_head_dim in SimpleNamespace",
        ),
        (
            runner_of((FULL_SPEC, {"a": full_layer()}), method="eagle3"),
            "looked for the draft's layers in speculator.draft_attn_layer_names or",
        ),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(runner: Any, text: str) -> None:
    with pytest.raises(Refusal, match=text):
        read_groups(runner)


def test_a_group_of_a_draft_alone_is_left_out() -> None:
    """It takes blocks all the same, of which the ledger must know."""
    runner = runner_of(
        (FULL_SPEC, {"draft": full_layer()}),
        (FULL_SPEC, {"a": full_layer(), "more": full_layer()}),
        method="mtp",
        speculator=SimpleNamespace(draft_attn_layer_names={"draft", "more"}),
    )
    (group,) = read_groups(runner)
    assert (group.number, len(group.layers)) == (1, 1)
    assert draft_groups(runner) == {0: PAGE}
    canary = EngineCanary(
        [group],
        Settings(mode=Mode.LOG),
        num_rows=2,
        max_len=16,
        is_cached=False,
        unchecked=draft_groups(runner),
    )
    row = RowStep("A", 0, 5)
    admission = Admission(rid="A", tokens=[1] * 5, blocks=[[1, 2], [3, 4]], computed=0)
    canary.plan(Step(admitted=[admission], rows=[row]))
    number = canary.ledger["A"].row
    slots = [3 * PAGE + i for i in range(PAGE)]
    assert canary.groups[0].table[number, :PAGE].tolist() == slots
    assert canary.ledger.held(0) == {1, 2} and canary.ledger.held(1) == {3, 4}


def test_a_latent_needs_the_second_runner() -> None:
    runner = runner_of((LATENT_SPEC, {"a": latent_layer()}))
    del runner.req_states
    with pytest.raises(Refusal, match="set VLLM_USE_V2_MODEL_RUNNER=1"):
        read_groups(runner)


@pytest.mark.parametrize(
    "attributes",
    [
        {"speculator": SimpleNamespace(draft_attn_layer_names={"draft"})},
        {"drafter": SimpleNamespace(_draft_attn_layer_names={"draft"})},
    ],
    ids=["second runner", "first runner"],
)
def test_layers_of_a_draft_are_left_out(attributes: dict[str, Any]) -> None:
    layers = {"a": full_layer(), "draft": full_layer(), "b": full_layer()}
    runner = runner_of((FULL_SPEC, layers), method="eagle", **attributes)
    (group,) = read_groups(runner)
    places = [layer.data_ptr() for layer in group.layers]
    assert places == [layers[name].kv_cache.data_ptr() for name in "ab"]


@pytest.mark.parametrize("kind", ["latent", "full"])
def test_layers_are_compared_as_they_are_read(kind: str) -> None:
    spec, make = {
        "latent": (LATENT_SPEC, latent_layer),
        "full": (FULL_SPEC, full_layer),
    }[kind]
    layers = {"a": make(), "draft": make(), "b": make()}
    speculator = SimpleNamespace(draft_attn_layer_names={"draft"})
    runner = runner_of((spec, layers), method="mtp", speculator=speculator)
    attended: list[int] = []
    group = SimpleNamespace(
        bytes=object(), attend=attended.append, group=SimpleNamespace(number=0)
    )
    canary: Any = SimpleNamespace(groups=[group])
    assert compare_in_pass(runner, canary) == ""
    for name in ("b", "draft", "a"):
        layer = layers[name]
        read = layer.forward_impl if kind == "latent" else layer.impl.forward
        assert read() == "read"
    assert attended == [1, 0]
