"""The areas of the work: their modules, the engines that run them, and their tests."""

from __future__ import annotations

from kv_canary.faults.fault import FaultPlace
from scripts.mutation.targets import REFERENCES, Area, Kind

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
STATE_TESTS = (
    "mem_cache/test_state_memory.py",
    "mem_cache/test_state_sizes.py",
    "models/test_state_parity.py",
    "models/test_state_trees.py",
    "mock_model/test_state_soak.py",
)
SAMPLER_TESTS = (
    "sampling/test_sampler.py",
    "sampling/test_penalties.py",
    "sampling/test_sampling_batch_info.py",
    "sampling/test_sampling_distribution.py",
    "sampling/test_logprobs.py",
)
GRAMMAR_TESTS = (
    "scheduler/test_lost_grammar.py",
    "constrained/test_grammar.py",
    "constrained/test_grammar_manager.py",
)
HEALING_TESTS = (
    "kv_canary/test_heal_cases.py",
    "kv_canary/test_heal_host.py",
    "kv_canary/test_heal_windows.py",
    "kv_canary/test_hole_injectors.py",
    "scheduler/test_blame.py",
    "mock_model/test_heal_canary_soak.py",
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
            "mem_cache.chunk_cache",
            "mem_cache.common",
            "mem_cache.groups.runs",
            "mem_cache.groups.slots",
            "mem_cache.groups.window_runs",
            "mem_cache.groups.window_slots",
            "mem_cache.memory_pool",
            "mem_cache.mla_memory_pool",
            "mem_cache.ops.move_kv.op",
            "mem_cache.page_ledger",
            "mem_cache.radix_cache",
            "mem_cache.tree_node",
        ),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.LAYOUT,
        tests=MEMORY_TESTS + SCHEDULER_TESTS + WINDOW_TESTS,
    ),
    Area(
        place=FaultPlace.BATCH,
        modules=(
            "managers.batch.req",
            "managers.batch.req_parts",
            "managers.batch.schedule_batch",
            "managers.scheduler.schedule_policy",
        ),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.LAYOUT,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1],
    ),
    Area(
        place=FaultPlace.SCHEDULER,
        modules=(
            "managers.scheduler.scheduler",
            "managers.scheduler.batch_selector",
            "managers.scheduler.request_intake",
            "managers.scheduler.retraction",
        ),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.RANKS,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1],
    ),
    Area(
        place=FaultPlace.RESULTS,
        modules=(
            "managers.scheduler.result_processor",
            "managers.batch.forward_result",
        ),
        worlds=Kind.PLAIN | Kind.SPEC,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1] + RESULT_TESTS,
    ),
    Area(
        place=FaultPlace.PUBLISHING,
        modules=("managers.worker.tp_worker",),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.SAMPLING,
        tests=SCHEDULER_TESTS + AGAIN_TESTS + SPEC_TESTS[:1] + RESULT_TESTS,
    ),
    Area(
        place=FaultPlace.RELAY,
        modules=(
            "draft_trees.relay",
            "draft_trees.workspace",
            "speculative.eagle_worker_v2",
            "speculative.eagle_draft_worker",
            "speculative.eagle_draft_phase",
            "speculative.eagle_draft_extend",
            "speculative.eagle_catch_up",
            "draft_trees.draft_input",
        ),
        worlds=Kind.SPEC,
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
        worlds=Kind.SPEC,
        tests=TREE_TESTS[:1] + TREE_TESTS[2:3] + SPEC_TESTS + RESULT_TESTS[1:],
    ),
    Area(
        place=FaultPlace.BRANCHES,
        modules=(
            "mem_cache.ops.branch_slots.op",
            "mem_cache.draft_region",
            "configs.draft_layout",
        ),
        worlds=Kind.SPEC,
        tests=(
            TREE_TESTS[1],
            TREE_TESTS[3],
            "spec/test_draft_region.py",
            "spec/test_exact_ancestors.py",
            *SPEC_TESTS,
        ),
    ),
    Area(
        place=FaultPlace.ATTENTION,
        modules=(
            "layers.attention.paged_backend",
            "layers.attention.branch_lists",
            "layers.attention.window_tables",
        ),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.LAYOUT,
        tests=(
            TREE_TESTS[3],
            "kv_canary/test_attention_calls.py",
            SCHEDULER_TESTS[2],
            *SPEC_TESTS,
            *WINDOW_TESTS,
        ),
    ),
    Area(
        place=FaultPlace.STATES,
        modules=(
            "managers.batch.state_plans",
            "mem_cache.groups.state_runs",
            "mem_cache.groups.state_slots",
            "mem_cache.ops.copy_slots.op",
            "mem_cache.state_pool",
            "model_executor.state_memory",
            "layers.state.forward",
            "layers.state.layer",
        ),
        worlds=Kind.STATE,
        tests=STATE_TESTS,
    ),
    Area(
        place=FaultPlace.TIERS,
        modules=(
            "kv_tiers.host_pool",
            "kv_tiers.loads",
            "kv_tiers.mover",
            "kv_tiers.places",
            "kv_tiers.source",
            "kv_tiers.tiers",
            "kv_tiers.unit",
            "managers.scheduler.tier_loads",
        ),
        worlds=Kind.TIERS,
        tests=(
            "kv_tiers/test_units.py",
            "kv_tiers/test_tier_engines.py",
            "kv_tiers/test_tier_soak.py",
        ),
    ),
    Area(
        place=FaultPlace.LOGITS,
        modules=("forward.batch", "layers.logits_processor"),
        worlds=Kind.PLAIN | Kind.SPEC | Kind.SAMPLING,
        tests=(
            "models/test_logits_processor.py",
            "attention/test_flashinfer_plan.py",
            *SAMPLER_TESTS,
            *SPEC_TESTS,
            *SCHEDULER_TESTS[:2],
            *RESULT_TESTS,
        ),
    ),
    Area(
        place=FaultPlace.SAMPLING,
        modules=(
            "sampling.ops.choose_tokens.op",
            "sampling.ops.divide_rows.op",
            "sampling.ops.draw.op",
            "sampling.ops.keep_prefix.op",
            "sampling.ops.noise",
            "sampling.ops.row_ops",
            "sampling.ops.softmax_rows.op",
            "sampling.penalties",
            "sampling.sampler",
            "sampling.sampling_batch_info",
            "sampling.vocab_mask",
        ),
        worlds=Kind.SAMPLING | Kind.GRAMMAR,
        tests=(*SAMPLER_TESTS, "spec/test_spec_sampling.py", *GRAMMAR_TESTS[:1]),
    ),
    Area(
        place=FaultPlace.GRAMMAR,
        modules=(
            "constrained.grammar_manager",
            "constrained.tree_masks",
            "managers.worker.grammar_masks",
            "managers.scheduler.grammar_queue",
        ),
        worlds=Kind.GRAMMAR,
        tests=(*GRAMMAR_TESTS, "spec/test_spec_features.py"),
    ),
    Area(
        place=FaultPlace.STREAMING,
        modules=(
            "managers.front.output_check",
            "managers.front.output_text",
            "managers.front.request_state",
            "managers.messages.output_digest",
            "managers.scheduler.output_streamer",
            "utils.detokenizer",
            "utils.text_stops",
        ),
        worlds=Kind.FRONT,
        tests=(
            "front/test_output_check.py",
            "front/test_output_share.py",
            "front/test_output_text.py",
            "front/test_tokenizer.py",
            "front/test_tokenizer_manager.py",
            "scheduler/test_scheduler.py",
        ),
    ),
    Area(
        place=FaultPlace.HEALING,
        modules=(
            "managers.scheduler.blame",
            "managers.scheduler.canary_gate",
            "managers.scheduler.heal_check",
            "managers.scheduler.healer",
            "managers.scheduler.result_faults",
            "managers.scheduler.step_check",
            "mem_cache.quarantine",
        ),
        worlds=Kind.HEAL,
        tests=HEALING_TESTS,
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
        worlds=Kind(0),
        tests=CORE_TESTS,
    ),
)
