"""Why flags of SGLang are accepted without effect, or what to use instead of them.

The keys are the last column of `upstream_flags.tsv`.
"""

from __future__ import annotations

from typing import Final

_ACCEPTED = {
    "audio": "there are no audio models here",
    "batch_overlap": "batches are not split here; answers are the same",
    "cache_tuning": "it tunes a part of a second cache that is not here",
    "communication": "ranks of one machine find and reach each other without it",
    "context_tuning": "it tunes context parallelism, which is not served",
    "data_parallel_tuning": "it tunes data parallelism, and there is one replica",
    "diffusion_lm_tuning": "it tunes diffusion language models, which are not served",
    "disagg_always": "KV of another engine is always compared, and always cached",
    "disagg_tuning": "nothing of the transfer of KV between engines has to be tuned",
    "eviction": "the prefix cache always drops what was used longest ago",
    "expert_tuning": "it tunes expert parallelism, which is not served",
    "fp32_reduce": "attention always reduces in float32",
    "graph_debug": "graph capture has nothing to report here",
    "graph_sizes": "the sizes of prefill graphs follow --chunked-prefill-size",
    "grpc_tuning": "it tunes gRPC or HTTP/2, which are not served",
    "internal": "SGLang sets it itself",
    "kernel": "it chooses among kernels of SGLang; this engine has its own",
    "kv_layout": "the KV pool has one layout",
    "layer_split": "every layer is split over all ranks of --tp-size",
    "loader": "weights are mapped from safetensors or GGUF files",
    "log_http": "lines about requests follow --log-level and --log-requests",
    "lora_tuning": "adapters are loaded and multiplied in one way here",
    "mamba": "it tunes kernels of recurrent state; this engine has its own",
    "metrics_extra": "metrics have fixed names and buckets",
    "multimodal_tuning": "it tunes images, audio or video; only text is served",
    "offload_tuning": "it tunes weights in host memory, which are not served",
    "outlines": "grammars are compiled by llguidance, in memory",
    "pdmux_tuning": "it tunes --enable-pdmux, which is refused",
    "pipeline_tuning": "it tunes pipeline parallelism, which is not served",
    "platform": "it is for machines or settings that this engine does not support",
    "priority_tuning": "a running request is never stopped for another one",
    "process": "how processes wait and collect garbage is fixed",
    "rejection": "drafts are verified, so answers are the same as without them",
    "remote_code": "code of a checkpoint is never run; no served model needs any",
    "remote_tuning": "it tunes weights from another server, which are not served",
    "scheduling": "it tunes when prefills run; answers are the same",
    "spec_tuning": "it tunes how SGLang makes drafts; answers are the same",
    "tokenizer_tuning": "the HTTP process tokenizes, in one thread beside its loop",
    "torch_compile": "nothing is compiled by torch; answers are the same",
    "tracing_tuning": "it tunes --enable-trace, which is refused",
    "warmups": "every kind of work is run once before the server is ready",
    "watchdog": "--watchdog-timeout stops a server whose forward does not end",
    "watermark_tuning": "it tunes --enable-watermark, which is refused",
}
_REFUSED = {
    "auto_truncate": "prompts are not cut; send shorter ones, or raise "
    "--context-length",
    "cache_backend": "other caches are not served; use --enable-hierarchical-cache, "
    "with --hicache-storage-backend file for files",
    "checksum": "files are not hashed; check them before the start",
    "context_parallel": "context parallelism is not served; use --tp-size",
    "custom_loader": "code from a flag is not run; convert the weights to safetensors",
    "data_parallel": "data parallelism is not served; start one server per replica "
    "behind a router (docs/fleet.md), or use --tp-size",
    "decoupled_spec": "drafts run in the server itself; use --speculative-algorithm",
    "delete_files": "files of a model are never deleted; remove the flag",
    "deterministic": "there is no such mode; on the CPU an answer does not depend on "
    "its batch, and seeds fix what is sampled",
    "diffusion_lm": "diffusion language models are not served; remove the flag",
    "disagg_offload": "use --enable-hierarchical-cache, also on a decode engine",
    "disagg_role": "an engine keeps its role; restart it with another "
    "--disaggregation-mode",
    "embedding": "embeddings are not served; remove the flag",
    "encrypted": "files are read as they are; decrypt them first",
    "expert_parallel": "expert parallelism is not served; use --tp-size, which splits "
    "every expert",
    "expert_stats": "expert loads are not recorded; remove the flag",
    "fp32_head": "logits have the compute type; set it with --dtype",
    "gated_launch": "a server starts at once; remove the flag",
    "gpu_choice": "choose GPUs with CUDA_VISIBLE_DEVICES",
    "grpc": "only HTTP/1.1 is served; remove the flag",
    "hidden_states": "use --enable-return-hidden-states, and return_hidden_states in "
    "a request",
    "include_usage": 'send stream_options {"include_usage": true} with each request',
    "int8_states": "cached states have the type of running ones; see --mamba-ssm-dtype",
    "json_whitespace": "the grammar defines the white space of JSON; remove the flag",
    "kv_dtype": "all KV has the type of --kv-cache-dtype; remove the flag",
    "linear_attn": "linear attention has kernels of one kind, triton; remove the flag",
    "log_requests": "--log-requests logs lengths, times and ids as text lines, never "
    "what clients wrote; remove the flag",
    "logit_processor": "code from a request is never run; use logit_bias or a grammar",
    "lora": "adapters of this kind are not served; use --lora-paths for those of peft",
    "memory_saver": "memory stays with the server; stop it to give the GPU back",
    "metrics_labels": "series have fixed labels and are served only at /metrics; add "
    "labels when scraping",
    "mis": "prompts with several items are not served; send them one by one",
    "multimodal": "only text is served; remove the flag",
    "no_kv_cache": "every model has a KV cache; remove the flag",
    "nodes": "one machine is served; use --tp-size up to its GPUs",
    "offload": "weights stay on the device; use a smaller model, GGUF or --tp-size",
    "one_backend": "prefill, decode and drafts share one backend; use "
    "--attention-backend",
    "override": "edit config.json in a copy of the folder",
    "pdmux": "prefill and decode take turns; remove the flag",
    "pipeline": "pipeline parallelism is not served; use --tp-size",
    "priority": "send priority with each request, and --enable-priority-scheduling",
    "quant_communication": "ranks exchange values in the compute type; remove the flag",
    "quantization": "use --quantization (docs/models.md#quantised-weights), or remove "
    "the flag",
    "ray": "Ray Serve deploys replicas (docs/fleet.md); remove the flag",
    "remote_weights": "weights are read from --model-path alone; copy them there",
    "request_template": "templates in requests are not run; use --chat-template",
    "response_store": "responses are not kept; clients send the conversation",
    "return_ids": "ask for them in a request",
    "revision": "download that revision and name its folder with --model-path",
    "root_path": "routes begin at /; let the proxy strip the prefix",
    "routed_experts": "the experts of a token are not reported; remove the flag",
    "sampling_defaults": "send them with each request, or use --sampling-defaults",
    "sessions": "sessions are prefixes here, kept by the prefix cache; remove the flag",
    "spec_algorithm": "drafts of this kind are not served (docs/speculative.md lists "
    "those that are); remove the flag",
    "template_kwargs": "send chat_template_kwargs with each request",
    "template_name": "use --chat-template with the template's file",
    "tensor_dump": "tensors are not written to files; remove the flag",
    "thinking": "send chat_template_kwargs with each request; remove the flag",
    "tls": "terminate TLS in a proxy in front of the server; --api-key-file guards it",
    "tokenizer": "only fast tokenizers are read; use auto",
    "tool_server": "tools are called by clients; remove the flag",
    "tracing": "traces are not sent; /metrics has a histogram of each phase",
    "watermark": "tokens are not watermarked; remove the flag",
    "weight_version": "answers contain no version; use --served-model-name",
}
REASONS: Final = {**_ACCEPTED, **_REFUSED}
