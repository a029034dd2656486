"""Adapters in the Python engine, over ranks, and beside drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglang
from sglang.srt.arg_groups.lora_hook import TARGET_MODULES
from sglang.srt.configs.draft_kinds import DRAFT_KINDS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.forward.adapter_tiles import AdapterTiles, plan_tiles
from sglang.srt.lora.adapter_config import read_adapter_config
from sglang.srt.lora.adapter_file import read_adapter
from sglang.srt.lora.layout import AdaptedModule, AdapterLayout
from sglang.srt.lora.pool import PackedPool
from sglang.srt.model_loader.loader import load_model
from sglang.srt.utils.paths import bundled_demo_draft_path, bundled_demo_model_path
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count, is_full, sampled
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=5, suite="cpu", full_time=60)

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 8}
DRAFTS = [
    {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
    {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4, "page_size": 4},
    {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 2},
    {"speculative_algorithm": "NGRAM"},
    {"speculative_algorithm": "EAGLE3", "speculative_adaptive": True},
]


@pytest.mark.skipif(not is_full(), reason="two processes; the cut is tested below")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """And load, unload and refuse alike."""
    model = write_tiny_model(tmp_path / "m", "Qwen3ForCausalLM", num_key_value_heads=1)
    other = write_tiny_model(tmp_path / "o", "Qwen3ForCausalLM", intermediate_size=80)
    paths = {
        "a": write_adapter(tmp_path / "a", model, rank=4, seed=1),
        "b": write_adapter(tmp_path / "b", model, rank=8, seed=2),
        "bad": write_adapter(tmp_path / "bad", other),
    }
    rng = random.Random(0)
    prompts = [rng.choices(range(200), k=rng.randrange(5, 60)) for _ in range(9)]
    names = [(None, "a", "b")[i % 3] for i in range(len(prompts))]
    alone = EngineHarness(
        model,
        skip_tokenizer_init=True,
        lora_paths=[f"{name}={paths[name]}" for name in "ab"],
    )
    due = [
        alone.generate(prompt, lora=name, max_new_tokens=8, ignore_eos=True).output_ids
        for prompt, name in zip(prompts, names, strict=True)
    ]
    with sglang.Engine(
        model_path=str(model),
        tp_size=2,
        lora_paths={"a": paths["a"]},
        max_lora_rank=8,
        max_loras_per_batch=1,
        chunked_prefill_size=32,
        max_total_tokens=640,
        kv_canary="raise",
        skip_tokenizer_init=True,
    ) as engine:
        assert list(engine.load_lora_adapter("b", str(paths["b"]))) == ["a", "b"]
        for _ in range(2):
            answers = engine.generate(
                input_ids=prompts, sampling_params=GREEDY, lora_path=names
            )
            assert [answer["output_ids"] for answer in answers] == due
        with pytest.raises(ValueError, match="another base model"):
            engine.load_lora_adapter("c", str(paths["bad"]))
        assert list(engine.unload_lora_adapter("b")) == ["a"]
        with pytest.raises(ValueError, match="no adapter 'b'"):
            engine.generate(input_ids=[1], lora_path="b")


def test_the_parts_of_ranks_make_the_whole(tmp_path: Path) -> None:
    """Of an adapter, as of the weights that it changes; both ranks have the KV head."""
    model = write_tiny_model(tmp_path / "m", "Qwen3ForCausalLM", num_key_value_heads=1)
    config = ModelConfig.from_path(model)
    adapter = read_adapter_config(write_adapter(tmp_path / "a", model, rank=3))
    products = []
    for size in (1, 2):
        of_ranks = []
        for rank in range(size):
            with tensor_parallel_group(TensorParallelGroup(rank=rank, size=size)):
                loaded = load_model(
                    config, load_format="auto", dtype=torch.float32, rope_rows=8
                )
                layout = AdapterLayout(loaded, TARGET_MODULES)
                pool = PackedPool(layout, num_slots=1, evicts_oldest=False)
                tensors = read_adapter(adapter, layout, max_rank=3, dtype=torch.float32)
                pool.add(tensors)
                pool.hold([tensors.revision])
            of_ranks.append(layout)
        products.append([_product(modules) for modules in _by_module(of_ranks)])
    for whole, parts in zip(*products, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def _by_module(layouts: list[AdapterLayout]) -> list[tuple[AdaptedModule, ...]]:
    return list(zip(*(layout.modules for layout in layouts), strict=True))


def _product(ranks: tuple[AdaptedModule, ...]) -> torch.Tensor:
    """What all ranks of a layer add for three tokens: a sum if its inputs are split,
    else the outputs of each shard in order."""
    whole = ranks[0].shards[0].inputs
    x = torch.randn(3, whole, generator=torch.Generator().manual_seed(whole))
    words = plan_tiles(np.array([1, 1, 1]), 1)
    assert words is not None
    parts: list[list[torch.Tensor]] = []
    for module in ranks:
        kept = module.shards[0].kept_inputs
        assert module.linear.adapters is not None
        own = x.narrow(1, kept.start, kept.size)
        nothing = torch.zeros(sum(module.sizes), own.shape[1])
        tiles = AdapterTiles.on_cpu(words)
        y = module.linear.adapters.linear(own, nothing, None, tiles)
        parts.append(list(y.split(list(module.sizes), dim=1)))
    if ranks[0].shards[0].kept_inputs.size < whole:
        return torch.stack([torch.cat(own, dim=1) for own in parts]).sum(0)
    shards = []
    for i, shard in enumerate(ranks[0].shards):
        result = torch.zeros(3, shard.outputs)
        for module, own in zip(ranks, parts, strict=True):
            place = module.shards[i].kept_outputs
            result[:, place.start : place.start + place.size] = own[i]
        shards.append(result)
    return torch.cat(shards, dim=1)


@pytest.mark.parametrize("draft", sampled(DRAFTS, key=type, ci=1), ids=str)
@pytest.mark.parametrize("overlap", sampled([True, False], key=type, ci=1))
def test_drafts_change_no_answer(
    tmp_path: Path, draft: dict[str, Any], overlap: bool
) -> None:
    """They run without the adapter."""
    model = bundled_demo_model_path()
    adapters = [
        f"{name}={write_adapter(tmp_path / name, model, seed=i, size=0.1)}"
        for i, name in enumerate("abc")
    ]
    usual = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "lora_paths": adapters,
        "max_loras_per_batch": 2,
        "max_total_tokens": 8192,
        "context_length": 256,
        "kv_canary": "raise",
    }
    plain = EngineHarness(model, disable_radix_cache=True, **usual)
    algorithm = draft["speculative_algorithm"]
    if DRAFT_KINDS[algorithm].has_model:
        path = str(bundled_demo_draft_path(algorithm))
        draft = draft | {"speculative_draft_model_path": path}
    drafting = EngineHarness(
        model,
        overlap=overlap,
        speculative_num_steps=3,
        speculative_num_draft_tokens=4
        if draft.get("speculative_eagle_topk") == 1
        else 8,
        **usual | draft,
    )
    rng = random.Random(0)
    prompts = [rng.choices(range(1000), k=20) for _ in range(3)]
    options = {"max_new_tokens": 12, "ignore_eos": True}
    due, rids = {}, []
    for _ in range(count(ci=12, full=100)):
        key = rng.randrange(3), rng.choice((None, "a", "b", "c"))
        prompt = prompts[key[0]]
        if key not in due:
            due[key] = plain.generate(prompt, lora=key[1], **options).output_ids
        rids.append((drafting.submit(prompt, lora=key[1], **options), key))
    found = drafting.run()
    assert [found[rid].output_ids for rid, _ in rids] == [due[key] for _, key in rids]
    assert len({tuple(ids) for ids in due.values()}) > 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
