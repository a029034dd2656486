"""Heads for multi-token prediction beside transformers' layer: whole prompts, steps
that read their own state, and what loaders say of their checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.model_loader import weight_utils
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import num_layer_weights
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_model import draft_model_config
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.head_models import HEADS, add_head
from sglang.test.hybrid_models import write_text_model
from sglang.test.quantized_models import (
    FOUR_BITS,
    RECIPES,
    is_whole_linear,
    quantize_folder,
)

register_cpu_ci(est_time=20, suite="cpu")

NEXT, QWEN3_5 = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"
MOE, DEEPSEEK = "Qwen3_5MoeForCausalLM", "DeepseekV3ForCausalLM"
TOLERANCE = 3e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    hidden_states: Tensor | None


def arguments(folder: Path, **flags: Any) -> ServerArgs:
    flags = {"device": "cpu", "speculative_algorithm": "NEXTN"} | flags
    return ServerArgs(model_path=str(folder), **flags)


def head_config(folder: Path, **flags: Any) -> ModelConfig:
    """What a server with these flags reads of the head."""
    target = ModelConfig.from_path(folder)
    return draft_model_config(arguments(folder, **flags), target)


def load(config: ModelConfig, load_format: str = "auto") -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "rope_rows": 256}
    return load_model(config, load_format=load_format, **options)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=TOLERANCE * scale, rtol=TOLERANCE)


def tokens_of(count: int) -> Tensor:
    return torch.randint(264, (count,), generator=torch.Generator().manual_seed(count))


class Drafter:
    """The engine's head in a harness, with the target's embedding and head."""

    def __init__(self, folder: Path, backend: str) -> None:
        config = head_config(folder)
        self.harness = ForwardHarness(
            folder,
            model_config=config,
            is_draft_worker=True,
            attention_backend=backend,
        )
        target = load(ModelConfig.from_path(folder))
        self.harness.runner.model.set_embed_and_head(*target.embed_and_head())

    def run(self, mode: ForwardMode, spans: Any, states: Tensor) -> Any:
        batch = dataclasses.replace(
            self.harness.prepare(mode, spans),
            spec_info=Spec(hidden_states=states),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            logits_rows=None,
        )
        return self.harness.run(batch)


@pytest.mark.parametrize("backend", ["cpu_native", "torch_native"])
@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_prompts_and_steps_equal_transformers(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    reference = add_head(write_text_model(tmp_path, architecture), architecture)
    drafter = Drafter(tmp_path, backend)
    prompt = tokens_of(24)
    # Slot p has token p + 1 and the target's state at p.
    ids, states = prompt[1:], reference.hidden(prompt)[:-1]
    row = drafter.harness.new_row(ids.tolist())
    kept = states.clone()
    output = drafter.run(ForwardMode.EXTEND, [(row, len(ids))], states)
    assert torch.equal(states, kept)
    logits, hidden = reference.forward(ids, states)
    assert_close(output.next_token_logits, logits)
    assert_close(output.hidden_states, hidden)
    for step in range(4):
        token = (31 * step + 5) % 264
        drafter.harness.append(row, token)
        state = output.hidden_states[-1:].clone()
        output = drafter.run(ForwardMode.DECODE, [(row, None)], state)
        ids = torch.cat((ids, torch.tensor([token])))
        states = torch.cat((states, hidden[-1:]))
        logits, hidden = reference.forward(ids, states)
        assert_close(output.next_token_logits, logits[-1:])
        assert_close(output.hidden_states, hidden[-1:])


def logits_of(folder: Path) -> Tensor:
    """The head's logits after a prompt, for some states of the target."""
    drafter, ids = Drafter(folder, "cpu_native"), tokens_of(9)
    row = drafter.harness.new_row(ids.tolist())
    states = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    output = drafter.run(ForwardMode.EXTEND, [(row, 9)], states)
    logits: Tensor = output.next_token_logits
    return logits


@pytest.mark.parametrize("scheme", ["block", "awq"])
@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        (DEEPSEEK, {"q_lora_rank": 64, "kv_lora_rank": 64}),
        (NEXT, {}),
        (MOE, {}),
    ],
)
def test_a_quantised_head_computes_with_its_values(
    tmp_path: Path, architecture: str, sizes: dict[str, int], scheme: str
) -> None:
    plain = with_head(tmp_path / "plain", architecture, **sizes)
    folder = quantize_folder(
        plain,
        tmp_path / "quantised",
        (RECIPES | FOUR_BITS)[scheme],
        chosen=is_whole_linear,
        oracle=tmp_path / "oracle",
    )
    expected = logits_of(tmp_path / "oracle")
    assert_close(logits_of(folder), expected)
    assert (logits_of(plain) - expected).abs().max() > 10 * TOLERANCE


# -- checkpoints ---------------------------------------------------------------------


def change_tensors(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def with_head(folder: Path, architecture: str, **options: Any) -> Path:
    write_text_model(folder, architecture, **options)
    add_head(folder, architecture)
    return folder


def refusal(build: Any) -> str:
    with pytest.raises(ValueError) as error:
        build()
    return str(error.value)


@pytest.mark.parametrize("architecture", [NEXT, QWEN3_5, DEEPSEEK])
def test_each_half_reads_its_own_tensors(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_head(tmp_path, architecture)
    read: list[str] = []
    original = weight_utils.read_tensor

    def note(tensors: Any, name: str, file: Path) -> Tensor:
        read.append(name)
        return original(tensors, name, file)

    monkeypatch.setattr(weight_utils, "read_tensor", note)
    load(ModelConfig.from_path(tmp_path))
    of_target = set(read)
    read.clear()
    load(head_config(tmp_path))
    of_head = set(read)
    every = set(load_file(tmp_path / "model.safetensors"))
    assert of_head and not of_head & of_target
    tied = {"lm_head.weight"} & (every - of_target)
    assert of_head | of_target | tied == every
    prefix = "model.layers.2." if architecture == DEEPSEEK else "mtp."
    assert all(name.startswith(prefix) for name in of_head)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_head_has_the_layer_of_its_target(tmp_path: Path, load_format: str) -> None:
    """It attends everything and keeps no state, and all ranks know how."""
    with_head(tmp_path, NEXT)
    config = head_config(tmp_path, load_format=load_format)
    assert config.state is None and config.attention_layers == (0,)
    assert type(load(config, load_format).layer.mlp).__name__ == "MoeFeedForward"
    assert num_layer_weights(config) > num_layer_weights(config.without_experts())


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (NEXT, "mtp.fc.weight"),
        (NEXT, "mtp.norm.weight"),
        (NEXT, "mtp.layers.0.self_attn.q_proj.weight"),
        (NEXT, "mtp.layers.0.mlp.experts.3.up_proj.weight"),
        (QWEN3_5, "mtp.pre_fc_norm_hidden.weight"),
        (DEEPSEEK, "model.layers.2.eh_proj.weight"),
        (DEEPSEEK, "model.layers.2.shared_head.norm.weight"),
        (DEEPSEEK, "model.layers.2.mlp.shared_experts.down_proj.weight"),
        (DEEPSEEK, "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"),
    ],
)
def test_missing_tensors(tmp_path: Path, architecture: str, name: str) -> None:
    with_head(tmp_path, architecture)
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    text = refusal(lambda: load(head_config(tmp_path)))
    assert name in text and str(tmp_path) in text
    assert "--speculative-algorithm NEXTN" in text


@pytest.mark.parametrize("architecture", [NEXT, DEEPSEEK])
def test_a_checkpoint_without_a_head(tmp_path: Path, architecture: str) -> None:
    """Known before the target is loaded."""
    write_text_model(tmp_path, architecture)
    first = {NEXT: "mtp.pre_fc_norm_embedding", DEEPSEEK: "model.layers.2.enorm"}
    text = refusal(lambda: head_config(tmp_path))
    assert f"tensor {first[architecture]}.weight is missing" in text
    assert "--speculative-algorithm NEXTN" in text and str(tmp_path) in text


def test_a_folder_for_the_head(tmp_path: Path) -> None:
    """Only one that holds such a head."""
    target = write_text_model(tmp_path / "target", NEXT)
    other = with_head(tmp_path / "other", NEXT)
    config = head_config(target, speculative_draft_model_path=str(other))
    assert config.path == other
    load(config)
    wrong = write_text_model(tmp_path / "llama", "LlamaForCausalLM")
    for folder in (target, wrong):
        flags = {"speculative_draft_model_path": str(folder)}
        own = with_head(tmp_path / f"own-{folder.name}", NEXT)
        text = refusal(lambda own=own, flags=flags: head_config(own, **flags))
        assert f"--speculative-draft-model-path {folder}" in text
    assert "LlamaForCausalLM" in text and QWEN3_5 in text


@pytest.mark.parametrize("architecture", [QWEN3_5, DEEPSEEK])
def test_the_first_of_several_layers(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_nextn_predict_layers": 3} if architecture == DEEPSEEK else {}
    with_head(tmp_path, architecture, **options)
    first = {QWEN3_5: "mtp.layers.{}.", DEEPSEEK: "model.layers.{}."}[architecture]
    begin = 2 if architecture == DEEPSEEK else 0

    def repeat(tensors: dict[str, Tensor]) -> None:
        own = first.format(begin)
        for name in [name for name in tensors if name.startswith(own)]:
            for number in (begin + 1, begin + 2):
                further = first.format(number) + name.removeprefix(own)
                tensors[further] = torch.full_like(tensors[name], torch.nan)

    with caplog.at_level(logging.INFO):
        expected = logits_of(tmp_path)
    assert "several layers" not in caplog.text
    change_tensors(tmp_path, repeat)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits_of(tmp_path), expected)
    assert "several layers" in caplog.text and str(tmp_path) in caplog.text


@pytest.mark.parametrize(
    ("architecture", "options", "count"),
    [(QWEN3_5, {}, 15), (MOE, {"num_experts": 256, "moe_intermediate_size": 4}, 785)],
)
def test_as_many_tensors_as_published(
    tmp_path: Path, architecture: str, options: dict[str, Any], count: int
) -> None:
    """Qwen3.5 9B and 122B-A10B."""
    with_head(tmp_path, architecture, attention_bias=False, **options)
    names = load_file(tmp_path / "model.safetensors")
    assert sum(name.startswith("mtp.") for name in names) == count
    load(head_config(tmp_path))


def test_experts_one_by_one_and_stacked(tmp_path: Path) -> None:
    """Qwen3.5 and Qwen3.6 store the experts of a head differently."""
    with_head(tmp_path, MOE)
    expected = logits_of(tmp_path)

    def stack(tensors: dict[str, Tensor]) -> None:
        block = "mtp.layers.0.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{i}.{part}.weight") for i in range(5)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{block}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{block}.down_proj"] = down

    change_tensors(tmp_path, stack)
    assert torch.equal(logits_of(tmp_path), expected)


def test_copies_of_the_target_and_unknown_tensors(tmp_path: Path) -> None:
    """DeepSeek's checkpoints repeat embedding and head. A tensor of a head that is not
    known would change its drafts."""
    with_head(tmp_path / "deepseek", DEEPSEEK)
    copies = {
        f"model.layers.2.{name}.weight": torch.full((264, 64), torch.nan)
        for name in ("embed_tokens", "shared_head.head")
    }
    change_tensors(tmp_path / "deepseek", lambda tensors: tensors.update(copies))
    load(head_config(tmp_path / "deepseek"))
    with_head(tmp_path / "qwen", QWEN3_5)
    own = {"mtp.embed_tokens.weight": torch.zeros(264, 64)}
    change_tensors(tmp_path / "qwen", lambda tensors: tensors.update(own))
    text = refusal(lambda: load(head_config(tmp_path / "qwen")))
    assert "mtp.embed_tokens.weight has no place" in text


def test_flags() -> None:
    """The head is in --model-path by default, with the tree of EAGLE."""
    args = ServerArgs(model_path="folder", speculative_algorithm="NEXTN", device="cpu")
    assert args.speculative_draft_model_path == "folder"
    shape = args.tree_shape
    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == (3, 1, 4)
    text = refusal(
        lambda: ServerArgs(model_path="folder", speculative_algorithm="EAGLE")
    )
    assert "--speculative-draft-model-path" in text
    assert "--speculative-algorithm NEXTN" in text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
