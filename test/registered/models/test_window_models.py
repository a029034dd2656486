"""Gemma and gpt-oss as engines: windows that tokens leave, ranks, speculation, and all
forms of checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sglang
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.text_part import text_tensor_name
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.quantized_models import mxfp4_values
from sglang.test.scale import count, is_full
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import (
    CONTEXT,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.spec_world import (
    ModelFolders,
    References,
    plain_engine,
    run_configuration,
)
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=10, suite="cpu")

GEMMA3, GPT_OSS = "Gemma3ForCausalLM", "GptOssForCausalLM"
MULTIMODAL = "Gemma3ForConditionalGeneration"
MODELS = ("gemma2", "gemma3", "gpt_oss")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
ONE_GROUP = {"disable_hybrid_swa_memory": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


# -- engines -----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", MODELS)
def test_window_slots_change_no_answer(
    folders: ModelFolders, model: str, page_size: int
) -> None:
    """Random traffic with overlap, chunks and cached prefixes, in a small pool, beside
    one group without a prefix cache."""
    folder = folders.target(model)
    asks = make_asks(
        random.Random(model),
        total=count(ci=16, full=400),
        vocab_size=264,
        new_tokens=40,
    )
    reference = plain_engine(folder, **ONE_GROUP, kv_canary="none")
    expected = answer_all(reference, asks)
    engine = EngineHarness(
        folder,
        overlap=True,
        page_size=page_size,
        context_length=CONTEXT,
        max_total_tokens=1024,
        max_running_requests=16,
        chunked_prefill_size=48,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )
    (swa,) = engine.scheduler.cache.allocator.secondary
    dropped: list[int] = []
    drop = swa.drop
    swa.drop = lambda pages: dropped.append(drop(pages)) or dropped[-1]
    traffic = Traffic(engine, asks, random.Random(page_size))
    found = traffic.run()
    assert_parity(asks, expected, found, aborted=traffic.aborted, reference=reference)
    assert sum(dropped) > 0
    assert engine.scheduler.stats_snapshot().cached_tokens_total > 0
    check_no_leak(engine)
    assert swa.available_size() == swa.size


SPECULATION = (
    ("gemma3", 4, 1, "cpu_native", {}),
    ("gemma3", 2, 16, "torch_native", ONE_GROUP),
    ("gpt_oss", 2, 4, "cpu_native", {}),
    ("gpt_oss", 4, 1, "cpu_native", ONE_GROUP),
    ("gemma2", 4, 4, "cpu_native", {}),
)


@pytest.fixture(scope="module")
def references(folders: ModelFolders) -> References:
    return References(folders, requests=40)


@pytest.mark.parametrize(
    ("model", "topk", "page_size", "backend", "options"), SPECULATION
)
def test_trees_of_drafts_change_no_answer(
    folders: ModelFolders,
    references: References,
    model: str,
    topk: int,
    page_size: int,
    backend: str,
    options: dict[str, Any],
) -> None:
    """Paths longer than the window of four tokens, in target and draft."""
    config = SpecConfig(
        algorithm="STANDALONE",
        topk=topk,
        page_size=page_size,
        num_steps=6,
        nodes="middle",
        backend=backend,
        overlap=backend == "cpu_native",
        model=model,
        variant=None,
    )
    engine = run_configuration(
        folders, references, config, kv_canary="raise", **options
    )
    has_slots = bool(engine.scheduler.cache.allocator.secondary)
    assert has_slots == (not options)


@pytest.mark.parametrize("model", ["gemma3", "gpt_oss"] if is_full() else ["gpt_oss"])
def test_two_ranks_equal_one(folders: ModelFolders, model: str) -> None:
    """Whole checkpoints, of which each rank takes its part, sinks among them."""
    folder = folders.target(model)
    prompts = [list(range(i, i + 9 * i)) for i in range(1, 7)]
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    one = EngineHarness(folder, skip_tokenizer_init=True, dtype="float32")
    with sglang.Engine(model_path=str(folder), tp_size=2, dtype="float32") as engine:
        two = engine.generate(input_ids=prompts, sampling_params=params)
    for prompt, answer in zip(prompts, two, strict=True):
        assert answer["output_ids"] == one.generate(prompt, **params).output_ids


# -- checkpoints -------------------------------------------------------------------


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config = ModelConfig.from_path(folder)
    return load_model(config, load_format="auto", dtype=dtype, rope_rows=64)


def last_logits(folder: Path, **options: Any) -> Tensor:
    harness = ForwardHarness(folder, **options)
    row = harness.new_row(PROMPT)
    return harness.extend([(row, len(PROMPT))])[0]


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("architecture", [GEMMA3, GPT_OSS, MULTIMODAL])
def test_what_transformers_writes_is_the_same_model(
    tmp_path: Path, architecture: str
) -> None:
    """A multimodal one under other names, with the whole vision tower."""
    folder = write_tiny_model(tmp_path / "ours", architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(last_logits(folder), last_logits(tmp_path / "theirs"))


def test_the_text_part_equals_the_model_alone(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", MULTIMODAL)
    alone = write_tiny_model(tmp_path / "alone", GEMMA3)
    assert torch.equal(last_logits(whole), last_logits(alone))
    names = load_file(whole / "model.safetensors")
    kept = {text_tensor_name(name) for name in names} - {None}
    assert kept == set(load_file(alone / "model.safetensors"))


@pytest.mark.parametrize("name", ["language_model.model.side", "mystery.weight"])
def test_a_text_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tiny_model(tmp_path, MULTIMODAL)
    edit_weights(folder, lambda weights: weights.update({name: torch.zeros(3)}))
    with pytest.raises(ValueError, match=f"tensor {name} has no place"):
        load(folder)


def test_gemma_3_leaves_sizes_out(tmp_path: Path) -> None:
    """config.json of the 4B model: what is absent is as in transformers."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"architectures": [MULTIMODAL], "model_type": "gemma3", "text_config": text}
    raw |= {"eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = ModelConfig.from_path(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert ours.architecture == MULTIMODAL and ours.eos_token_ids == (1, 106)
    assert list(ours.layer_types) == theirs.layer_types
    for name, key in (
        ("hidden_size", "hidden_size"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("vocab_size", "vocab_size"),
        ("context_len", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("hidden_act", "hidden_activation"),
        ("sliding_window", "sliding_window"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ):
        assert getattr(ours, name) == getattr(theirs, key), name


def test_norms_round_their_sum_once(tmp_path: Path) -> None:
    """1 + w in float32, then to the dtype; -1 + 2 ** -9 alone would vanish in it."""
    folder = write_tiny_model(tmp_path, GEMMA3)
    small = torch.full((64,), 2.0**-7 + 2.0**-9)

    def edit(weights: dict[str, Tensor]) -> None:
        weights["model.norm.weight"] = small

    edit_weights(folder, edit)
    for dtype in (torch.float32, torch.bfloat16):
        norm = load(folder, dtype=dtype).get_parameter("model.norm.weight")
        assert torch.equal(norm, (1 + small).to(dtype))


def mxfp4_twins(root: Path) -> tuple[Path, Path]:
    """The same gpt-oss with experts in MXFP4, and in bfloat16."""
    sizes = {"intermediate_size": 32, "torch_dtype": "bfloat16"}
    packed = write_tiny_model(root / "packed", GPT_OSS, **sizes)
    plain = write_tiny_model(root / "plain", GPT_OSS, **sizes)
    edit_config(packed, quantization_config={"quant_method": "mxfp4"})
    torch.manual_seed(5)
    ours, theirs = (load_file(f / "model.safetensors") for f in (packed, plain))
    for name in [n for n in ours if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = ours.pop(name).shape
        blocks = torch.randint(
            256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        scales = torch.randint(122, 125, blocks.shape[:-1], dtype=torch.uint8)
        ours |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = mxfp4_values(blocks, scales, torch.bfloat16)
        theirs[name] = values.transpose(1, 2).contiguous()
    for folder, weights in ((packed, ours), (plain, theirs)):
        weights = {
            name: t if t.dtype == torch.uint8 else t.bfloat16()
            for name, t in weights.items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_equals_the_plain_checkpoint(tmp_path: Path, dtype: str) -> None:
    packed, plain = mxfp4_twins(tmp_path)
    ours = last_logits(packed, dtype=dtype)
    assert torch.equal(ours, last_logits(plain, dtype=dtype))
    if dtype == "bfloat16":
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


# -- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (GPT_OSS, {"num_local_experts": 0}, r"GptOssForCausalLM needs num_experts"),
        (GPT_OSS, {"hidden_act": "gelu_pytorch_tanh"}, r"hidden_act.*supported: silu$"),
        (GPT_OSS, {"quantization_config": {"quant_method": "quip"}}, '"quip".*mxfp4'),
        (GPT_OSS, {"swiglu_limit": -1}, "swiglu_limit must be from"),
        (GEMMA3, {"hidden_activation": "relu"}, "'relu'.*gelu_pytorch_tanh"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (MULTIMODAL, {"text_config": 7}, "hidden_size is missing"),
        (
            MULTIMODAL,
            {"text_config": {"model_type": "gemma3_text", "head_dim": 7}},
            "7",
        ),
    ],
)
def test_configurations_that_are_not_served(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path, architecture)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias"])
def test_a_missing_tensor_of_gpt_oss_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tiny_model(tmp_path, GPT_OSS)
    edit_weights(folder, lambda weights: weights.pop(f"model.layers.1.{name}"))
    with pytest.raises(ValueError, match=rf"lacks 1 tensor.*layers\.1\.{name}"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 33}, "--tp-size 2 .* intermediate_size 33"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "num_attention_heads 3"),
    ],
)
def test_sizes_that_ranks_do_not_divide(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    folder = write_tiny_model(tmp_path, GPT_OSS, **changes)
    with (
        tensor_parallel_group(TensorParallelGroup(rank=0, size=2)),
        pytest.raises(ValueError, match=message),
    ):
        load(folder)


def test_blocks_without_the_method_have_no_place(tmp_path: Path) -> None:
    packed, _ = mxfp4_twins(tmp_path)
    edit_config(packed, quantization_config=None)
    with pytest.raises(ValueError, match=r"experts\.\w+_blocks has no place"):
        load(packed)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
