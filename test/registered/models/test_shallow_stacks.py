"""A shallow stack does all that its whole one does, in one layer of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.models.layer_kinds import one_of_each_kind
from sglang.srt.models.registry import supported_architectures
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.hybrid_models import write_text_model
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=25, suite="cpu")

LAYERS = 6
STACKS = [name for name in supported_architectures() if name != "MockForCausalLM"]
# Layers of each family that differ, the first one always.
KINDS = {
    "DeepseekV2ForCausalLM": {0, 1},
    "Gemma3ForCausalLM": {0, 1, 2},
    # The first, attention and a state.
    "Lfm2ForCausalLM": {0, 1, 2},
    "LlamaForCausalLM": {0, 1},
    # A dense layer, attention, and a state with experts.
    "Qwen3NextForCausalLM": {0, 1, 2, 3},
}


class Ops(TorchDispatchMode):
    """Operators with all of their arguments but the values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Hashable] = set()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found.add((func.name(), repr(tree_map(_shape, (args, kwargs)))))
        self.count += 1
        return func(*args, **(kwargs or {}))


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value


@pytest.fixture(scope="module", params=STACKS)
def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ForwardHarness:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_text_model(folder, request.param, num_hidden_layers=LAYERS)
    return ForwardHarness(model, attention_backend="torch_native", kv_canary="none")


def ops_of(harness: ForwardHarness, mode: ForwardMode, end: int | None) -> Ops:
    row = harness.new_row(list(range(9)))
    if mode is ForwardMode.DECODE:
        harness.extend([(row, 7)])
    batch = harness.prepare(mode, [(row, end)])
    with Ops() as ops:  # type: ignore[no-untyped-call]
        harness.run(batch)
    harness.release(row)
    return ops


@pytest.mark.parametrize(
    ("mode", "end"), [(ForwardMode.EXTEND, 9), (ForwardMode.DECODE, None)]
)
def test_no_operator_is_left_out(
    harness: ForwardHarness, mode: ForwardMode, end: int | None
) -> None:
    ops_of(harness, mode, end)  # after which nothing is allocated for good
    whole = ops_of(harness, mode, end)
    model = harness.runner.model
    with model.shallow():
        with model.shallow():
            pass
        shallow = ops_of(harness, mode, end)
    assert shallow.found == whole.found
    assert shallow.count < whole.count
    assert ops_of(harness, mode, end).count == whole.count


def test_inputs_of_layers_are_captured_all_the_same(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=LAYERS)
    harness = ForwardHarness(model, attention_backend="torch_native", kv_canary="none")
    harness.runner.model.capture_layers([0, 3, LAYERS])
    shapes = []
    for scope in (nullcontext, harness.runner.model.shallow):
        row = harness.new_row(list(range(9)))
        batch = harness.prepare(ForwardMode.EXTEND, [(row, 9)])
        batch = dataclasses.replace(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        with scope():
            hidden = harness.run(batch).hidden_states
        assert hidden is not None
        shapes.append(hidden.shape)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", KINDS)
def test_one_layer_of_each_kind_runs(tmp_path: Path, name: str) -> None:
    model = write_text_model(tmp_path, name, num_hidden_layers=LAYERS)
    layers = list(ForwardHarness(model).runner.model.model.layers)
    assert one_of_each_kind(layers) == KINDS[name]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
