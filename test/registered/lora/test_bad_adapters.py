"""Adapters that cannot be served: a clear error, and nobody else is disturbed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.messages.io_struct import (
    LoadLoraReq,
    LoraRef,
    LoraRsp,
    UnloadLoraReq,
)
from sglang.test.adapters import ATTENTION, adapter_tensors, write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PROMPT = list(range(20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "model", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def harness(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineHarness:
    good = write_adapter(tmp_path_factory.mktemp("good"), model)
    return EngineHarness(
        model,
        skip_tokenizer_init=True,
        lora_paths=[f"good={good}"],
        max_lora_rank=8,
        max_loaded_loras=3,
    )


def load(harness: EngineHarness, path: object, name: str = "bad") -> LoraRsp:
    answer = harness.ask(LoadLoraReq(call_id=1, name=name, path=str(path)))
    assert isinstance(answer, LoraRsp)
    return answer


def unload(harness: EngineHarness, name: str = "bad") -> str | None:
    answer = harness.ask(UnloadLoraReq(call_id=2, name=name))
    assert isinstance(answer, LoraRsp)
    return answer.error


def changed(**change: Any) -> Callable[[Path, Path], None]:
    """An adapter with these keys of its configuration, or tensors if given."""

    def write(folder: Path, model: Path) -> None:
        write_adapter(folder, model, **change)

    return write


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def write(folder: Path, model: Path) -> None:
        found = adapter_tensors(model, rank=4)
        change(found)
        write_adapter(folder, model, tensors=found)

    return write


def text(content: str | bytes) -> Callable[[Path, Path], None]:
    def write(folder: Path, model: Path) -> None:
        write_adapter(folder, model)
        data = content.encode() if isinstance(content, str) else content
        (folder / "adapter_config.json").write_bytes(data)

    return write


def of_another_model(folder: Path, model: Path) -> None:
    other = write_tiny_model(
        folder / "other", "LlamaForCausalLM", hidden_size=128, num_hidden_layers=2
    )
    write_adapter(folder, other)


def with_more_layers(folder: Path, model: Path) -> None:
    other = write_tiny_model(folder / "other", "LlamaForCausalLM", num_hidden_layers=3)
    write_adapter(folder, other)


def without_weights(folder: Path, model: Path) -> None:
    write_adapter(folder, model)
    (folder / "adapter_model.safetensors").unlink()


def many_tensors(folder: Path, model: Path) -> None:
    write_adapter(
        folder, model, tensors={f"{'x' * 4000}{i}": torch.zeros(0) for i in range(300)}
    )


def broken_weights(folder: Path, model: Path) -> None:
    write_adapter(folder, model)
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


def a_pipe(folder: Path, model: Path) -> None:
    write_adapter(folder, model)
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
BAD = {
    "rank 16, more than --max-lora-rank 8": changed(rank=16),
    "other base model|another base model": of_another_model,
    "layers.2.* no layer of LlamaForCausalLM": with_more_layers,
    "adapter_model.safetensors: no such file": without_weights,
    "not a valid safetensors file": broken_weights,
    "header has .* bytes, more than": many_tensors,
    "is not a regular file": a_pipe,
    "lora_B of .*q_proj is missing": tensors(lambda t: t.pop(Q.format("B"))),
    "no tensors of .*layers.1.mlp.up_proj": tensors(
        lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp.up" in name]
    ),
    "not finite in float32": tensors(lambda t: t[Q.format("A")].fill_(float("inf"))),
    r"has shape \(4, 65\), but for rank 4": tensors(
        lambda t: t.update({Q.format("A"): torch.zeros(4, 65)})
    ),
    "must be floating point": tensors(
        lambda t: t.update({Q.format("A"): torch.zeros(4, 64, dtype=torch.int32)})
    ),
    "adapters of embeddings, heads": tensors(
        lambda t: t.update({EMBEDDING: torch.zeros(4, 8)})
    ),
    "adapts lm_head; adapters of q_proj": tensors(
        lambda t: t.update(
            {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}
        )
    ),
    "repeats the A of": tensors(
        lambda t: t.update(
            {Q.format("A").removeprefix("base_model.model."): torch.zeros(4, 64)}
        )
    ),
    "there is no tensor": tensors(lambda t: t.clear()),
    "peft_type is .IA3": changed(peft_type="IA3"),
    "use_dora is not served": changed(use_dora=True),
    "modules_to_save is not served": changed(modules_to_save=["lm_head"]),
    "alpha_pattern is not served": changed(alpha_pattern={"q_proj": 3}),
    'bias must be "none"': changed(bias="all"),
    "fan_in_fan_out must be false": changed(fan_in_fan_out=True),
    "r must be from 1": changed(r=0),
    "lora_alpha must be a number": changed(lora_alpha="x"),
    "lora_alpha must be from": changed(lora_alpha=float("inf")),
    "target_modules names .*embed_tokens": changed(target_modules=["embed_tokens"]),
    "target_modules must be a list": changed(target_modules=[{}]),
    "nested too deeply": text('{"r":' + "[" * 100_000),
    "not valid JSON": text("{"),
    "must hold a JSON object": text("[]"),
    "not UTF-8": text(b"\xff\xfe"),
    "bytes, more than": text(" " * (1 << 20) + "{}"),
    "r is missing": text('{"peft_type": "LORA"}'),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_a_bad_adapter_gets_a_clear_error(
    harness: EngineHarness, model: Path, tmp_path: Path, message: str
) -> None:
    due = harness.generate(PROMPT, lora="good", max_new_tokens=4).output_ids
    BAD[message](tmp_path, model)
    answer = load(harness, tmp_path)
    assert answer.lora is None and answer.error is not None
    assert len(answer.error) < 2000 and str(tmp_path) in answer.error
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.error)
    assert [ref.name for ref in harness.scheduler.ready_message().loras] == ["good"]
    assert harness.generate(PROMPT, lora="good", max_new_tokens=4).output_ids == due


@pytest.mark.parametrize("message", ["r is missing", "rank 16, more than", "no such"])
def test_the_same_at_start(model: Path, tmp_path: Path, message: str) -> None:
    writers = {key: write for key, write in BAD.items() if key.startswith(message)}
    for write in writers.values():
        write(tmp_path, model)
    with pytest.raises(ValueError, match=message):
        EngineHarness(
            model,
            skip_tokenizer_init=True,
            lora_paths=[f"bad={tmp_path}"],
            max_lora_rank=8,
        )


def test_a_folder_that_is_none(harness: EngineHarness, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", "/dev/null", "owner/name", "\0", "x/" * 2000):
        assert "is not a folder" in (load(harness, path).error or "")
    error = load(harness, "x" * 5000).error or ""
    assert "File name too long" in error and len(error) < 2000


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_disk_that_fails(
    harness: EngineHarness,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    write_adapter(tmp_path, model, seed=3)
    is_file = Path.is_file

    def fails(path: Path) -> bool:
        if path == tmp_path / file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", fails)
    assert "Permission denied" in (load(harness, tmp_path).error or "")


def test_no_memory_for_an_adapter(
    harness: EngineHarness,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    adapters = harness.scheduler.worker.model_runner.adapters
    assert adapters is not None
    monkeypatch.setattr(adapters.pool, "_prepare", fails)
    answer = load(harness, write_adapter(tmp_path, model, seed=3))
    assert "lower --max-loaded-loras" in (answer.error or "")


def test_numbers_that_the_dtype_does_not_hold(model: Path, tmp_path: Path) -> None:
    harness = EngineHarness(
        model,
        skip_tokenizer_init=True,
        dtype="float16",
        enable_lora=True,
        max_lora_rank=8,
    )
    found = adapter_tensors(model, rank=4)
    found[Q.format("B")].fill_(40000.0)  # the scale is 2
    bad = write_adapter(tmp_path, model, tensors=found)
    assert "not finite in float16" in (load(harness, bad).error or "")


def test_names_and_numbers(harness: EngineHarness, model: Path, tmp_path: Path) -> None:
    good = write_adapter(tmp_path, model, seed=3)
    assert "is loaded; unload it first" in (load(harness, good, "good").error or "")
    for name in ("", "a\nb", "x" * 257):
        assert "printable characters" in (load(harness, good, name).error or "")
    for name in ("b", "c"):
        assert load(harness, good, name).error is None
    assert "--max-loaded-loras" in (load(harness, good, "d").error or "")
    assert unload(harness, "b") is unload(harness, "c") is None
    assert unload(harness, "b") == "no adapter 'b' is loaded"


def test_an_adapter_in_use_stays(
    harness: EngineHarness, model: Path, tmp_path: Path
) -> None:
    ref = load(harness, write_adapter(tmp_path, model, seed=3)).lora
    assert ref is not None
    rid = harness.submit(PROMPT, lora=ref, max_new_tokens=20, ignore_eos=True)
    harness.scheduler.step()
    assert "1 request(s) use the adapter" in (unload(harness) or "")
    answers = harness.run()
    assert len(answers[rid].output_ids) == 20
    assert unload(harness) is None
    gone = harness.generate(PROMPT, lora=ref)
    assert gone.finish_reason is not None
    assert gone.finish_reason.status_code == 400
    assert "is not loaded" in (gone.finish_reason.message or "")


def test_other_content_under_a_name_shares_nothing(
    harness: EngineHarness, model: Path, tmp_path: Path
) -> None:
    """Nor do equal tensors with another scale; the same content does."""
    answers = {}
    for seed, alpha, cached in (
        (5, 8, 0),
        (6, 8, 0),
        (6, 9, 0),
        (5, 8, 19),
        (6, 9, 19),
    ):
        folder = write_adapter(
            tmp_path / f"{seed} {alpha}", model, seed=seed, lora_alpha=alpha
        )
        ref = load(harness, folder, "swapped").lora
        answer = harness.generate(PROMPT, lora=ref, max_new_tokens=5, ignore_eos=True)
        assert answer.cached_tokens == cached, (seed, alpha)
        key = seed, alpha
        assert answers.setdefault(key, answer.output_ids) == answer.output_ids
        assert unload(harness, "swapped") is None
    assert len({tuple(ids) for ids in answers.values()}) == 3


def test_two_names_of_one_content(
    harness: EngineHarness, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, model, seed=7, targets=ATTENTION)
    refs = [load(harness, folder, name).lora for name in ("one", "two")]
    due = [harness.generate(PROMPT, lora=ref, max_new_tokens=4) for ref in refs]
    assert due[0].output_ids == due[1].output_ids
    assert unload(harness, "one") is None
    again = harness.generate(PROMPT, lora=refs[1], max_new_tokens=4)
    assert again.output_ids == due[1].output_ids
    assert unload(harness, "two") is None


def test_adapters_need_the_flag(model: Path) -> None:
    plain = EngineHarness(model, skip_tokenizer_init=True)
    ref = LoraRef(name="a", path="", revision="0")
    answer = plain.generate(PROMPT, lora=ref)
    assert answer.finish_reason is not None
    assert "--enable-lora" in (answer.finish_reason.message or "")
    assert "--enable-lora" in (load(plain, "x").error or "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enable_lora": True}, "add --max-lora-rank"),
        ({"max_lora_rank": 8}, "--max-lora-rank 8 needs --enable-lora"),
        ({"lora_target_modules": ["q_proj"]}, "needs --enable-lora"),
        ({"lora_paths": ["a=x", "a=y"]}, "names 'a' twice"),
        ({"lora_paths": ["a="]}, "write NAME=PATH"),
        ({"lora_paths": ["=x"]}, "1 to 256 printable"),
        ({"lora_paths": ['{"lora_name": 1}']}, "needs lora_name and lora_path"),
        ({"lora_paths": ["a=x", "b=y"], "max_loaded_loras": 1}, "less than the 2"),
        (
            {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["x"]},
            "--lora-target-modules 'x' is unknown",
        ),
        ({"lora_paths": ["a=/nowhere"]}, "/nowhere is not a folder"),
    ],
)
def test_flags_that_contradict(
    model: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineHarness(model, skip_tokenizer_init=True, **flags)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("Qwen3MoeForCausalLM", "down_proj"),
        ("DeepseekV2ForCausalLM", "q_proj"),
        ("DeepseekV2ForCausalLM", "v_proj"),
    ],
)
def test_layers_that_cannot_have_adapters(
    tmp_path: Path, family: str, module: str
) -> None:
    """Those of experts, and of latents."""
    model = write_tiny_model(tmp_path, family, mlp_only_layers=[])
    with pytest.raises(ValueError, match=f"{module}: {family} has no layer of that"):
        EngineHarness(
            model,
            skip_tokenizer_init=True,
            enable_lora=True,
            max_lora_rank=8,
            lora_target_modules=[module],
        )


def test_slots_that_do_not_fit_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sglang.srt.lora.stacked_pool.available_device_bytes", lambda _: 1000
    )
    with pytest.raises(ValueError, match="GiB are free; lower --max-loras-per-batch"):
        EngineHarness(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_lora=True,
            max_lora_rank=8,
        )


def test_the_mock_model_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MockForCausalLM cannot have adapters"):
        EngineHarness(
            write_mock_model(tmp_path),
            skip_tokenizer_init=True,
            enable_lora=True,
            max_lora_rank=8,
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
