"""Adapters give what peft gives, in mixed batches, chunks and cached prefixes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.managers.messages.io_struct import LoadLoraReq
from sglang.srt.replay.playing.player import CannotReplay
from sglang.test.adapters import ATTENTION, write_adapter
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.replay_traffic import (
    check_same,
    record_of,
    recorded_engine,
    replayed,
)
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

register_cpu_ci(est_time=6, suite="cpu", full_time=400)
register_cuda_ci(est_time=60, suite="cuda")

VOCAB = 256
NEW = 6
FORMS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4},
    "attention": {"rank": 9, "targets": ATTENTION},
    "one": {"rank": 2, "targets": ("up_proj",)},
    "stable": {"rank": 16, "use_rslora": True, "lora_alpha": 3},
}


ORACLES = [
    ("LlamaForCausalLM", True),
    ("LlamaForCausalLM", False),
    ("Qwen2ForCausalLM", False),
    ("Qwen2ForCausalLM", True),
    ("Qwen3ForCausalLM", False),
    ("Qwen3ForCausalLM", True),
]


def models(*families: str) -> Any:
    return pytest.mark.parametrize("family", families)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models with adapters of all forms, each written once."""
    made: dict[str, tuple[Path, dict[str, Path]]] = {}

    def of(family: str) -> tuple[Path, dict[str, Path]]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = write_tiny_model(folder / "model", family)
            adapters = {
                name: write_adapter(folder / name, model, seed=i, **form)
                for i, (name, form) in enumerate(FORMS.items())
            }
            made[family] = model, adapters
        return made[family]

    return of


def engine(model: Path, adapters: dict[str, Path], **args: Any) -> EngineHarness:
    paths = [f"{name}={path}" for name, path in adapters.items()]
    options = {"skip_tokenizer_init": True, "dtype": "float32", "lora_paths": paths}
    return EngineHarness(model, **options | args)


def logprobs(harness: EngineHarness, prompt: list[int], **options: Any) -> torch.Tensor:
    """Of the tokens of a prompt after the first, as the engine scores them."""
    answer = harness.generate(
        prompt, max_new_tokens=1, return_logprob=True, logprob_start_len=0, **options
    )
    entries = answer.logprobs[0].input_token or []
    return torch.tensor([value for value, _ in entries[1:]])


@pytest.mark.parametrize(
    ("family", "is_merged"), sampled(ORACLES, key=lambda case: case[0], ci=1)
)
def test_scores_equal_those_of_peft(world: Any, family: str, is_merged: bool) -> None:
    peft = pytest.importorskip("peft", reason="the oracle, of the extra dev")
    transformers = pytest.importorskip("transformers")
    model, adapters = world(family)
    harness = engine(model, adapters)
    prompt = random.Random(0).choices(range(VOCAB), k=40)
    base = logprobs(harness, prompt)
    for name, path in adapters.items():
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        )
        oracle = peft.PeftModel.from_pretrained(plain, path)
        if is_merged:
            oracle = oracle.merge_and_unload()
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt])).logits[0, :-1]
        due = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = logprobs(harness, prompt, lora=name)
        torch.testing.assert_close(found, due, atol=2e-4, rtol=2e-4)
        assert (found - base).abs().max() > 0.01, "the adapter does something"


@models("LlamaForCausalLM")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_is_answered_as_if_alone(
    world: Any, family: str, page_size: int, overlap: bool
) -> None:
    """In mixed batches with more adapters than slots, of several tenants, of tokens and
    of embeddings, in chunks, over a small cache, under the canary."""
    model, adapters = world(family)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rng = random.Random(page_size)
    stems = [rng.choices(range(VOCAB), k=40) for _ in range(2)]
    alone = engine(model, adapters, disable_radix_cache=True)
    harness = engine(
        model,
        adapters,
        overlap=overlap,
        page_size=page_size,
        max_loras_per_batch=2,
        lora_eviction_policy=rng.choice(("lru", "fifo")),
        chunked_prefill_size=32,
        max_total_tokens=480,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=2,
    )
    due, rids = {}, []
    for _ in range(count(ci=40, full=2000)):
        prompt = rng.choice(stems)[: rng.choice((9, 32, 40))]
        prompt = prompt + [rng.randrange(VOCAB)] * rng.choice((1, 5))
        lora = rng.choice([None, *adapters])
        options: dict[str, Any] = {"lora": lora}
        # None: tokens; 1.0: the same as embeddings; 0.5: other contents.
        scale = rng.choice((None, None, 1.0, 0.5))
        if scale is not None:
            options["input_embeds"] = (table[prompt] * scale).numpy().tobytes()
        key = (lora, scale == 0.5, *prompt)
        if key not in due:
            answer = alone.generate(
                prompt, max_new_tokens=NEW, ignore_eos=True, **options
            )
            due[key] = answer.output_ids
        tenant = rng.choice((None, "s", "t"))
        rid = harness.submit(
            prompt, max_new_tokens=NEW, ignore_eos=True, extra_key=tenant, **options
        )
        rids.append((rid, key))
    answers = harness.run()
    assert [answers[rid].output_ids for rid, _ in rids] == [due[k] for _, k in rids]
    assert len({tuple(ids) for ids in due.values()}) > len(stems)
    assert any(answers[rid].cached_tokens for rid, _ in rids), "prefixes are found"
    pool = harness.scheduler.worker.model_runner.adapters.pool
    assert pool.num_placed > len(adapters), "adapters rotate through the slots"


@models("LlamaForCausalLM")
@pytest.mark.parametrize("has_tokens", [True, False])
def test_recorded_decisions_replay(
    world: Any, family: str, has_tokens: bool, tmp_path: Path
) -> None:
    """From a checkpoint, with adapters of the flags and of run time."""
    model, adapters = world(family)
    folder = write_adapter(tmp_path / "late", model, seed=9)
    harness = recorded_engine(
        model,
        tmp_path,
        dtype="float32",
        page_size=4,
        kv_canary_record=8,
        kv_canary_report_tokens=has_tokens,
        lora_paths=[f"all={adapters['all']}"],
        max_loras_per_batch=1,
    )
    harness.ask(LoadLoraReq(call_id=1, name="late", path=str(folder)))
    rng = random.Random(2)
    prompts = [rng.choices(range(VOCAB), k=30) for _ in range(2)]
    for _ in range(8):
        for _ in range(2):
            name = rng.choice((None, "all", "late"))
            prompt = rng.choice(prompts)
            harness.submit(prompt, lora=name, max_new_tokens=4, ignore_eos=True)
        harness.run()
    record = record_of(harness)
    assert record.checkpoint is not None
    check_same(replayed(record), record)
    write_adapter(folder, model, seed=10)
    with pytest.raises(CannotReplay, match="of the adapter late was recorded"):
        replayed(record)


@models("LlamaForCausalLM")
@pytest.mark.parametrize("page_size", [1, 16])
def test_tiers_keep_adapters_and_contents_apart(
    world: Any, family: str, page_size: int
) -> None:
    """Prefixes of adapters, and of embeddings, come back from the host's memory."""
    model, adapters = world(family)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rng = random.Random(3)
    prompts = [rng.choices(range(VOCAB), k=70) for _ in range(2)]
    tiered = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 6.0,
        "max_total_tokens": 256,
        "page_size": page_size,
        "kv_canary": "raise",
    }
    alone = engine(model, adapters, disable_radix_cache=True)
    harness = engine(model, adapters, **tiered)
    due: dict[Any, list[int]] = {}
    cached = 0
    for _ in range(count(ci=24, full=300)):
        prompt, name = rng.choice(prompts), rng.choice((None, "all", "stable"))
        options: dict[str, Any] = {"lora": name, "max_new_tokens": 3}
        key = (name, *prompt)
        if key not in due:
            due[key] = alone.generate(prompt, ignore_eos=True, **options).output_ids
        if rng.random() < 0.5:
            options["input_embeds"] = table[prompt].numpy().tobytes()
        answer = harness.generate(prompt, ignore_eos=True, **options)
        assert answer.output_ids == due[key], (name, options.keys())
        cached += answer.cached_tokens > 0
    stats = harness.scheduler.stats_snapshot()
    assert stats.hicache_loaded_tokens_total > 0 and cached > 4


@models("LlamaForCausalLM")
def test_adapters_share_no_prefix(world: Any, family: str) -> None:
    model, adapters = world(family)
    harness = engine(model, adapters, kv_canary="raise")
    prompt = random.Random(1).choices(range(VOCAB), k=40)
    for name in (None, *adapters):
        for cached in (0, 39):
            answer = harness.generate(prompt, lora=name, max_new_tokens=2)
            assert answer.cached_tokens == cached, name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
