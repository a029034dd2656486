"""KV of another tenant, adapter, revision or content: found, named and healed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import IDENTITY_FAULTS
from kv_canary.reporter import CanaryViolation
from sglang.faults.identity import PLANTERS, planted_identity
from sglang.srt.managers.messages.io_struct import LoadLoraReq, UnloadLoraReq
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu", full_time=200)

SEEDS = range(count(ci=1, full=20))
VOCAB = 256
SAID = {
    "tenant_left_out": "under tenant",
    "adapter_left_out": "under adapter",
    "revision_left_out": "under revision",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("identity")
    model = write_tiny_model(folder / "model", "LlamaForCausalLM")
    for seed, name in enumerate(("a", "b", "old", "new")):
        write_adapter(folder / name, model, seed=seed)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    return folder, table


class Traffic:
    """Few prompts in all forms: tenants, adapters, tokens and embeddings; adapter x is
    loaded again with other content."""

    def __init__(self, world: Any, seed: int, **flags: Any) -> None:
        self._folder, self._table = world
        self._rng = random.Random(seed)
        self.harness = EngineHarness(
            self._folder / "model",
            skip_tokenizer_init=True,
            dtype="float32",
            page_size=self._rng.choice((1, 4)),
            overlap=self._rng.random() < 0.5,
            lora_paths=[f"{name}={self._folder / name}" for name in "ab"]
            + [f"x={self._folder / 'old'}"],
            max_loras_per_batch=self._rng.choice((2, 4)),
            chunked_prefill_size=self._rng.choice((32, 512)),
            **flags,
        )
        stems = [self._tokens(24) for _ in range(2)]
        self._prompts = [
            stem[: self._rng.choice((16, 24))] + self._tokens(6)
            for stem in stems
            for _ in range(3)
        ]
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(length)]

    def round(self, number: int) -> None:
        """Submit some requests and answer them all."""
        rng = self._rng
        for _ in range(4):
            prompt = rng.choice(self._prompts)
            options: dict[str, Any] = {
                "extra_key": rng.choice((None, None, "t")),
                "lora": rng.choice((None, "a", "b", "x")),
                "max_new_tokens": rng.randrange(2, 8),
            }
            if rng.random() < 0.5:
                values = self._table[prompt].numpy().astype(np.float32)
                options["input_embeds"] = values.tobytes()
            asked = {"input_ids": prompt, **options}
            if options["lora"] is not None:
                asked["lora"] = self.harness.lora(options["lora"])
            rid = self.harness.submit(**asked, ignore_eos=True)
            self.asked.append((rid, asked | {"folder": self._content(options)}))
        self.answers = getattr(self, "answers", {}) | self.harness.run()
        if number % 3 == 2:
            self._reload("new" if number % 2 else "old")

    def _content(self, options: dict[str, Any]) -> str | None:
        name = options["lora"]
        return self._x if name == "x" else name

    _x = "old"

    def _reload(self, content: str) -> None:
        ask = self.harness.ask
        ask(UnloadLoraReq(call_id=0, name="x"))
        ask(LoadLoraReq(call_id=0, name="x", path=str(self._folder / content)))
        self._x = content


@pytest.fixture(scope="module")
def due(world: Any) -> Any:
    """Answers of an engine without faults, caches or batches."""
    folder, _ = world
    names = ("a", "b", "old", "new")
    engine = EngineHarness(
        folder / "model",
        skip_tokenizer_init=True,
        dtype="float32",
        disable_radix_cache=True,
        lora_paths=[f"{name}={folder / name}" for name in names],
    )
    known: dict[Any, list[int]] = {}

    def answer(asked: dict[str, Any]) -> list[int]:
        key = (asked["folder"], asked["max_new_tokens"], *asked["input_ids"])
        if key not in known:
            known[key] = engine.generate(
                asked["input_ids"],
                lora=asked["folder"],
                max_new_tokens=asked["max_new_tokens"],
                ignore_eos=True,
            ).output_ids
        return known[key]

    return answer


def test_every_fault_has_a_planter() -> None:
    assert set(PLANTERS) == set(IDENTITY_FAULTS)


@pytest.mark.parametrize("name", sorted(IDENTITY_FAULTS))
def test_the_report_names_the_request_and_the_difference(world: Any, name: str) -> None:
    fault = IDENTITY_FAULTS[name]
    for seed in SEEDS:
        traffic = Traffic(world, seed, kv_canary="raise")
        scheduler = traffic.harness.scheduler
        with (
            planted_identity(scheduler, name) as planted,
            pytest.raises(CanaryViolation),
        ):
            for number in range(40):
                traffic.round(number)
        found = scheduler.own_incidents()[-1]["violations"]
        assert {each["rid"] for each in found} == {planted.victim}, found
        labels = {label for each in found for label in each["reasons"]}
        assert labels & set(reason_labels(fault.reasons)), (seed, labels)
        if name in SAID:
            # What it wrote after that prefix is wrong as well.
            assert SAID[name] in found[0]["look_at"], (seed, found[0])


@pytest.mark.parametrize("name", sorted(IDENTITY_FAULTS))
def test_answers_are_healed(world: Any, due: Any, name: str) -> None:
    for seed in SEEDS:
        traffic = Traffic(world, seed, kv_canary="heal")
        scheduler = traffic.harness.scheduler
        with planted_identity(scheduler, name) as planted:
            for number in range(40):
                traffic.round(number)
                if planted.victim is not None and number >= 6:
                    break
        assert planted.victim is not None, seed
        assert scheduler.own_incidents()
        for rid, asked in traffic.asked:
            assert traffic.answers[rid].output_ids == due(asked), (seed, rid)


@pytest.mark.parametrize("seed", SEEDS)
def test_silence_without_faults(world: Any, due: Any, seed: int) -> None:
    traffic = Traffic(
        world, seed, kv_canary="raise", kv_canary_sweep_interval=1, max_total_tokens=512
    )
    for number in range(count(ci=10, full=100)):
        traffic.round(number)
    for rid, asked in traffic.asked:
        assert traffic.answers[rid].output_ids == due(asked), rid


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
