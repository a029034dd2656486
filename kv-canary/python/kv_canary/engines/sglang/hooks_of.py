"""SGLang methods that the plugin wraps, and fields that it reads."""

from __future__ import annotations

import inspect

from kv_canary.engines.hooks import AnyOf, Expectation, Hook, HookRecord, load_owner

REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_ALLOCATORS = "sglang.srt.mem_cache.allocator:"
_POOLS = "sglang.srt.mem_cache.memory_pool:"
_FREE = "slots that are given back: poison"

POOL = AnyOf(
    hooks=(
        # The only step up to 0.5.13; later `alloc_memory_pool` goes through it.
        Hook(
            owner=RUNNER,
            method="alloc_memory_pool",
            parameters=("memory_pool_config",),
            purpose="the KV pool, once it is there and nothing is captured yet",
        ),
        Hook(
            owner=RUNNER,
            method="init_memory_pool",
            parameters=("pre_model_load_memory",),
            purpose="the KV pool, once it is there and nothing is captured yet",
        ),
    )
)
FORWARD = Hook(
    owner=RUNNER,
    method="forward",
    parameters=("forward_batch",),
    purpose="requests of a forward; its findings",
)
SAMPLE = Hook(
    owner=RUNNER,
    method="sample",
    parameters=("logits_output", "forward_batch"),
    purpose="tokens that the next forward must have as inputs",
)
EXTEND = Hook(
    owner="sglang.srt.managers.schedule_batch:ScheduleBatch",
    method="prepare_for_extend",
    parameters=(),
    purpose="who gets which row of the table, and after which tokens",
)
RUN_BATCH = Hook(
    owner=_SCHEDULER,
    method="run_batch",
    parameters=("batch",),
    purpose="findings that belong to a batch's result",
)
RESULT = Hook(
    owner=_SCHEDULER,
    method="process_batch_result",
    parameters=("batch", "result"),
    purpose="tokens, before they leave the scheduler",
)
FREES = tuple(
    Hook(
        owner=_ALLOCATORS + name,
        method="free",
        parameters=("free_index",),
        purpose=_FREE,
    )
    for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
)
# 0.5.16 and later; before that every free goes through `free`.
FREE_SEGMENT = Hook(
    owner=_ALLOCATORS + "PagedTokenToKVPoolAllocator",
    method="free_segment",
    parameters=("free_index",),
    purpose=_FREE,
)
CLEARS = tuple(
    Hook(owner=hook.owner, method="clear", parameters=(), purpose=_FREE)
    for hook in FREES
)
MOVES = (
    Hook(
        owner=_POOLS + "MHATokenToKVPool",
        method="move_kv_cache",
        parameters=("tgt_loc", "src_loc"),
        purpose="accepted draft tokens that move to their places",
    ),
)
# Only for a draft model's pool, which is not checked without it.
DRAFT_EXTEND = Hook(
    owner="sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker",
    method="_draft_extend_for_decode",
    parameters=("batch", "batch_result"),
    purpose="what a draft model stores of the tokens that were accepted",
)
TAILS = "sglang.srt.speculative.eagle_utils:_eagle_prefill_tail_tokens"
"""Only in versions whose draft models store the right token at the end of a chunk."""
BATCH = HookRecord(
    owner="sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    fields=(
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "out_cache_loc",
        "positions",
        "extend_prefix_lens",
        "extend_seq_lens",
        "extend_start_loc",
        "spec_info",
        "rids",
    ),
    purpose="a forward",
)

EVERYTHING: tuple[Expectation, ...] = (
    POOL,
    FORWARD,
    SAMPLE,
    EXTEND,
    RUN_BATCH,
    RESULT,
    *FREES,
    *CLEARS,
    *MOVES,
    BATCH,
)
"""Everything that must exist, for `doctor` and before anything is wrapped."""


def is_there(hook: Hook) -> bool:
    """Whether the class itself has a method that only some versions have."""
    owner = load_owner(hook.owner)
    return inspect.getattr_static(owner, hook.method, None) is not None
