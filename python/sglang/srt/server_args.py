"""The server's configuration: every flag, its default, and the order of resolution.

A field is declared once; the command line is generated from it. `__post_init__` runs
the ordered `_handle_*` steps; afterwards the object is read-only. Configuration errors
are `ValueError`s that name the flag, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Annotated, Any

from sglang.srt.arg_groups.adaptive_hook import draft_ladder, handle_adaptive
from sglang.srt.arg_groups.arg_parser import (
    Arg,
    FlagParser,
    add_fields,
    check_values,
    from_namespace,
    settle_choices,
)
from sglang.srt.arg_groups.canary_hook import KV_CANARY_MODES, handle_kv_canary
from sglang.srt.arg_groups.config_file import CONFIG_FLAG, read_config
from sglang.srt.arg_groups.cuda_graph_hook import (
    DECODE_GRAPH_KINDS,
    DECODE_GRAPHS,
    PREFILL_GRAPH_KINDS,
    PREFILL_GRAPHS,
    handle_cuda_graph,
    handle_graph_phases,
    has_prefill_graphs,
)
from sglang.srt.arg_groups.http_hook import handle_http
from sglang.srt.arg_groups.kv_events_hook import handle_kv_events
from sglang.srt.arg_groups.lora_hook import (
    LORA_BACKENDS,
    handle_lora,
    settle_lora_paths,
)
from sglang.srt.arg_groups.memory_hook import (
    handle_attention_backend,
    handle_memory,
    handle_scheduling,
    handle_states,
)
from sglang.srt.arg_groups.model_hook import handle_model
from sglang.srt.arg_groups.speculative_hook import handle_speculative
from sglang.srt.arg_groups.synonyms import (
    FP8_GEMM_BACKENDS,
    GRAMMAR_BACKENDS,
    KV_DTYPE_NAMES,
    SAMPLING_BACKENDS,
    check_token_oracle,
)
from sglang.srt.arg_groups.tiers_hook import handle_tiers
from sglang.srt.arg_groups.upstream_flags import (
    add_upstream_flags,
    upstream_flags,
    with_upstream_keywords,
)
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.draft_kinds import DRAFT_KINDS, DraftKind
from sglang.srt.configs.draft_layout import MAX_TOP_K, TreeShape
from sglang.srt.configs.quantization_config import KV_CACHE_DTYPES, METHODS
from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_DETECTORS
from sglang.srt.parser.reasoning_parser import DETECTORS as REASONING_DETECTORS
from sglang.srt.sampling.sampling_params import MAX_N
from sglang.srt.utils.devices import cuda_device_count

LAUNCH_COMMAND = "python -m sglang.launch_server"


@with_upstream_keywords
@dataclasses.dataclass(kw_only=True)
class ServerArgs:
    """Every flag of the server and argument of `Engine`, resolved once.

    The constructor also takes the aliases of flags, and arguments of SGLang that ask
    for nothing or have no effect here (`arg_groups/upstream_flags.py`).
    """

    model_path: Annotated[
        str | None,
        Arg(
            "Folder (or hub name) of the model, or a GGUF file; unset: the bundled "
            "demo model.",
            aliases=("--model",),
            begins="Model and tokenizer",
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None, Arg("Folder of the tokenizer; unset: the model's.")
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Arg("Serve token ids only: no tokenizer is loaded.")
    ] = False
    load_format: Annotated[
        str,
        Arg(
            "How weights are read; auto: a .gguf file as gguf, folders as safetensors; "
            "dummy: random values of the real shapes.",
            ("auto", "safetensors", "gguf", "dummy"),
        ),
    ] = "auto"
    context_length: Annotated[
        int | None, Arg("Longest prompt + output; unset: the model's own.", low=1)
    ] = None
    served_model_name: Annotated[
        str | None, Arg("Name in /v1/models; unset: the model path, or demo.")
    ] = None
    allow_auto_truncate: Annotated[
        bool,
        Arg(
            "Truncate a prompt that is longer than the context instead of refusing it."
        ),
    ] = False
    strict_model_name: Annotated[
        bool, Arg("Answer requests for a model of another name with 404.")
    ] = False
    chat_template: Annotated[
        str | None, Arg("A jinja file, or the template itself; unset: the tokenizer's.")
    ] = None
    escape_special_tokens: Annotated[
        bool,
        Arg("Treat names of special tokens in user and tool messages as text."),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's tool calls; unset: an output is parsed only where "
            "tool_choice asks for a call.",
            tuple(CALL_DETECTORS),
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's reasoning; unset: reasoning is text.",
            tuple(REASONING_DETECTORS),
        ),
    ] = None

    device: Annotated[
        str,
        Arg("Device to run on.", ("auto", "cpu", "cuda"), begins="Device and numerics"),
    ] = "auto"
    dtype: Annotated[
        str,
        Arg(
            "Compute and KV type; auto: float32 on the CPU.",
            ("auto", "float32", "float", "bfloat16", "half", "float16"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Arg(
            "Format of quantised weights; unset: as the checkpoint says. fp8 and "
            "w8a8_fp8 also quantise a plain checkpoint while it is read, with a scale "
            "per output channel.",
            METHODS,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Arg(
            "Type of stored KV; auto: the compute type. In 8 bits twice the tokens "
            "fit; scales per layer come from the checkpoint.",
            ("auto", "bfloat16", *KV_CACHE_DTYPES),
            synonyms=KV_DTYPE_NAMES,
        ),
    ] = "auto"
    quantization_param_path: Annotated[
        str | None,
        Arg("JSON file of KV scales (kv_cache.scaling_factor), for KV of 8 bits."),
    ] = None
    fp8_gemm_runner_backend: Annotated[
        str,
        Arg(
            "Products with weights of 8 bits; triton: inputs are never rounded to 8 "
            "bits; auto: on GPUs that multiply 8 bits those of many rows are, for each "
            "token.",
            ("auto", "triton"),
            aliases=("--fp8-gemm-backend",),
            synonyms=FP8_GEMM_BACKENDS,
        ),
    ] = "auto"
    tp_size: Annotated[
        int,
        Arg(
            "Tensor parallel ranks: one process and, on CUDA, one GPU each.",
            aliases=("--tp", "--tensor-parallel-size"),
            low=1,
        ),
    ] = 1
    disable_custom_all_reduce: Annotated[
        bool,
        Arg(
            "Sum over the ranks through NCCL alone, not through memory that their GPUs "
            "share."
        ),
    ] = False
    attention_backend: Annotated[
        str | None,
        Arg(
            "Attention backend; unset: the best one for the device.",
            tuple(ATTENTION_BACKENDS),
        ),
    ] = None
    sampling_backend: Annotated[
        str | None,
        Arg(
            "Sampling backend; unset: pytorch.",
            ("pytorch",),
            synonyms=SAMPLING_BACKENDS,
        ),
    ] = None
    grammar_backend: Annotated[
        str,
        Arg(
            "Engine of constrained decoding.",
            ("llguidance", "none"),
            synonyms=GRAMMAR_BACKENDS,
        ),
    ] = "llguidance"
    grammar_cache_mb: Annotated[
        int,
        Arg(
            "Estimated memory of compiled grammars kept for later requests.",
            low=1,
        ),
    ] = 512
    constrained_json_allow_additional_properties: Annotated[
        bool,
        Arg(
            "Let JSON schema objects without additionalProperties have undeclared "
            "properties, as in the standard."
        ),
    ] = False
    random_seed: Annotated[
        int | None, Arg("Seed of requests without one; unset: drawn at start.")
    ] = None

    mem_fraction_static: Annotated[
        float | None,
        Arg(
            "Share of free memory for weights, KV cache and graphs; unset: by device.",
            begins="Memory",
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Arg(
            "KV slots, rounded down to whole pages; unset: from --mem-fraction-static, "
            "on the CPU at most 2 GiB or one context.",
            low=1,
        ),
    ] = None
    max_running_requests: Annotated[
        int | None,
        Arg(
            "Requests in one batch; unset: on a GPU without speculation 256 to 2,048, "
            "as memory allows, else by device.",
            low=1,
        ),
    ] = None
    page_size: Annotated[int | None, Arg("Tokens per KV page; unset: 1.", low=1)] = None
    disable_radix_cache: Annotated[
        bool, Arg("Do not share prefixes between requests.")
    ] = False
    swa_full_tokens_ratio: Annotated[
        float,
        Arg(
            "Window slots of sliding layers per KV slot, for models that also have "
            "full layers; at most 1.",
            low=0.0,
        ),
    ] = 0.8
    disable_hybrid_swa_memory: Annotated[
        bool, Arg("Also keep every token in sliding layers: no window slots.")
    ] = False
    enable_hierarchical_cache: Annotated[
        bool,
        Arg(
            "Also keep cached prefixes in host memory, and copy them back on a hit.",
            aliases=("--enable-hicache",),
        ),
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Arg("Host memory for KV per memory for KV on the device; unset: 2."),
    ] = None
    hicache_size: Annotated[
        int,
        Arg(
            "Host memory for KV of each rank in GB, instead of --hicache-ratio; 0: "
            "unset.",
            low=0,
        ),
    ] = 0
    hicache_write_policy: Annotated[
        str,
        Arg(
            "When a prefix is copied to host memory: write_through, when it is cached; "
            "write_through_selective, when a second request uses it; write_back, when "
            "it is evicted.",
            ("write_through", "write_through_selective", "write_back"),
        ),
    ] = "write_through"
    hicache_io_backend: Annotated[
        str,
        Arg(
            "How KV is copied: kernel gathers the slots on the device first.",
            ("kernel",),
        ),
    ] = "kernel"
    hicache_mem_layout: Annotated[
        str,
        Arg(
            "Order of KV in host memory: page_first keeps all layers of a unit "
            "together.",
            ("page_first",),
        ),
    ] = "page_first"
    hicache_storage_backend: Annotated[
        str | None,
        Arg(
            "Also keep prefixes in files, which other engines of the same model and "
            "later ones find; needs --enable-hierarchical-cache.",
            ("file",),
        ),
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        str,
        Arg(
            "How long a request waits for its prefix in files: best_effort, no longer "
            "than a round; wait_complete; timeout, for a time that grows with the "
            "prefix.",
            ("best_effort", "wait_complete", "timeout"),
        ),
    ] = "timeout"
    hicache_storage_backend_extra_config: Annotated[
        str | None,
        Arg(
            "Settings of the files as JSON, such as "
            '{"dir": "/var/kv", "max_gb": 100, "max_age_days": 7}.'
        ),
    ] = None
    mamba_ssm_dtype: Annotated[
        str | None,
        Arg(
            "Dtype of the matrices of recurrent state; unset: the checkpoint's, or "
            "float32.",
            ("float32", "bfloat16", "float16"),
        ),
    ] = None
    mamba_full_memory_ratio: Annotated[
        float,
        Arg("Memory for recurrent state per memory for KV, if both are kept.", low=0.0),
    ] = 0.9
    max_mamba_cache_size: Annotated[
        int | None,
        Arg(
            "States of running requests and of the prefix cache; unset: from "
            "--mamba-full-memory-ratio, on the CPU at most three per running request.",
            low=1,
        ),
    ] = None
    mamba_track_interval: Annotated[
        int | None,
        Arg(
            "Decoded tokens between two cached states of a request; unset: 256, in "
            "whole pages.",
            low=1,
        ),
    ] = None
    mamba_radix_cache_strategy: Annotated[
        str,
        Arg(
            "Where states are cached; no_buffer: only at the ends of prefills.",
            ("auto", "extra_buffer", "no_buffer"),
        ),
    ] = "auto"

    chunked_prefill_size: Annotated[
        int | None,
        Arg(
            "Longest prefill of one forward; -1: no chunks; unset: by device.",
            begins="Scheduling",
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int, Arg("Maximum tokens in one prefill batch.", low=1)
    ] = 16384
    max_queued_requests: Annotated[
        int,
        Arg("Maximum waiting requests; further ones get 503 with Retry-After.", low=1),
    ] = 4096
    schedule_policy: Annotated[
        str, Arg("Order of the waiting queue.", ("fcfs", "lpm"))
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool, Arg("Serve waiting requests by priority, highest first.")
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool,
        Arg(
            "With --enable-priority-scheduling: serve the lowest priority value first."
        ),
    ] = False
    schedule_conservativeness: Annotated[
        float, Arg("Larger values admit fewer requests and retract less.", low=0.0)
    ] = 1.0
    disable_overlap_schedule: Annotated[
        bool, Arg("Process a step's result before launching the next step.")
    ] = False
    stream_interval: Annotated[
        int, Arg("Tokens between two stream messages.", low=1)
    ] = 1
    skip_server_warmup: Annotated[
        bool,
        Arg(
            "Skip running every kind of work once before the server is ready: on a GPU "
            "the first request of each kind then waits for kernels. For development."
        ),
    ] = False
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Seconds after which a forward that does not end stops the server.",
            low=0.001,
        ),
    ] = 300.0
    disaggregation_mode: Annotated[
        str,
        Arg(
            "Role in prefill/decode disaggregation; prefill: at most one new token per "
            "request, and its KV goes to decode engines.",
            ("null", "prefill", "decode"),
        ),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str,
        Arg(
            "How KV travels between engines; nixl: RDMA, shared memory or TCP, needs "
            "the extra nixl; tcp: over plain connections; auto: nixl where it is "
            "installed.",
            ("auto", "nixl", "mooncake", "tcp"),
        ),
    ] = "auto"
    disaggregation_bootstrap_port: Annotated[
        int,
        Arg(
            "With --disaggregation-mode prefill: port on --host where decode engines "
            "ask for KV.",
            low=0,
            high=65535,
        ),
    ] = 8998
    disaggregation_landing_size: Annotated[
        float,
        Arg(
            "With --disaggregation-mode decode: host memory of each rank in GB for KV "
            "that arrives; 0: half the size of the device's KV.",
            low=0.0,
        ),
    ] = 0.0

    kv_events_config: Annotated[
        str | None,
        Arg(
            "Where events of the prefix cache are published, as JSON such as "
            '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}; unset: nowhere.'
        ),
    ] = None

    enable_lora: Annotated[
        bool,
        Arg(
            "Serve LoRA adapters beside the model; on with --lora-paths.",
            begins="Adapters",
        ),
    ] = False
    lora_paths: Annotated[
        list[str] | None,
        Arg("Adapters to load at start, each NAME=PATH or a path, which is its name."),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        Arg(
            "Largest rank of an adapter; unset: that of --lora-paths.", low=1, high=4096
        ),
    ] = None
    lora_target_modules: Annotated[
        list[str] | None,
        Arg(
            "Modules that adapters may adapt, such as q_proj; all: every one the model "
            "has; unset: those of --lora-paths, or all."
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Arg(
            "Adapters that running requests use at once; each takes memory of the "
            "device.",
            low=1,
            high=1024,
        ),
    ] = 8
    max_loaded_loras: Annotated[
        int | None,
        Arg("Adapters kept in the host's memory; unset: any number.", low=1),
    ] = None
    lora_eviction_policy: Annotated[
        str,
        Arg(
            "Which idle adapter leaves the device first: the least recently used, or "
            "the first that came.",
            ("lru", "fifo"),
        ),
    ] = "lru"
    lora_backend: Annotated[
        str,
        Arg("Kernels of adapters.", ("triton",), synonyms=LORA_BACKENDS),
    ] = "triton"

    strict_fields: Annotated[
        bool,
        Arg(
            "Refuse unknown fields in requests, instead of ignoring them with one log "
            "line per name.",
            begins="Limits of a request",
        ),
    ] = False
    strict_max_tokens: Annotated[
        bool,
        Arg(
            "Refuse a max_tokens that does not fit after the prompt, instead of ending "
            "the output at the end of the context.",
        ),
    ] = False
    sampling_defaults: Annotated[
        str,
        Arg(
            "Values of sampling fields that a request leaves out; model: taken from "
            "the checkpoint's generation_config.json, if it has any.",
            ("model", "openai"),
        ),
    ] = "model"
    max_n: Annotated[int, Arg("Maximum outputs per prompt (n).", low=1, high=MAX_N)] = (
        1024
    )
    max_logprobs: Annotated[
        int,
        Arg(
            "Maximum alternatives per token that a request may ask for.",
            low=0,
        ),
    ] = 20
    max_logprob_entries: Annotated[
        int,
        Arg(
            "Maximum log probabilities of one request: its tokens times (1 + "
            "alternatives).",
            low=1,
        ),
    ] = 1 << 20
    max_call_tokens: Annotated[
        int,
        Arg(
            "Maximum tokens of all prompts and outputs of one request together.", low=1
        ),
    ] = 1 << 24
    max_token_entries: Annotated[
        int,
        Arg(
            "Maximum entries of stop_token_ids, logit_bias and token_ids_logprob.",
            low=1,
        ),
    ] = 4096
    max_queued_tokens: Annotated[
        int,
        Arg(
            "Maximum prompt tokens of all requests in flight; further ones get 503.",
            low=1,
        ),
    ] = 1 << 24
    max_body_values: Annotated[
        int,
        Arg(
            "Maximum JSON values in a body, counted by its commas and opening "
            "brackets.",
            low=1,
        ),
    ] = 1 << 19

    disable_cuda_graph: Annotated[
        bool,
        Arg(
            "Run decode without CUDA graphs.",
            aliases=("--disable-decode-cuda-graph",),
            begins="CUDA graphs",
        ),
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None,
        Arg(
            "Largest batch with a CUDA graph; unset: --max-running-requests, or 256 if "
            "that is unset too.",
            aliases=("--cuda-graph-max-bs-decode",),
            low=1,
        ),
    ] = None
    cuda_graph_bs: Annotated[
        list[int] | None,
        Arg("Batch sizes with a CUDA graph.", aliases=("--cuda-graph-bs-decode",)),
    ] = None
    disable_piecewise_cuda_graph: Annotated[
        bool,
        Arg(
            "Run prefill without CUDA graphs.",
            aliases=("--disable-prefill-cuda-graph",),
        ),
    ] = False
    cuda_graph_backend_decode: Annotated[
        str | None,
        Arg(
            "Kind of decode graphs; unset: full.",
            (DECODE_GRAPHS, "disabled"),
            synonyms=DECODE_GRAPH_KINDS,
        ),
    ] = None
    cuda_graph_backend_prefill: Annotated[
        str | None,
        Arg(
            "Kind of prefill graphs; unset: breakable.",
            (PREFILL_GRAPHS, "disabled"),
            synonyms=PREFILL_GRAPH_KINDS,
        ),
    ] = None
    cuda_graph_config: Annotated[
        str | None,
        Arg(
            "All graph options as JSON, which takes precedence over the other flags: "
            '{"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": '
            '"disabled"}}.'
        ),
    ] = None
    debug_cuda_graph: Annotated[
        bool, Arg("Run everything eagerly: no graphs of either kind.")
    ] = False
    enable_breakable_cuda_graph: Annotated[
        bool,
        Arg("Insist on breakable CUDA graphs for prefill, the default on CUDA."),
    ] = False

    host: Annotated[str, Arg("Address to listen on.", begins="HTTP")] = "127.0.0.1"
    port: Annotated[int, Arg("Port to listen on.", low=0, high=65535)] = 30000
    api_key: Annotated[
        str | None,
        Arg(
            "Key that clients must send as a bearer token; health paths and /metrics "
            "are open. Visible in the list of processes: prefer --api-key-file."
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Arg("File with one client key per line; SIGHUP reloads it."),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Arg(
            "The only key for operations that concern all clients: abort_all, "
            "/flush_cache, /canary/incidents; unset: any client's key works, but "
            "no key gives access to profiles."
        ),
    ] = None
    cache_namespace_per_key: Annotated[
        bool,
        Arg(
            "Separate the cached prefixes of clients by their keys, so that no client "
            "learns from cached_tokens or from timing what others have asked."
        ),
    ] = False
    cors_allow_origins: Annotated[
        list[str] | None,
        Arg("Sites whose pages may read answers, or *; unset: none."),
    ] = None
    drain_timeout: Annotated[
        float,
        Arg("Seconds that running requests get after SIGTERM or SIGINT.", low=0.0),
    ] = 20.0
    health_timeout: Annotated[
        float,
        Arg(
            "Seconds without an answer from the scheduler after which /health returns "
            "503; must exceed its longest step.",
            low=0.001,
        ),
    ] = 20.0
    max_connections: Annotated[
        int | None,
        Arg(
            "Maximum open connections, others wait; unset: 16384, or what the limit of "
            "open files allows.",
            low=1,
            begins="Connections and bodies",
        ),
    ] = None
    keep_alive_timeout: Annotated[
        int,
        Arg(
            "Seconds that a connection may be idle between two requests.",
            aliases=("--timeout-keep-alive",),
            low=1,
        ),
    ] = 75
    header_timeout: Annotated[
        float,
        Arg(
            "Seconds for the head of a request, and until the first request of a "
            "connection.",
            low=0.001,
        ),
    ] = 20.0
    body_timeout: Annotated[
        float,
        Arg(
            "Seconds over which the rate of a body is measured for "
            "--min-transfer-rate.",
            low=0.001,
        ),
    ] = 30.0
    write_timeout: Annotated[
        float,
        Arg(
            "Seconds over which the rate of a slow reader is measured for "
            "--min-transfer-rate.",
            low=0.001,
        ),
    ] = 60.0
    min_transfer_rate: Annotated[
        float,
        Arg("Bytes per second below which a client is dropped.", low=0.0),
    ] = 1024.0
    max_header_bytes: Annotated[
        int,
        Arg(
            "Maximum size of a request's head; a larger one gets 431.",
            aliases=("--h11-max-incomplete-event-size",),
            low=1024,
        ),
    ] = 16384
    max_body_bytes: Annotated[
        int, Arg("Maximum size of a request's body; a larger one gets 413.", low=1)
    ] = 32 * 1024 * 1024
    max_total_body_bytes: Annotated[
        int,
        Arg(
            "Memory for bodies being read or parsed at the same time; further requests "
            "get 503 with Retry-After.",
            low=1,
        ),
    ] = 256 * 1024 * 1024

    incremental_streaming_output: Annotated[
        bool,
        Arg(
            "Send only what is new in each event of a /generate stream.",
            begins="Answers and logs",
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool, Arg("Let requests ask for hidden states.")
    ] = False
    enable_cache_report: Annotated[
        bool, Arg("Report cached prompt tokens in OpenAI usage.")
    ] = False
    enable_metrics: Annotated[bool, Arg("Serve Prometheus metrics at /metrics.")] = (
        False
    )
    log_level: Annotated[
        str, Arg("Log level.", ("debug", "info", "warning", "error", "critical"))
    ] = "info"
    log_requests: Annotated[bool, Arg("Log each request and its answer.")] = False
    crash_dump_folder: Annotated[
        str | None,
        Arg(
            "Folder for the requests of the last 5 minutes and the ones in flight when "
            "the engine dies (bench_serving --replay sends them again); they contain "
            "the clients' prompts."
        ),
    ] = None
    decode_log_interval: Annotated[
        int, Arg("Decode steps between two log lines of the scheduler.", low=1)
    ] = 400
    profile_output_dir: Annotated[
        str | None,
        Arg(
            "Folder below which /start_profile writes traces; unset: the folder for "
            "temporary files."
        ),
    ] = None
    profile_max_steps: Annotated[
        int,
        Arg("Maximum forwards in one profile, which is kept in memory.", low=1),
    ] = 500

    speculative_algorithm: Annotated[
        str | None,
        Arg(
            "Speculative decoding algorithm.",
            tuple(DRAFT_KINDS),
            begins="Speculative decoding",
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Arg(
            "Folder of the draft model; NEXTN: defaults to --model-path.",
            aliases=("--speculative-draft-model",),
        ),
    ] = None
    speculative_draft_load_format: Annotated[
        str | None,
        Arg(
            "How the draft's weights are read; unset: as --load-format says.",
            ("auto", "safetensors", "dummy"),
        ),
    ] = None
    speculative_draft_model_quantization: Annotated[
        str | None,
        Arg("--quantization of the draft; unset: as its checkpoint says.", METHODS),
    ] = None
    speculative_draft_kv_cache_dtype: Annotated[
        str | None,
        Arg(
            "--kv-cache-dtype of the draft; unset: the target's.",
            ("auto", "bfloat16", *KV_CACHE_DTYPES),
            synonyms=KV_DTYPE_NAMES,
        ),
    ] = None
    speculative_num_steps: Annotated[int | None, Arg("Depth of the draft.", low=1)] = (
        None
    )
    speculative_eagle_topk: Annotated[
        int | None, Arg("Branches kept per draft step.", low=1, high=MAX_TOP_K)
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, Arg("Nodes verified at once, including the root.", low=1)
    ] = None
    speculative_draft_layout: Annotated[
        str | None,
        Arg(
            "KV slots of draft branches (top-k above 1): `region`, the default, a tail "
            "of the draft's pool that request rows own, where a branch attends to its "
            "ancestors; or `paged`, whole pages per branch after each request's "
            "tokens, where it attends to what its own pages hold.",
            ("region", "paged"),
        ),
    ] = None
    speculative_token_map: Annotated[
        str | None, Arg("File of the draft vocabulary's token ids.")
    ] = None
    speculative_ngram_max_bfs_breadth: Annotated[
        int,
        Arg(
            "NGRAM: matches that are followed, and branches after one node at most; 1 "
            "drafts chains.",
            low=1,
            high=MAX_TOP_K,
        ),
    ] = 10
    speculative_ngram_match_type: Annotated[
        str,
        Arg(
            "NGRAM: prefer what followed the longest and newest match (BFS), or what "
            "followed most matches (PROB).",
            ("BFS", "PROB"),
        ),
    ] = "BFS"
    speculative_ngram_max_trie_depth: Annotated[
        int,
        Arg("NGRAM: tokens compared to find the longest match.", low=2, high=256),
    ] = 18
    speculative_ngram_capacity: Annotated[
        int,
        Arg(
            "NGRAM: tokens of all requests that are remembered (20 bytes each).",
            low=1024,
            high=2**30,
        ),
    ] = 10_000_000
    speculative_adaptive: Annotated[
        bool,
        Arg(
            "Choose the shape of each iteration's drafts, or plain decoding, by batch "
            "size, from costs measured at start and what was accepted lately."
        ),
    ] = False
    speculative_adaptive_config: Annotated[
        str | None,
        Arg(
            "JSON file with the shapes to choose among, or a table of shapes by batch "
            "size (docs/speculative.md); unset: the flags' shape and smaller chains."
        ),
    ] = None
    speculative_accept_threshold_single: Annotated[
        float, Arg("Accept a draft token at or above this target probability.")
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float, Arg("Scale of the accumulated acceptance probability.")
    ] = 1.0

    kv_canary: Annotated[
        str,
        Arg(
            "Check the KV cache while serving: report damage, stop, or recompute what "
            "is damaged.",
            KV_CANARY_MODES,
            begins="KV canary",
        ),
    ] = "none"
    kv_canary_real_data: Annotated[
        str,
        Arg("Which KV bytes are fingerprinted.", ("none", "partial", "rotate", "all")),
    ] = "partial"
    kv_canary_sweep_interval: Annotated[
        int, Arg("Steps between sweeps of cached slots; 0: off.")
    ] = 0
    kv_canary_heal_limit: Annotated[
        int,
        Arg("Healings per minute before the engine stops as in raise; 0: no limit."),
    ] = 60
    kv_canary_quarantine_limit: Annotated[
        float,
        Arg(
            "Maximum share of KV pages out of use before the engine stops as in raise."
        ),
    ] = 0.05
    kv_canary_report_dir: Annotated[
        str | None, Arg("Folder for one JSON file per incident.")
    ] = None
    kv_canary_record: Annotated[
        int | None,
        Arg(
            "Number of forwards whose decisions are kept, and written next to an "
            "incident's file to replay it; 0: off; unset: 1000 if "
            "--kv-canary-report-dir is set.",
            low=0,
        ),
    ] = None
    kv_canary_report_tokens: Annotated[
        bool, Arg("Include token ids in incident reports.")
    ] = False
    disable_canary_page: Annotated[
        bool, Arg("Do not serve the inspector page at /canary.")
    ] = False

    def __post_init__(self) -> None:
        settle_lora_paths(self)
        check_token_oracle(self)
        settle_choices(self)
        self._handle_refused()
        check_values(self)
        handle_model(self)
        self._handle_device()
        handle_memory(self)
        handle_states(self)
        handle_scheduling(self)
        handle_attention_backend(self)
        handle_graph_phases(self)
        handle_cuda_graph(self)
        handle_speculative(self)
        handle_adaptive(self)
        handle_kv_canary(self)
        handle_http(self)
        handle_kv_events(self)
        handle_tiers(self)
        handle_lora(self)
        self._is_resolved = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_is_resolved", False):
            raise AttributeError(f"ServerArgs is read-only after start: {name}")
        super().__setattr__(name, value)

    # Resolution, in this order.

    def _handle_refused(self) -> None:
        for flag in ("tool_call_parser", "reasoning_parser"):
            if self.skip_tokenizer_init and getattr(self, flag) is not None:
                raise ValueError(
                    f"--{flag.replace('_', '-')} {getattr(self, flag)} needs text, but "
                    "--skip-tokenizer-init serves token ids only; remove one of them"
                )
        if self.tool_call_parser == "gpt-oss" and self.reasoning_parser != "gpt-oss":
            raise ValueError(
                "--tool-call-parser gpt-oss needs --reasoning-parser gpt-oss, which "
                "separates the messages of an output; add it"
            )

    def _handle_device(self) -> None:
        if self.device == "auto":
            self.device = "cuda" if cuda_device_count() else "cpu"
        if self.device == "cuda" and not cuda_device_count():
            raise ValueError(
                "--device cuda: this machine shows no CUDA device; use --device cpu"
            )
        if self.device == "cuda" and self.tp_size > cuda_device_count():
            raise ValueError(
                f"--tp-size {self.tp_size} needs as many GPUs, but this machine shows "
                f"{cuda_device_count()}; use at most {cuda_device_count()}"
            )
        if self.dtype == "auto":
            self.dtype = "float32" if self.device == "cpu" else "auto"
        self.dtype = {"float": "float32", "half": "float16"}.get(self.dtype, self.dtype)
        self.sampling_backend = self.sampling_backend or "pytorch"
        if self.random_seed is None:
            self.random_seed = random.SystemRandom().randrange(2**31)

    @property
    def has_prefill_graphs(self) -> bool:
        """Whether prefill runs as breakable CUDA graphs."""
        return has_prefill_graphs(self)

    @property
    def draft_kind(self) -> DraftKind:
        """What --speculative-algorithm, which must be set, implies."""
        assert self.speculative_algorithm is not None
        return DRAFT_KINDS[self.speculative_algorithm]

    @property
    def draft_token_offset(self) -> int:
        """As `DraftKind.token_offset`."""
        return self.draft_kind.token_offset

    @property
    def draft_lead(self) -> int:
        """As `DraftKind.lead`."""
        return self.draft_kind.lead

    @property
    def tree_shape(self) -> TreeShape:
        """Shape of the draft tree; requires --speculative-algorithm.

        A chain is a tree with top-k 1.
        """
        assert self.speculative_num_steps is not None
        assert self.speculative_eagle_topk is not None
        assert self.speculative_num_draft_tokens is not None
        return TreeShape(
            topk=self.speculative_eagle_topk,
            num_steps=self.speculative_num_steps,
            num_draft_tokens=self.speculative_num_draft_tokens,
        )

    @property
    def tree_shapes(self) -> tuple[TreeShape, ...]:
        """Shapes that an iteration may have, by ascending number of nodes; `tree_shape`
        alone without --speculative-adaptive."""
        return draft_ladder(self).shapes

    @property
    def draft_load_format(self) -> str:
        """How the draft's weights are read."""
        return self.speculative_draft_load_format or self.load_format

    # Command line.

    @classmethod
    def from_cli(
        cls, argv: Sequence[str] | None = None, *, prog: str = LAUNCH_COMMAND
    ) -> ServerArgs:
        """Parse `argv`, and before it the file given with --config.

        Args:
            prog: the command as users write it.

        Raises:
            ValueError: the flags, or the file, cannot be served.
        """
        parser = cls.parser(prog)
        parsed = parser.parse_args(argv)
        if parsed.config is not None:
            parser.set_defaults(**read_config(parsed.config, cls))
            parsed = parser.parse_args(argv)
        return cls(**cls.given(parsed))

    @classmethod
    def parser(cls, prog: str = LAUNCH_COMMAND) -> FlagParser:
        """Return the parser of every flag."""
        upstream = upstream_flags().values()
        parser = FlagParser(
            prog=prog,
            description="Serve a language model over HTTP.",
            preferred=[name for flag in upstream for name in flag.names],
        )
        parser.add_argument(
            CONFIG_FLAG,
            metavar="FILE",
            help="YAML file with a `flag: value` per line; command line flags take "
            "precedence.",
        )
        cls.add_flags(parser)
        return parser

    @classmethod
    def add_flags(cls, parser: FlagParser) -> None:
        """Add every flag of the server, and SGLang's other flags, to a parser."""
        add_fields(parser, cls)
        add_upstream_flags(parser, cls)

    @classmethod
    def given(cls, parsed: Namespace) -> dict[str, Any]:
        """Return the keyword arguments read by a parser with these flags."""
        others = {k: v for k, v in vars(parsed).items() if k in upstream_flags()}
        return {**others, **from_namespace(cls, parsed)}

    def url(self) -> str:
        """Return the address under which this host reaches the server."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
