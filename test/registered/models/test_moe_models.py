"""Models with experts: checkpoints in every form, ranks, speculation, KV canary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sglang
from sglang.bench_utils.floor import weight_bytes_per_step
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.layers.moe.experts import Experts, StackLayout
from sglang.srt.layers.moe.feed_forward import MoeFeedForward
from sglang.srt.layers.ops.moe.op import SwiGLUClamp
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import num_layer_weights
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.moe_problem import oracle, random_choice, random_experts
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_world import ModelFolders, References, run_configuration
from sglang.test.tiny_models import write_tiny_eagle, write_tiny_model

register_cpu_ci(est_time=14, suite="cpu")

QWEN2, QWEN3 = "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def last_logits(folder: Path, **options: str) -> Tensor:
    harness = ForwardHarness(folder, **options)
    row = harness.new_row(PROMPT)
    return harness.extend([(row, len(PROMPT))])[0]


def load(folder: Path, load_format: str = "auto") -> torch.nn.Module:
    return load_model(
        ModelConfig.from_path(folder),
        load_format=load_format,
        dtype=torch.float32,
        rope_rows=64,
    )


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def stack_experts(weights: dict[str, Tensor]) -> None:
    """Replace the tensors of single experts by stacks."""
    prefixes = {n.split(".experts.")[0] for n in weights if ".experts." in n}
    for prefix in sorted(prefixes):
        stacks = {}
        for projection in ("gate", "up", "down"):
            tensors = []
            while (
                name := f"{prefix}.experts.{len(tensors)}.{projection}_proj.weight"
            ) in (weights):
                tensors.append(weights.pop(name))
            stacks[projection] = torch.stack(tensors)
        gate_up = torch.cat((stacks["gate"], stacks["up"]), dim=1)
        weights[f"{prefix}.experts.gate_up_proj"] = gate_up
        weights[f"{prefix}.experts.down_proj"] = stacks["down"].contiguous()


# -- checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_stacked_experts_and_those_that_transformers_writes(
    tmp_path: Path, architecture: str
) -> None:
    single = write_tiny_model(tmp_path / "single", architecture)
    expected = last_logits(single)
    stacked = write_tiny_model(tmp_path / "stacked", architecture)
    edit_weights(stacked, stack_experts)
    assert torch.equal(last_logits(stacked), expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        single, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(last_logits(tmp_path / "saved"), expected)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (QWEN2, {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    (QWEN2, {"mlp_only_layers": [1], "num_experts_per_tok": 5}),
    (QWEN3, {"norm_topk_prob": False, "mlp_only_layers": [], "num_experts_per_tok": 1}),
    (QWEN3, {"tie_word_embeddings": True, "attention_bias": False}),
]


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_variants_equal_transformers(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path, architecture, **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(last_logits(folder), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tiny_model(tmp_path, QWEN3)
    edit_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=rf"lacks 1 tensor.*{name}"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.1.mlp.experts.07.up_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.bias",
        "model.layers.1.mlp.experts.3.side_proj.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",  # a dense layer
        "model.layers.1.self_attn.qkv_proj.weight",
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tiny_model(tmp_path, QWEN3)
    edit_weights(folder, lambda weights: weights.update({name: torch.zeros(36, 64)}))
    with pytest.raises(ValueError, match=f"tensor {name} has no place"):
        load(folder)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, QWEN3, moe_intermediate_size=36)
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"moe_intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"experts\.0\.\w+_proj.*36.*40"):
        load(folder)
    edit_weights(folder, stack_experts)
    with pytest.raises(ValueError, match=r"experts\.\w+_proj has shape \(8, .*\(8, "):
        load(folder)


def test_a_model_that_lost_its_experts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, QWEN3, num_local_experts=0)
    with pytest.raises(ValueError, match=r"config.json: Qwen3MoeFor.* num_experts"):
        load(tmp_path, "dummy")


def test_sizes_count_the_experts(tmp_path: Path) -> None:
    """Of a model that has them; a head may have copied the fields of its target."""
    config = ModelConfig.from_path(write_tiny_model(tmp_path, QWEN3))
    model = load(tmp_path, "dummy")
    layers = [p for n, p in load_parameters(tmp_path) if "layers" in n and p.dim() > 1]
    assert num_layer_weights(config) == sum(p.numel() for p in layers)
    copied = {k: v for k, v in config.raw.items() if "expert" in k or "moe" in k}
    folder = tmp_path / "head"
    write_tiny_eagle(folder, tmp_path, algorithm="EAGLE", **copied, mlp_only_layers=[5])
    head = ModelConfig.from_path(folder)
    assert head.moe is not None
    assert num_layer_weights(head) == head.without_experts().num_layer_weights
    # Of 8 experts a token reads 3.
    (block,) = (m for m in model.modules() if isinstance(m, MoeFeedForward))
    assert block.bytes_of_chosen_experts == 3 * block.experts.bytes_of_one
    assert weight_bytes_per_step(model) > block.bytes_of_chosen_experts


def load_parameters(folder: Path) -> list[tuple[str, Tensor]]:
    return [*load_file(folder / "model.safetensors").items()]


# -- the layer ---------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_ranks_sum_to_the_whole(bias: bool) -> None:
    """Also of a stack as gpt-oss has it: transposed, gate and up in turn."""
    torch.manual_seed(2)
    clamp = SwiGLUClamp() if bias else None
    plain = random_experts(5, 24, 16, bias=bias, clamp=clamp)
    layout = StackLayout(is_transposed=True, is_interleaved=True)
    gate, up = plain.gate_up.chunk(2, dim=1)
    stack = torch.stack((gate, up), dim=2).flatten(1, 2).transpose(1, 2).contiguous()
    x = torch.randn(6, 24)
    choice = random_choice(6, 5, 2)
    total = torch.zeros(6, 24)
    for rank in range(4):
        with tensor_parallel_group(TensorParallelGroup(rank=rank, size=4)):
            experts = Experts(
                num_experts=5,
                hidden_size=24,
                intermediate_size=16,
                bias=bias,
                clamp=clamp,
                layout=layout,
            )
        assert experts.gate_up_proj is not None and experts.down_proj is not None
        assert experts.gate_up_proj.shape == (5, 8, 24)
        experts.gate_up_proj.load("gate_up", stack, None)
        experts.down_proj.load("down", plain.down.transpose(1, 2).contiguous(), None)
        if bias:
            assert plain.gate_up_bias is not None and plain.down_bias is not None
            assert experts.gate_up_proj_bias is not None
            assert experts.down_proj_bias is not None
            halves = plain.gate_up_bias.chunk(2, dim=1)
            turns = torch.stack(halves, dim=2).flatten(1, 2)
            experts.gate_up_proj_bias.load("bias", turns, None)
            experts.down_proj_bias.load("bias", plain.down_bias, None)
        experts.process_weights_after_loading()
        total += experts(x, *choice)
    expected = oracle(x, *choice, plain)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_inner_size_that_does_not_divide(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, QWEN3, moe_intermediate_size=35)
    with (
        tensor_parallel_group(TensorParallelGroup(rank=0, size=2)),
        pytest.raises(ValueError, match="--tp-size 2 .* moe_intermediate_size 35"),
    ):
        load(tmp_path, "dummy")
    write_tiny_model(tmp_path, QWEN2, shared_expert_intermediate_size=41)
    with (
        tensor_parallel_group(TensorParallelGroup(rank=0, size=2)),
        pytest.raises(ValueError, match="shared_expert_intermediate_size 41"),
    ):
        load(tmp_path, "dummy")


# -- engines -----------------------------------------------------------------------


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Dummy weights, which each rank draws whole and cuts."""
    write_tiny_model(tmp_path, QWEN2)
    prompts = [list(range(i, i + 5 * i)) for i in range(1, 7)]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    one = EngineHarness(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    with sglang.Engine(
        model_path=str(tmp_path), tp_size=2, load_format="dummy"
    ) as engine:
        two = engine.generate(input_ids=prompts, sampling_params=params)
    for prompt, answer in zip(prompts, two, strict=True):
        assert answer["output_ids"] == one.generate(prompt, **params).output_ids


CANARY = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 8,
}
SPECULATION = (
    ("qwen3_moe", "STANDALONE", 2, 4),
    ("qwen3_moe", "EAGLE", 4, 1),
    ("qwen2_moe", "EAGLE3", 1, 16),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders: ModelFolders) -> References:
    return References(folders, requests=40)


@pytest.mark.parametrize(("model", "algorithm", "topk", "page_size"), SPECULATION)
def test_speculation_under_the_canary(
    folders: ModelFolders,
    references: References,
    model: str,
    algorithm: str,
    topk: int,
    page_size: int,
) -> None:
    """The same output as without it, and no finding."""
    config = SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page_size,
        num_steps=3,
        nodes=None if topk == 1 else "middle",
        backend="cpu_native",
        overlap=topk == 4,
        model=model,
        variant=algorithm == "EAGLE3",
    )
    run_configuration(folders, references, config, **CANARY)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
