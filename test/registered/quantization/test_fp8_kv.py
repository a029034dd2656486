"""KV of 8 bits end to end: exact oracles, scales, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import POOL_FAULTS
from sglang.srt.configs.attention_backends import check_needs
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.attention.attention_registry import attention_needs
from sglang.srt.mem_cache.kv_dtype import KV_DTYPES, KVScales, to_stored
from sglang.srt.model_loader.kv_scales import find_kv_scales
from sglang.srt.models.mock_math import HEAD_DIM, NUM_KV_HEADS
from sglang.srt.server_args import ServerArgs
from sglang.test.canary_traffic import CONTEXT, VOCAB, canary_of, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import speculating
from sglang.test.tiny_models import write_mock_draft, write_mock_model, write_tiny_model

register_cpu_ci(est_time=10, suite="cpu", full_time=400)
register_cuda_ci(est_time=120, suite="cuda")

NAMES = list(KV_DTYPES)
TOKENS = list(range(3, 40))
SCALES = {0: KVScales(k=0.03, v=0.0625), 1: KVScales(k=2.0, v=0.5)}


def logits(harness: ForwardHarness) -> Tensor:
    """Of a prompt, a chunk that reads it, and a decode step."""
    row = harness.new_row(TOKENS)
    found = [harness.extend([(row, 20)])[0], harness.extend([(row, len(TOKENS))])[0]]
    harness.append(row, 5)
    found.append(harness.forward(ForwardMode.DECODE, [(row, None)])[0])
    return torch.stack(found)


def store_rounded(
    harness: ForwardHarness, dtype: torch.dtype, scales: dict[int, KVScales]
) -> None:
    """Store K and V in float32 as a pool of 8 bits would give them back: the oracle."""
    backend: Any = harness.runner.attn_backend
    store, pool = backend.store_op, harness.runner.token_to_kv_pool
    layers = {
        pool.get_kv_buffer(layer)[0].data_ptr(): scales.get(layer, KVScales())
        for layer in pool.layers
    }

    def rounded(q: Tensor, k: Tensor, v: Tensor, **args: Any) -> None:
        store(q, k, v, **args)
        own = layers[args["k_cache"].data_ptr()]
        halves = [(args["k_cache"], own.k), (args["v_cache"], own.v)]
        if pool.values_in_keys:
            halves = halves[:1]
        for cache, scale in halves:
            slots = args["out_cache_loc"]
            cache[slots] = to_stored(cache[slots], dtype, scale).float() * scale

    backend.store_op = rounded


def with_scales(folder: Path, target: Path, scales: dict[int, KVScales]) -> Path:
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for layer, (k, v) in scales.items():
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(k)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([v])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_text((folder / name).read_text())
    return target


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "family", ["LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_logits_are_those_of_the_rounded_values(
    family: str, name: str, tmp_path: Path
) -> None:
    """K and V, a window beside a full group, and latents; with scales of layers."""
    plain = write_tiny_model(tmp_path / "plain", family)
    folder = with_scales(plain, tmp_path / "scaled", SCALES)
    # The oracle's pool keeps rounded values exactly; a GPU would use bfloat16.
    none: dict[str, Any] = {"kv_canary": "none", "dtype": "float32"}
    harness = ForwardHarness(folder, kv_cache_dtype=name, **none)
    assert harness.runner.token_to_kv_pool.dtype == KV_DTYPES[name]
    found = logits(harness)
    oracle = ForwardHarness(plain, attention_backend="torch_native", **none)
    before = logits(oracle)
    store_rounded(oracle, KV_DTYPES[name], SCALES)
    expected = logits(oracle)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (before - expected).abs().max() > 1e-2


def test_twice_the_tokens_fit(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    options: dict[str, Any] = {"kv_canary": "none", "dtype": "bfloat16"}
    wide = ForwardHarness(folder, **options)
    narrow = ForwardHarness(folder, kv_cache_dtype="fp8", **options)
    assert 2 * narrow.runner.bytes_per_kv_slot() == wide.runner.bytes_per_kv_slot()
    pools = [each.runner.token_to_kv_pool.nbytes for each in (narrow, wide)]
    assert 2 * pools[0] == pools[1]


# -- traffic -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mock")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    target = write_mock_model(folder / "model", **sizes)
    draft = write_mock_draft(folder / "draft", kind="EAGLE", **sizes)
    return {"model": str(target), "draft": str(draft)}


def run(harness: EngineHarness, traffic: Traffic) -> dict[str, Finished]:
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    return answers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_traffic_without_an_alarm(
    page_size: int, name: str, models: dict[str, str]
) -> None:
    """The mock model's K and V are exact in 8 bits, so its oracle holds."""
    harness = EngineHarness(
        Path(models["model"]),
        page_size=page_size,
        max_total_tokens=800,
        kv_cache_dtype=name,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=4,
        skip_tokenizer_init=True,
    )
    traffic = Traffic(
        harness,
        random.Random(page_size),
        count(ci=12, full=1000),
        longest_output=40,
        short_after=6,
    )
    answers = run(harness, traffic)
    check(traffic.expected, answers, vocab_size=VOCAB)
    assert canary_of(harness).reporter.total == 0


@pytest.mark.parametrize(
    ("name", "draft"),
    [("fp8_e4m3", None), ("fp8_e4m3", "auto"), ("auto", "fp8_e5m2")],
)
def test_drafts_follow_the_target_or_their_own_flag(
    name: str, draft: str | None, models: dict[str, str]
) -> None:
    """Trees, whose accepted nodes move; greedy outputs are the oracle's."""
    harness = speculating(
        Path(models["model"]),
        Path(models["draft"]),
        tree=(4, 3, 8),
        page_size=4,
        max_total_tokens=800,
        kv_cache_dtype=name,
        speculative_draft_kv_cache_dtype=draft,
    )
    worker = harness.scheduler.worker
    dtypes = [
        runner.token_to_kv_pool.dtype
        for runner in (worker.model_runner, worker.draft_worker.draft_runner)
    ]
    wide = worker.model_runner.dtype
    assert dtypes == [
        KV_DTYPES.get(name, wide),
        KV_DTYPES.get(name if draft is None else draft, wide),
    ]
    traffic = Traffic(
        harness,
        random.Random(3),
        count(ci=6, full=300),
        longest_output=24,
        short_after=4,
    )
    answers = run(harness, traffic)
    check(traffic.expected, answers, vocab_size=VOCAB)
    managers = worker.canary_managers()
    assert len(managers) == 2 and all(m.reporter.total == 0 for m in managers)


@pytest.mark.parametrize("seed", range(count(ci=2, full=20)))
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_byte_is_named(name: str, seed: int, models: dict[str, str]) -> None:
    outcome = plant(
        Path(models["model"]),
        "real_kv_used",
        seed=seed,
        kv_cache_dtype=name,
        kv_canary_real_data="all",
    )
    assert outcome.violations[0]["reasons"] == ["verify_real_kv"]


LAST = 4096
"""Slots at the end of a pool that requests of a test stay in."""


@pytest.mark.parametrize(
    "name", ["real_kv_used", "record", "req_to_token", "early_free", "write_foreign"]
)
def test_faults_in_the_last_slots_are_named(name: str, models: dict[str, str]) -> None:
    """On a GPU a layer has more than 2**31 elements before them."""
    before = 2**31 // (NUM_KV_HEADS * HEAD_DIM) if torch.cuda.is_available() else 1000

    def use_the_end(harness: EngineHarness) -> None:
        allocator = harness.scheduler.cache.allocator
        slots = allocator.alloc(before + LAST)
        # What is freed last is used first.
        allocator.free(slots[:before])
        allocator.free(slots[before:])

    outcome = plant(
        Path(models["model"]),
        name,
        seed=1,
        prepare=use_the_end,
        max_total_tokens=before + LAST,
        kv_cache_dtype="fp8_e4m3",
        kv_canary_real_data="all",
    )
    slots = {slot for f in outcome.forwards for row in f.rows for slot in row.slots}
    assert min(slots - {0}) > before
    allowed = set(reason_labels(POOL_FAULTS[name].reasons))
    found = [v for v in outcome.violations if allowed.intersection(v["reasons"])]
    damage = outcome.planted.damage
    # A row may be pointed at any slot.
    assert max(slot for slot, _ in damage.places) > before
    assert (damage.slot, damage.position) in {(v["slot"], v["position"]) for v in found}


@pytest.mark.parametrize("seed", range(count(ci=2, full=20)))
def test_changed_scales_are_named(seed: int, models: dict[str, str]) -> None:
    """Of K or of V, in any layer; by the forward that comes next."""
    rng = random.Random(seed)
    harness = EngineHarness(
        Path(models["model"]),
        max_total_tokens=400,
        kv_cache_dtype=rng.choice(NAMES),
        kv_canary="raise",
        skip_tokenizer_init=True,
    )
    harness.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True)
    layer, half, scale = rng.randrange(2), rng.choice("kv"), rng.choice((0.5, 2.0))
    harness.scheduler.worker.model_runner.token_to_kv_pool.set_scales(
        {layer: KVScales(**{half: scale})}
    )
    message = f"KV canary: layer {layer} now has .*{half}={scale}"
    with pytest.raises(RuntimeError, match=message):
        harness.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True)


# -- scales ------------------------------------------------------------------------

PREFIX = "model.layers.1.self_attn."
NAMINGS: dict[str, tuple[dict[str, float], KVScales]] = {
    "attention": ({"k_scale": 0.5, "v_scale": 2.0}, KVScales(0.5, 2.0)),
    "inside": ({"attn.k_scale": 0.5, "attn.v_scale": 2.0}, KVScales(0.5, 2.0)),
    "projections": (
        {"k_proj.k_scale": 0.5, "v_proj.v_scale": 2.0},
        KVScales(0.5, 2.0),
    ),
    "outputs": (
        {"k_proj.output_scale": 0.5, "v_proj.output_scale": 2.0},
        KVScales(0.5, 2.0),
    ),
    "both": ({"kv_scale": 0.5}, KVScales(0.5, 0.5)),
    "one": ({"v_scale": 2.0}, KVScales(1.0, 2.0)),
}


def find(folder: Path, **options: Any) -> dict[int, KVScales]:
    given: dict[str, Any] = {"param_path": None, "rank": 0, "has_file": True}
    return find_kv_scales(folder, layers=(0, 1), **(given | options))


@pytest.mark.parametrize("naming", NAMINGS)
def test_names_of_scales(
    naming: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, expected = NAMINGS[naming]
    tensors = {PREFIX + name: torch.tensor(value) for name, value in stored.items()}
    tensors["model.layers.7.self_attn.k_scale"] = torch.tensor(9.0)
    tensors[PREFIX + "k_proj.weight_scale"] = torch.tensor(9.0)
    save_file(tensors, tmp_path / "model.safetensors")
    assert find(tmp_path) == {1: expected}
    assert "1 of 2 layers have no KV scales" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(0.0), r"k_scale is 0\.0; a scale must be a positive number"),
        (torch.tensor(float("nan")), "k_scale is nan"),
        (torch.ones(2), r"k_scale has shape \(2,\); KV is stored with one scale per"),
    ],
)
def test_scales_that_are_refused(value: Tensor, message: str, tmp_path: Path) -> None:
    save_file({PREFIX + "k_scale": value}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        find(tmp_path)


def test_a_file_of_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "scales.json"

    def write(**kv_cache: Any) -> str:
        file.write_text(json.dumps({"kv_cache": kv_cache}))
        return str(file)

    factors = {"0": {"0": 0.25, "1": 3, "9": 1.0}, "1": {"0": 7.0, "1": 7.0}}
    found = find(tmp_path, param_path=write(scaling_factor=factors))
    assert found == {0: KVScales(0.25, 0.25), 1: KVScales(3.0, 3.0)}
    assert not caplog.messages
    for bad, message in (
        ({}, "scaling_factor must be an object, got null"),
        ({"scaling_factor": {"1": {}}}, "0 must be an object"),
        ({"scaling_factor": {"0": {"x": 1.0}}}, 'scaling_factor has "x"'),
        ({"scaling_factor": {"0": {"1": "2"}}}, 'scaling_factor has "1": "2"'),
        ({"scaling_factor": {"0": {"1": -2.0}}}, "the factor of layer 1 is -2.0"),
    ):
        with pytest.raises(ValueError, match=f"--quantization-param-path .*{message}"):
            find(tmp_path, param_path=write(**bad))


# -- flags -------------------------------------------------------------------------


def test_a_type_that_is_not_the_models(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16: .* --dtype bfloa"):
        ForwardHarness(folder, kv_cache_dtype="bf16", dtype="float32")
    harness = ForwardHarness(folder, kv_cache_dtype="bf16", dtype="bfloat16")
    assert harness.runner.token_to_kv_pool.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        ServerArgs(kv_cache_dtype="int8")


def test_a_backend_that_does_not_read_8_bits() -> None:
    needs = attention_needs([], has_trees=False, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"flashinfer does not serve KV of 8 bits"):
        check_needs("flashinfer", needs, device="cuda")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
