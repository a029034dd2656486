"""Rehearses engines with drafts without a GPU; run by test_kernels_ahead, which names a
folder whose `target` is a hybrid model with a head.

Data on the CPU goes to Triton's kernels, all of which are left out: torch checks that
every index that they would have written is in range.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kv_canary import op

# Before the first op is made.
_source = op._source
op._source = lambda *of: _source(*of).replace("_on_cpu(", "_on_cuda(", 1)
op._triton._reason, op._triton._probe = "", None

from kv_canary.runtime import runtime  # noqa: E402
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.forward.graph_capture import RehearsalBackend  # noqa: E402
from sglang.srt.managers.scheduler.warm_up import compile_ahead  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.utils import kernels_ahead  # noqa: E402
from sglang.test.harness import EngineHarness  # noqa: E402
from sglang.test.scale import is_full  # noqa: E402
from sglang.test.tiny_models import write_tiny_eagle, write_tiny_model  # noqa: E402

SIZES = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 256}
ITERATION = {
    *("draft_kernel", "top_k_kernel", "select_kernel", "build_kernel"),
    *("greedy_kernel", "gather_kernel", "tail_kernel"),
}
TREES = {
    *("accepted_moves_kernel", "ancestors_kernel"),
    *("branch_table_kernel", "move_kv_kernel"),
}
CANARY = {"before_kernel", "accepted_kernel", "carried_kernel", "drawn_kernel"}
STATES = {
    *("conv_kernel", "prepare_kernel", "scan_kernel", "commit_kernel", "copy_kernel"),
    *("shifts_kernel", "check_states_kernel", "note_states_kernel"),
}


class TargetAlone:
    """The properties that Triton asks of its driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Taken:
    """Takes kernels as `Workers` does, and compiles none."""

    names: set[str]

    def __init__(self, work: object) -> None:
        Taken.names = set()

    def give(self, task: bytes) -> None:
        kernel, *_ = pickle.loads(task)
        self.names.add(kernel.__name__)

    def finish(self) -> None:
        pass


def rehearsed(folder: Path, **flags: Any) -> set[str]:
    """Names of the kernels that are compiled for an engine."""
    engine = EngineHarness(
        folder / "target",
        device="cpu",
        attention_backend="triton",
        dtype="bfloat16",
        max_total_tokens=4096,
        max_running_requests=4,
        chunked_prefill_size=64,
        skip_tokenizer_init=True,
        speculative_num_steps=3,
        **flags,
    )
    kernels_ahead.Workers = Taken  # type: ignore[assignment, misc]
    worker = engine.scheduler.worker
    worker.model_runner.compiles_ahead = True
    compile_ahead(engine.server_args, worker)
    return Taken.names


def sizes_of(runner: ModelRunner) -> list[int]:
    return [1, 4] if runner.make_backend is RehearsalBackend else []


def main() -> None:
    driver.set_active(TargetAlone())
    # Memory of the CPU stands for a GPU's here.
    runtime.check_native_kernels = lambda: None
    backend = ATTENTION_BACKENDS["triton"]
    ATTENTION_BACKENDS["triton"] = replace(backend, devices=("cpu", "cuda"))
    ModelRunner.graph_sizes = sizes_of  # type: ignore[method-assign]
    ModelRunner.prefill_graph_token_counts = sizes_of  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp())
    target = write_tiny_model(folder / "target", "LlamaForCausalLM", **SIZES)
    write_tiny_eagle(folder / "draft", target, algorithm="EAGLE3")
    head = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(folder / "draft"),
    }
    found = rehearsed(folder, **head, speculative_eagle_topk=1)
    assert found >= ITERATION, ITERATION - found
    assert not found & CANARY
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    wanted = ITERATION | TREES | CANARY
    if is_full():  # The hybrid's are these, and more.
        found = rehearsed(folder, **head, **tree, kv_canary="raise")
        assert found >= wanted, wanted - found
    inside = {"speculative_algorithm": "NEXTN"}
    found = rehearsed(Path(sys.argv[1]), **inside, **tree, kv_canary="raise")
    wanted |= STATES
    assert found >= wanted, wanted - found
    print(f"{len(found)} kernels are compiled for trees")


main()
