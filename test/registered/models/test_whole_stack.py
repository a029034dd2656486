"""Stacks that run as one operator: the same bits as layer by layer, the models that are
covered, and a canary that sees what the operator is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.layers.ops.decoder_stack import StackRun
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.hybrid_models import write_text_model
from sglang.test.spec_canary_traffic import worker_of
from sglang.test.tiny_models import FAMILIES, write_tiny_eagle, write_tiny_model

register_cpu_ci(est_time=20, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
COVERED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
PROMPT = list(range(7, 40))


def backend_of(harness: ForwardHarness | EngineHarness) -> PagedAttnBackend:
    runner = (
        harness.runner
        if isinstance(harness, ForwardHarness)
        else harness.scheduler.worker.model_runner
    )
    backend = runner.attn_backend
    assert isinstance(backend, PagedAttnBackend)
    return backend


def counted(backend: PagedAttnBackend) -> list[int]:
    """The tokens of each call of the operator, from now on."""
    run, calls = backend.stack_op, []
    assert run is not None

    def call(plan: Any, x: Tensor, **args: Any) -> StackRun:
        calls.append(len(x))
        return run(plan, x, **args)

    backend.stack_op = call
    return calls


def logits_of(folder: Path, *, page_size: int, whole: bool) -> tuple[Tensor, list[int]]:
    """Logits of a prefill in chunks and of a few decodes, and the operator's calls."""
    harness = ForwardHarness(folder, page_size=page_size)
    backend = backend_of(harness)
    calls = counted(backend)
    if not whole:
        backend.stack_op = None
    rows = [harness.new_row(PROMPT), harness.new_row(PROMPT[:5])]
    found = [harness.extend([(rows[0], 16)]), harness.extend([(rows[0], 33)])]
    found.append(harness.extend([(rows[1], 5)]))
    for step in range(3):
        for row in rows:
            harness.append(row, 9 * step + row)
        found.append(harness.forward(ForwardMode.DECODE, [(r, None) for r in rows]))
    return torch.cat(found), calls


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", [*FAMILIES, "Lfm2ForCausalLM"])
def test_logits_are_the_same_bits(tmp_path: Path, name: str, page_size: int) -> None:
    folder = write_text_model(tmp_path, name)
    whole, calls = logits_of(folder, page_size=page_size, whole=True)
    layers, none = logits_of(folder, page_size=page_size, whole=False)
    assert torch.equal(whole, layers)
    assert not none
    assert calls == ([16, 17, 5, 2, 2, 2] if name in COVERED else [])


def captured_inputs(folder: Path, layers: list[int], *, whole: bool) -> Tensor:
    harness = ForwardHarness(folder)
    backend = backend_of(harness)
    calls = counted(backend)
    if not whole:
        backend.stack_op = None
    model = harness.runner.model
    assert isinstance(model, LlamaForCausalLM)
    model.capture_layers(layers)
    batch = harness.prepare(ForwardMode.EXTEND, [(harness.new_row(PROMPT), 33)])
    full = dataclasses.replace(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
    found = harness.run(full).hidden_states
    assert calls == ([33] if whole else [])
    assert found is not None
    return found


@pytest.mark.parametrize("layers", [[0], [1, 2], [0, 1, 2]])
def test_captured_inputs_are_the_same_bits(tmp_path: Path, layers: list[int]) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    whole = captured_inputs(folder, layers, whole=True)
    assert torch.equal(whole, captured_inputs(folder, layers, whole=False))
    assert whole.shape[0] == 33
    assert not whole.shape[1] % len(layers)


class Speculating:
    """An engine with a tiny target and a tiny head; the tokens of each call of the
    operator, in both models."""

    def __init__(self, folder: Path, algorithm: str, *, whole: bool) -> None:
        target = write_tiny_model(folder / "target", "LlamaForCausalLM")
        head = write_tiny_eagle(folder / "head", target, algorithm=algorithm)
        self.harness = EngineHarness(
            target,
            max_total_tokens=512,
            kv_canary="raise",
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(head),
            speculative_num_steps=3,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=4,
        )
        worker = worker_of(self.harness)
        drafts = worker.draft_worker.draft_runner.attn_backend
        assert isinstance(drafts, PagedAttnBackend)
        backends = backend_of(self.harness), drafts
        self.calls = [counted(backend) for backend in backends]
        self.relay = worker.draft_worker.relay
        if not whole:
            for backend in backends:
                backend.stack_op = None

    def run(self) -> tuple[list[list[int]], Tensor]:
        """Answers, and the last state and proposals of the draft."""
        for i, length in enumerate((33, 5)):
            self.harness.submit(PROMPT[:length], rid=f"q{i}", max_new_tokens=12)
        answers = self.harness.run()
        rows = torch.arange(3)
        candidates, hidden = self.relay.gather(rows)
        assert hidden is not None
        last = torch.cat((candidates.probs, candidates.ids, hidden), dim=-1)
        return [answers[rid].output_ids for rid in sorted(answers)], last


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_heads_draft_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    engines = {
        whole: Speculating(tmp_path / str(whole), algorithm, whole=whole)
        for whole in (True, False)
    }
    (answers, last), (due, due_last) = (engine.run() for engine in engines.values())
    assert answers == due
    assert torch.equal(last, due_last)
    assert bool(last.any())
    # Of verifications and extends of two requests, and of their chains' steps.
    assert [8 in calls for calls in engines[True].calls] == [True, True]
    assert 2 in engines[True].calls[1]
    assert engines[False].calls == [[], []]


def swapped(args: dict[str, Any]) -> dict[str, Any]:
    return {"k_caches": args["k_caches"][::-1]}


def with_copy(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {name: args[name].clone()}


FAULTS = {
    "K of other layers": (swapped, "over other K or V"),
    **{
        name: (with_copy(name), f"another {name}")
        for name in (
            "positions",
            "out_cache_loc",
            "page_table",
            "row_index",
            "read_lens",
        )
    },
}


def decoding(folder: Path) -> EngineHarness:
    harness = EngineHarness(folder, max_total_tokens=512, kv_canary="raise")
    harness.submit(PROMPT, rid="q", max_new_tokens=20, ignore_eos=True)
    for _ in range(3):
        harness.scheduler.step()
    return harness


@pytest.mark.parametrize("name", FAULTS)
def test_the_canary_sees_a_call_that_differs(tmp_path: Path, name: str) -> None:
    change, message = FAULTS[name]
    harness = decoding(write_tiny_model(tmp_path, "LlamaForCausalLM"))
    backend = backend_of(harness)
    run = backend.stack_op
    assert run is not None

    def faulty(*inputs: Any, **args: Any) -> StackRun:
        return run(*inputs, **(args | change(args)))

    backend.stack_op = faulty
    with pytest.raises(RuntimeError, match=f"KV canary: .*{message}"):
        harness.run()


def test_the_canary_misses_an_operator_that_does_not_run(tmp_path: Path) -> None:
    harness = decoding(write_tiny_model(tmp_path, "LlamaForCausalLM"))
    backend_of(harness).stack_op = lambda plan, x, **args: StackRun(x, [])
    with pytest.raises(RuntimeError, match="KV canary: 0 layers stored K and V"):
        harness.run()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
