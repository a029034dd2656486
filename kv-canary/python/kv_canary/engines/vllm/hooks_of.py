"""vLLM methods that the plugin wraps, and fields that it reads."""

from __future__ import annotations

from kv_canary.engines.hooks import Expectation, Hook, HookRecord

V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_OUTPUT = "vllm.v1.core.sched.output:"

# Its `init_worker` is too early: workers in their own processes load plugins there.
INIT_DEVICE = Hook(
    owner="vllm.v1.worker.worker_base:WorkerWrapperBase",
    method="init_device",
    parameters=(),
    purpose="attach in the processes that have a worker, and in no other",
)
# In the scheduler's process: its messages to workers leave the salt out.
NEW_REQUEST = Hook(
    owner=_OUTPUT + "NewRequestData",
    method="from_request",
    parameters=("request", "block_ids"),
    purpose="the cache salt of a request that begins",
)
CONNECTOR = Hook(
    owner="vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
    method="create_connector",
    parameters=("config", "role", "kv_cache_config"),
    purpose="connectors: what they load is compared before it is read",
)
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
UPDATE = Hook(
    owner=_SCHEDULER,
    method="update_from_output",
    parameters=("scheduler_output", "model_runner_output"),
    purpose="KV_CANARY=heal: requests whose KV is damaged are computed again",
)
FAILED_LOADS = Hook(
    owner=_SCHEDULER,
    method="_handle_invalid_blocks",
    parameters=("invalid_block_ids",),
    purpose="connectors: requests that are turned back discard the steps that run",
)
HEALING = (
    UPDATE,
    Hook(
        owner=_SCHEDULER,
        method="reset_prefix_cache",
        parameters=("reset_running_requests",),
        purpose="KV_CANARY=heal calls it: all running requests begin again",
    ),
    Hook(
        owner=_SCHEDULER,
        method="_preempt_request",
        parameters=("request", "timestamp", "drop_stale_output"),
        purpose="KV_CANARY=heal: it discards the output of steps that have begun",
    ),
    Hook(
        owner=_SCHEDULER,
        method="finish_requests",
        parameters=("request_ids", "finished_status"),
        purpose="KV_CANARY=heal calls it: a request that stays damaged ends",
    ),
)
"""What mode `heal` needs; `reset_prefix_cache` calls `_preempt_request`."""
_POOL = "the KV pool, once it is there"
_STEP = "blocks and requests of a step; the end of its forward"
_TOKENS = "the step's tokens, before they leave the worker"
_SAMPLED = "the sampled tokens, with which the next inputs are compared"

V1_HOOKS = {
    "pool": Hook(
        owner=V1,
        method="initialize_kv_cache",
        parameters=("kv_cache_config", "is_profiling"),
        purpose=_POOL,
    ),
    "step": Hook(
        owner=V1,
        method="execute_model",
        parameters=("scheduler_output", "intermediate_tensors"),
        purpose=_STEP,
    ),
    "forward": Hook(
        owner=V1,
        method="_model_forward",
        parameters=("input_ids", "positions"),
        purpose="tables, slots and inputs that the model is about to get",
    ),
    "tokens": Hook(
        owner=V1,
        method="sample_tokens",
        parameters=("grammar_output",),
        purpose=_TOKENS,
    ),
    "sampled": Hook(
        owner=V1,
        method="_sample",
        parameters=("logits", "spec_decode_metadata"),
        purpose=_SAMPLED,
    ),
}
V2_HOOKS = {
    "pool": Hook(
        owner=V2,
        method="initialize_kv_cache",
        parameters=("kv_cache_config",),
        purpose=_POOL,
    ),
    "step": Hook(
        owner=V2,
        method="execute_model",
        parameters=("scheduler_output", "intermediate_tensors", "dummy_run"),
        purpose=_STEP,
    ),
    "forward": Hook(
        owner=V2,
        method="prepare_attn",
        parameters=("input_batch",),
        purpose="tables, slots and inputs that the model is about to get",
    ),
    "tokens": Hook(
        owner=V2,
        method="sample_tokens",
        parameters=("grammar_output",),
        purpose=_TOKENS,
    ),
    "sampled": Hook(
        owner=V2,
        method="sample",
        parameters=("hidden_states", "input_batch", "grammar_output"),
        purpose=_SAMPLED,
    ),
}
V2_LOADS = Hook(
    owner="vllm.v1.worker.gpu.kv_connector:ActiveKVConnector",
    method="pre_forward",
    parameters=("scheduler_output",),
    purpose="the moment when a step's blocks are loaded",
)
# Wrapped on the runner's own object, which may be of another class.
V2_STATES = Hook(
    owner="vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
    method="prepare_attn",
    parameters=("input_batch", "cudagraph_mode", "block_tables"),
    purpose="the blocks that layers of recurrent states get",
)
RECORDS = (
    HookRecord(
        owner=_OUTPUT + "SchedulerOutput",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "kv_cache_block_copies",
        ),
        purpose="a step",
    ),
    HookRecord(
        owner=_OUTPUT + "NewRequestData",
        fields=(
            "req_id",
            "prompt_token_ids",
            "prefill_token_ids",
            "prompt_embeds",
            "block_ids",
            "num_computed_tokens",
            "lora_request",
        ),
        purpose="a request that begins",
    ),
    HookRecord(
        owner=_OUTPUT + "CachedRequestData",
        fields=(
            "req_ids",
            "resumed_req_ids",
            "all_token_ids",
            "new_block_ids",
            "num_computed_tokens",
        ),
        purpose="requests that go on",
    ),
    HookRecord(
        owner="vllm.v1.kv_cache_interface:KVCacheConfig",
        fields=("num_blocks", "kv_cache_groups"),
        purpose="groups of layers",
    ),
)
FORWARD_CONTEXT = "vllm.forward_context"

EVERYTHING: tuple[Expectation, ...] = (
    INIT_DEVICE,
    NEW_REQUEST,
    CONNECTOR,
    FAILED_LOADS,
    *V1_HOOKS.values(),
    *V2_HOOKS.values(),
    V2_LOADS,
    *RECORDS,
)
"""All of these, for `doctor` and before anything is wrapped."""
