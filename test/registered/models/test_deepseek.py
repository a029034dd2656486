"""DeepSeek V2 and V3: config.json, ranks, cached prefixes, speculation, KV canary."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sglang
from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import POOL_FAULTS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.mem_cache.mla_memory_pool import MLATokenToKVPool
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import num_layer_weights
from sglang.test import canary_traffic, spec_canary_traffic
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.heal_traffic import run_healing
from sglang.test.hole_traffic import Engine
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

register_cpu_ci(est_time=14, suite="cpu", full_time=150)

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
PROMPT = [7 * i % 264 for i in range(70)]
CANARY = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 8,
}


def last_logits(folder: Path, **options: Any) -> Tensor:
    """Of a prefill in two chunks and two decode steps: [3, V]."""
    harness = ForwardHarness(folder, **options)
    row = harness.new_row(PROMPT)
    harness.extend([(row, 40)])
    logits = [harness.extend([(row, len(PROMPT) - 2)])]
    for _ in range(2):
        logits.append(harness.forward(ForwardMode.DECODE, [(row, None)]))
    return torch.cat(logits)


def check_parity(folder: Path, **options: Any) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -3:]
    found = last_logits(folder, **options)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def load(folder: Path) -> torch.nn.Module:
    config = ModelConfig.from_path(folder)
    return load_model(config, load_format="auto", dtype=torch.float32, rope_rows=64)


# -- checkpoints -------------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
}
LITE = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512}
LITE |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 greedy, compressed queries": (V2, {"topk_method": "greedy", "q_lora_rank": 24}),
    "V2 biases": (V2, {"attention_bias": True, "q_lora_rank": 24}),
    "V2 all sparse": (V2, {"first_k_dense_replace": 0, "qk_rope_head_dim": 16}),
    "V2 yarn": (V2, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "V3 plain queries, biases": (V3, {"q_lora_rank": None, "attention_bias": True}),
    "V3 half-split pairs": (V3, {"rope_interleave": False}),
    "V3 one group": (V3, {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "V3 yarn, no mscale": (V3, {"rope_parameters": YARN}),
    "V2-Lite's channels": (V2, LITE),
    "V3 tied": (V3, {"tie_word_embeddings": True, "routed_scaling_factor": 1.0}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(tmp_path: Path, name: str) -> None:
    architecture, overrides = VARIANTS[name]
    write_tiny_model(tmp_path, architecture, **overrides)
    check_parity(tmp_path)


@pytest.mark.parametrize("backend", ["cpu_native", "torch_native"])
@pytest.mark.parametrize("architecture", [V2, V3])
def test_pages_of_64(tmp_path: Path, architecture: str, backend: str) -> None:
    write_tiny_model(tmp_path, architecture)
    check_parity(tmp_path, page_size=64, attention_backend=backend)


@pytest.mark.parametrize("backend", ["cpu_native", "torch_native"])
def test_bfloat16_decodes_close_to_float32(tmp_path: Path, backend: str) -> None:
    write_tiny_model(tmp_path, V3)
    expected = last_logits(tmp_path)
    found = last_logits(tmp_path, dtype="bfloat16", attention_backend=backend)
    assert float((found - expected).norm()) < 0.08 * float(expected.norm())


def test_layers_that_predict_further_tokens_are_not_needed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, V3)
    expected = last_logits(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for name in ("eh_proj", "enorm", "mlp.experts.3.up_proj", "shared_head.head"):
        weights[f"model.layers.2.{name}.weight"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    assert torch.equal(last_logits(tmp_path), expected)
    weights["model.layers.3.enorm.weight"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.3\.enorm.* has no place"):
        load(tmp_path)


def test_what_transformers_writes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", V3)
    transformers_model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    transformers_model.save_pretrained(tmp_path / "saved")
    assert torch.equal(last_logits(tmp_path / "saved"), last_logits(folder))


LATENT = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim"), 8)
LATENT |= dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8)
ROWS = {"quant_method": "fp8", "weight_block_size": [128]}
BAD: list[tuple[str, dict[str, Any], str]] = [
    (V2, {"kv_lora_rank": 30}, "kv_lora_rank must be a multiple of 8, got 30"),
    (V2, {"qk_rope_head_dim": 12}, "qk_rope_head_dim must be a multiple of 8, got 12"),
    (V2, {"kv_lora_rank": 1024}, "kv_lora_rank .* at most 1024 together, got 1024"),
    (V3, {"v_head_dim": 0}, "v_head_dim must be from 1"),
    (V3, {"qk_nope_head_dim": "x"}, "qk_nope_head_dim must be an integer"),
    (V3, {"sliding_window": 8}, "sliding_window is not supported beside kv_lora_rank"),
    (V3, {"kv_lora_rank": None}, "DeepseekV3ForCausalLM needs kv_lora_rank"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method is .noaux_tc., which DeepseekV2For"),
    (V3, {"topk_method": "greedy"}, "topk_method is .greedy., which DeepseekV3ForCaus"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob true is not supported for V2"),
    (V2, {"n_routed_experts": 0}, "needs num_experts"),
    ("LlamaForCausalLM", LATENT, "describes latents, which LlamaForCausalLM does not"),
    (V3, {"quantization_config": ROWS}, r"weight_block_size must be \[rows, columns"),
]


@pytest.mark.parametrize(("architecture", "config", "message"), BAD)
def test_values_that_are_refused(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    write_tiny_model(tmp_path, architecture)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load(tmp_path)


# -- sizes and ranks ---------------------------------------------------------------


@pytest.mark.parametrize("architecture", [V2, V3])
def test_sizes(tmp_path: Path, architecture: str) -> None:
    """The matrices, and latents that every rank holds whole."""
    write_tiny_model(tmp_path, architecture)
    weights = load_file(tmp_path / "model.safetensors")
    layers = [t for n, t in weights.items() if "layers" in n and t.dim() > 1]
    config = ModelConfig.from_path(tmp_path)
    assert num_layer_weights(config) == sum(t.numel() for t in layers)
    harness = ForwardHarness(tmp_path, dtype="bfloat16", kv_canary="none")
    pool = harness.runner.token_to_kv_pool
    assert isinstance(pool, MLATokenToKVPool) and config.latent is not None
    slots = pool.size + pool.page_size
    each = harness.runner.bytes_per_kv_slot()
    assert pool.kv_buffer.nbytes == each * slots == 4 * config.latent.width * slots
    with tensor_parallel_group(TensorParallelGroup(rank=1, size=2)):
        assert harness.runner.bytes_per_kv_slot() == each


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, V3)
    prompts = [list(range(i, i + 5 * i)) for i in range(1, 7)]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    one = EngineHarness(tmp_path, skip_tokenizer_init=True, dtype="float32")
    with sglang.Engine(model_path=str(tmp_path), tp_size=2, dtype="float32") as engine:
        two = engine.generate(input_ids=prompts, sampling_params=params)
    for prompt, answer in zip(prompts, two, strict=True):
        assert answer["output_ids"] == one.generate(prompt, **params).output_ids


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, V2)
    with (
        tensor_parallel_group(TensorParallelGroup(rank=0, size=3)),
        pytest.raises(ValueError, match="--tp-size 3 .* num_attention_heads 4"),
    ):
        load(tmp_path)


# -- engines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "page_size", "overlap"),
    [(V2, 1, True), (V3, 4, False), (V2, 64, True)],
)
def test_cached_prefixes_under_the_canary(
    tmp_path: Path, architecture: str, page_size: int, overlap: bool
) -> None:
    """Random arrivals and aborts, in chunks, in a pool that retracts: the same output
    as without a cache, one after the other; and no finding."""
    write_tiny_model(tmp_path, architecture, max_position_embeddings=CONTEXT)
    asks = make_asks(random.Random(page_size), total=60, vocab_size=264)
    reference = plain_engine(tmp_path)
    expected = answer_all(reference, asks)
    engine = EngineHarness(
        tmp_path,
        overlap=overlap,
        dtype="float32",
        page_size=page_size,
        context_length=CONTEXT,
        max_running_requests=32,
        max_total_tokens=1280,
        chunked_prefill_size=64,
        schedule_conservativeness=0.3,
        disable_overlap_schedule=not overlap,
        skip_tokenizer_init=True,
        **CANARY,
    )
    traffic = Traffic(engine, asks, random.Random(page_size + 1))
    answers = traffic.run()
    assert_parity(asks, expected, answers, aborted=traffic.aborted, reference=reference)
    check_no_leak(engine)
    assert any(answer.cached_tokens for answer in answers.values())


@pytest.mark.parametrize("channel", [0, 20, 47])
def test_the_canary_sees_every_channel(tmp_path: Path, channel: int) -> None:
    """Of the latent's halves and of the rotated key, in any layer."""
    write_tiny_model(tmp_path, V2, qk_rope_head_dim=16)
    for layer in (0, 1):
        harness = ForwardHarness(tmp_path, **CANARY)
        row = harness.new_row(PROMPT)
        harness.extend([(row, 60)])
        slot = int(harness.pool.row_slots(row, 33, 34))
        pool = harness.runner.token_to_kv_pool
        assert isinstance(pool, MLATokenToKVPool)
        pool.kv_buffer[layer, slot, channel] += 1.0
        with pytest.raises(Exception, match="verify_real_kv") as error:
            harness.forward(ForwardMode.DECODE, [(row, None)])
        assert f"slot_idx={slot} " in str(error.value)


FAULTS = [
    ("real_kv_used", 1, "partial"),
    ("real_kv_post_forward", 4, "partial"),
    ("real_kv_unused_cache", 1, "all"),
    ("move_without_bytes", 4, "all"),
    ("move_without_records", 1, "all"),
    ("record", 16, "partial"),
]
# Not with `rotate`, which reaches a slot only if its request goes on for a rotation.
EVERY_FAULT = [
    (name, page_size, "all")
    for name in sorted(set(POOL_FAULTS) - {"phantom_prefix"})
    for page_size in (1, 4, 16)
]


@pytest.mark.parametrize("seed", range(count(ci=1, full=20)))
@pytest.mark.parametrize(
    ("name", "page_size", "real_data"),
    FAULTS + (EVERY_FAULT if is_full() else []),
)
def test_faults_are_reported(
    tmp_path: Path, name: str, page_size: int, real_data: str, seed: int
) -> None:
    write_tiny_model(
        tmp_path,
        V3,
        vocab_size=canary_traffic.VOCAB,
        max_position_embeddings=canary_traffic.CONTEXT,
        eos_token_id=None,
    )
    outcome = canary_traffic.plant(
        tmp_path,
        name,
        seed=seed,
        page_size=page_size,
        kv_canary_real_data=real_data,
        kv_canary_sweep_interval=2,
    )
    allowed = set(reason_labels(POOL_FAULTS[name].reasons))
    found = [v for v in outcome.violations if allowed & set(v["reasons"])]
    assert found, outcome.text
    places = outcome.planted.damage.places
    assert all((v["slot"], v["position"]) in places for v in found)


@pytest.mark.parametrize("name", ["real_kv_used", "record"])
def test_faults_are_healed(tmp_path: Path, name: str) -> None:
    """Every answer is that of the undamaged engine."""
    target = write_tiny_model(
        tmp_path / "target",
        V2,
        vocab_size=spec_canary_traffic.VOCAB,
        max_position_embeddings=512,
    )
    engine, models = Engine(page_size=4, overlap=True), {"model": target}
    expected = run_healing(None, engine, models, seed=3, dtype="float32")
    run = run_healing(name, engine, models, seed=3, dtype="float32")
    assert run.harmed and run.stats.kv_canary_healed_tokens_total > 0
    assert set(run.answers) == set(expected.answers) == set(run.asks)
    for rid, want in expected.answers.items():
        assert run.answers[rid].output_ids == want.output_ids, rid


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders: ModelFolders) -> References:
    return References(folders, requests=40)


SPECULATION = (
    ("deepseek_v2", "STANDALONE", 1, 1, "cpu_native"),
    ("deepseek_v3", "STANDALONE", 4, 4, "cpu_native"),
    ("deepseek_v2", "STANDALONE", 2, 64, "cpu_native"),
    ("deepseek_v3", "STANDALONE", 2, 1, "torch_native"),
    ("deepseek_v3", "EAGLE", 4, 16, "cpu_native"),
)


@pytest.mark.parametrize(
    ("model", "algorithm", "topk", "page_size", "backend"), SPECULATION
)
def test_speculation_under_the_canary(
    folders: ModelFolders,
    references: References,
    model: str,
    algorithm: str,
    topk: int,
    page_size: int,
    backend: str,
) -> None:
    """The same output as without it, and no finding; the draft of EAGLE keeps K and V
    beside the target's latents."""
    config = SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page_size,
        num_steps=3,
        nodes=None if topk == 1 else "middle",
        backend=backend,
        overlap=topk == 4,
        model=model,
        variant=None,
    )
    run_configuration(folders, references, config, **CANARY)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
