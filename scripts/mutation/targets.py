"""The modules to plant faults in, by area, and the tests of each area."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kv_canary.faults.fault import FaultPlace

REPO = Path(__file__).resolve().parents[2]
TESTS = "test/registered/"
PLAIN, SPEC, BOTH = "plain", "spec", "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Modules that do one part of the work, to plant one-line faults in.

    Fields:
        place: name of the part in the catalogue of faults.
        modules: names below `prefix`.
        worlds: kinds of engines that run them; if empty, no engine is run for a fault.
        tests: files below `TESTS`, each taking at most about 20 s.
    """

    place: FaultPlace
    modules: tuple[str, ...]
    worlds: str
    tests: tuple[str, ...]
    prefix: str = "sglang.srt."

    @property
    def name(self) -> str:
        return self.place.value

    @property
    def names(self) -> list[str]:
        return [self.prefix + module for module in self.modules]


MEMORY_TESTS = (
    "mem_cache/test_allocator.py",
    "mem_cache/test_memory_pool.py",
    "mem_cache/test_radix_cache.py",
    "mem_cache/test_request_memory.py",
)
SCHEDULER_TESTS = (
    "scheduler/test_scheduler.py",
    "scheduler/test_scheduler_properties.py",
    "scheduler/test_schedule_policy.py",
    "scheduler/test_input_embeds.py",
    "scheduler/test_admission.py",
    "scheduler/test_admission_engine.py",
    "scheduler/test_stall_check.py",
    "scheduler/test_wasted_step.py",
    "scheduler/test_chunk_abort.py",
    "scheduler/test_chunk_retraction.py",
    "scheduler/test_lost_grammar.py",
    "mock_model/test_canary_soak.py",
)
# Different decisions replay differently; a healed request goes through all of it.
AGAIN_TESTS = (
    "kv_canary/test_heal_cases.py",
    "kv_canary/test_replay.py",
    "kv_canary/test_replay_records.py",
)
# Planted faults between the sampler and the client.
RESULT_TESTS = (
    "kv_canary/test_hole_injectors.py",
    "kv_canary/test_spec_hole_injectors.py",
)
TREE_TESTS = (
    "spec/test_tree_ops.py",
    "spec/test_tree_ops_slots.py",
    "spec/test_tree_ops_verify.py",
    "attention/test_branch_lists.py",
)
SPEC_TESTS = (
    "mock_model/test_e2e_spec_eagle.py",
    "mock_model/test_spec_canary_soak.py",
    "spec/test_node_history.py",
    "spec/test_spec_features.py",
)
# Pools with window slots, and the attention that reads them.
WINDOW_TESTS = (
    "mem_cache/test_group_memory.py",
    "kv_canary/test_window_canary.py",
    "mock_model/test_window_soak.py",
)
# Files of the canary's torch references, which import each other.
REFERENCES = (
    *("accepted", "before", "carried", "ends", "hash", "notes", "records", "report"),
    *("rows", "verify", "write"),
)
CORE_TESTS = (
    "kv_canary/test_canary_kernels.py",
    "kv_canary/test_canary_properties.py",
    "kv_canary/test_canary_records.py",
    "kv_canary/test_canary_reads.py",
    "kv_canary/test_canary_writes.py",
    "kv_canary/test_canary_trees.py",
    "kv_canary/test_canary_requests.py",
    "kv_canary/test_canary_carried.py",
    "kv_canary/test_canary_diagnoses.py",
    "kv_canary/test_self_unit_report_order.py",
    "kv_canary/test_self_unit_violation.py",
    "kv_canary/test_self_unit_reports.py",
    "kv_canary/test_self_unit_explain.py",
    "kv_canary/test_self_unit_sweep.py",
)

AREAS = (
    Area(
        place=FaultPlace.MEMORY,
        modules=(
            "mem_cache.allocator",
            "mem_cache.base_prefix_cache",
            "mem_cache.common",
            "mem_cache.memory_pool",
            "mem_cache.ops",
            "mem_cache.page_ledger",
            "mem_cache.radix_cache",
            "mem_cache.tree_node",
        ),
        worlds=BOTH,
        tests=MEMORY_TESTS + SCHEDULER_TESTS + WINDOW_TESTS,
    ),
    Area(
        place=FaultPlace.BATCH,
        modules=(
            "managers.batch.req",
            "managers.batch.schedule_batch",
            "managers.scheduler.schedule_policy",
        ),
        worlds=BOTH,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1],
    ),
    Area(
        place=FaultPlace.SCHEDULER,
        modules=(
            "managers.scheduler",
            "managers.scheduler.batch_selector",
            "managers.scheduler.request_intake",
            "managers.scheduler.retraction",
        ),
        worlds=BOTH,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1],
    ),
    Area(
        place=FaultPlace.RESULTS,
        modules=(
            "managers.scheduler.result_processor",
            "managers.batch.forward_result",
        ),
        worlds=BOTH,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1] + RESULT_TESTS,
    ),
    Area(
        place=FaultPlace.PUBLISHING,
        modules=("managers.worker.tp_worker",),
        worlds=BOTH,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1] + RESULT_TESTS,
    ),
    Area(
        place=FaultPlace.RELAY,
        modules=(
            "draft_trees.relay",
            "draft_trees.workspace",
            "speculative.eagle_worker_v2",
            "speculative.eagle_draft_worker",
            "draft_trees.draft_input",
        ),
        worlds=SPEC,
        tests=(
            *SPEC_TESTS,
            "attention/test_flashinfer_spec.py",
            "graph/test_memory_plan.py",
        ),
    ),
    Area(
        place=FaultPlace.TREE,
        modules=(
            "speculative.eagle_utils",
            "draft_trees.buffers",
            "draft_trees.ops.tree.op",
            "draft_trees.ops.verify.op",
        ),
        worlds=SPEC,
        tests=TREE_TESTS[:1] + TREE_TESTS[2:3] + SPEC_TESTS + RESULT_TESTS[1:],
    ),
    Area(
        place=FaultPlace.BRANCHES,
        modules=(
            "mem_cache.ops.branch_slots.op",
            "mem_cache.draft_region",
            "configs.draft_layout",
        ),
        worlds=SPEC,
        tests=(
            TREE_TESTS[1],
            TREE_TESTS[3],
            "spec/test_draft_region.py",
            *SPEC_TESTS,
        ),
    ),
    Area(
        place=FaultPlace.ATTENTION,
        modules=("layers.attention.paged_backend", "layers.attention.branch_lists"),
        worlds=BOTH,
        tests=(
            TREE_TESTS[3],
            "kv_canary/test_attention_calls.py",
            SCHEDULER_TESTS[2],
            *SPEC_TESTS,
            *WINDOW_TESTS,
        ),
    ),
    Area(
        place=FaultPlace.CORE,
        prefix="kv_canary.",
        modules=(
            "canary",
            "checks",
            "diagnosis",
            "explain",
            "findings",
            *(f"kernels.reference.{name}" for name in REFERENCES),
            "launches",
            "layout",
            "records",
            "reporter",
            "serials",
            "state",
            "sweep",
            "view",
            "violation",
        ),
        worlds="",
        tests=CORE_TESTS,
    ),
)
CANARY_REFERENCES = tuple(f"kv_canary.kernels.reference.{name}" for name in REFERENCES)
# If a native kernel does the work, a fault only acts in the torch reference.
WITH_REFERENCES = {
    "sglang.srt.mem_cache.ops.branch_slots.op",
    "sglang.srt.draft_trees.ops.tree.op",
    "sglang.srt.draft_trees.ops.verify.op",
}
# The ops that call into a module, which may be in other modules.
CALLERS = dict.fromkeys(CANARY_REFERENCES, CANARY_REFERENCES) | {
    "sglang.srt.configs.draft_layout": ("sglang.srt.mem_cache.ops.branch_slots.op",),
}


def find_references(module: str) -> tuple[str, ...]:
    """Return the modules whose ops must run their references for a fault in
    `module`.
    """
    own = (module,) if module in WITH_REFERENCES else ()
    return own + CALLERS.get(module, ())


def module_path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin)


def short_path(module: str) -> str:
    """Return the module's file relative to the repository's root."""
    return module_path(module).relative_to(REPO).as_posix()
