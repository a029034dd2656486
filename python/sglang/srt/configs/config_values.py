"""Values of `config.json` that the engine reads: a table of what each may be."""

from __future__ import annotations

from typing import Any

from sglang.srt.utils.checked_values import REQUIRED, Key

TINY = 1e-30
MAX_TOKEN_ID = 1 << 31

# Upper bounds are far above any model, and far below sizes that break allocations.
KEYS: dict[str, Key] = {
    "hidden_size": Key(int, 1, 1 << 20, REQUIRED),
    "intermediate_size": Key(int, 1, 1 << 24, REQUIRED),
    "num_hidden_layers": Key(int, 1, 4096, REQUIRED),
    "num_attention_heads": Key(int, 1, 1 << 16, REQUIRED),
    "num_key_value_heads": Key(int, 1, 1 << 16),
    "head_dim": Key(int, 2, 1 << 16),
    "vocab_size": Key(int, 1, 1 << 24, REQUIRED),
    "max_position_embeddings": Key(int, 1, 1 << 30, 2048),
    "rms_norm_eps": Key(float, 0.0, 1.0, 1e-6),
    "hidden_act": Key(str, default="silu"),
    "hidden_activation": Key(str),
    "tie_word_embeddings": Key(bool, default=False),
    "attention_bias": Key(bool, default=False),
    "mlp_bias": Key(bool, default=False),
    "use_bidirectional_attention": Key(bool, default=False),
    "sliding_window": Key(int, 1, 1 << 30),
    "use_sliding_window": Key(bool, default=True),
    "layer_types": Key(list),
    "full_attn_idxs": Key(list, 0, 4095, of=int),
    "full_attention_interval": Key(int, 1, 4096),
    "sliding_window_pattern": Key(int, 1, 4096),
    "max_window_layers": Key(int, 0, 4096, 0),
    "query_pre_attn_scalar": Key(float, TINY, 1e6),
    "attn_logit_softcapping": Key(float, TINY, 1e6, 0.0),
    "final_logit_softcapping": Key(float, TINY, 1e6, 0.0),
    "rope_parameters": Key(dict),
    "rope_scaling": Key(dict),
    "rope_theta": Key(float, TINY, 1e30, 10000.0),
    "rope_local_base_freq": Key(float, TINY, 1e30),
    "partial_rotary_factor": Key(float, TINY, 1.0, 1.0),
    # Keys for experts.
    "num_experts": Key(int, 0, 1 << 14),
    "num_local_experts": Key(int, 0, 1 << 14),
    "n_routed_experts": Key(int, 0, 1 << 14),
    "num_experts_per_tok": Key(int, 1, 1 << 10, REQUIRED),
    "moe_intermediate_size": Key(int, 1, 1 << 24),
    "shared_expert_intermediate_size": Key(int, 0, 1 << 24),
    "n_shared_experts": Key(int, 0, 1 << 10, 0),
    "norm_topk_prob": Key(bool, default=False),
    "routed_scaling_factor": Key(float, TINY, 1e6, 1.0),
    "n_group": Key(int, 1, 1 << 10, 1),
    "topk_group": Key(int, 1, 1 << 10, 1),
    "decoder_sparse_step": Key(int, 1, 4096, 1),
    "first_k_dense_replace": Key(int, 0, 4096, 0),
    "moe_layer_freq": Key(int, 1, 4096, 1),
    "swiglu_alpha": Key(float, TINY, 1e6, 1.702),
    "swiglu_limit": Key(float, TINY, 1e30, 7.0),
    "topk_method": Key(str),
    # Keys for latents.
    "kv_lora_rank": Key(int, 8, 1 << 10),
    "q_lora_rank": Key(int, 1, 1 << 20),
    "qk_nope_head_dim": Key(int, 1, 1 << 16, REQUIRED),
    "qk_rope_head_dim": Key(int, 8, 1 << 10, REQUIRED),
    "v_head_dim": Key(int, 1, 1 << 16, REQUIRED),
    "rope_interleave": Key(bool, default=True),
    "num_nextn_predict_layers": Key(int, 0, 64, 0),
    "quantization_config": Key(dict),
    # Keys for recurrent state; a convolution has one of the widths of the operation.
    "conv_L_cache": Key(int, 2, 4, REQUIRED),
    "conv_bias": Key(bool, default=False),
    "linear_conv_kernel_dim": Key(int, 2, 4, REQUIRED),
    "linear_num_value_heads": Key(int, 1, 1 << 12, REQUIRED),
    "linear_num_key_heads": Key(int, 1, 1 << 12, REQUIRED),
    "linear_key_head_dim": Key(int, 1, 1 << 10, REQUIRED),
    "linear_value_head_dim": Key(int, 1, 1 << 10, REQUIRED),
    # LFM2's names and rule for sizes that others state.
    "norm_eps": Key(float, 0.0, 1.0),
    "tie_embedding": Key(bool),
    "block_ff_dim": Key(int, 1, 1 << 24),
    "block_auto_adjust_ff_dim": Key(bool, default=False),
    "block_ffn_dim_multiplier": Key(float, TINY, 1e3, 1.0),
    "block_multiple_of": Key(int, 1, 1 << 20, 256),
    # Keys for a draft head.
    "draft_vocab_size": Key(int, 1, 1 << 24),
    "num_aux_hidden_states": Key(int, 1, 4096),
    "target_hidden_size": Key(int, 1, 1 << 20),
    "eagle_config": Key(dict),
    "use_aux_hidden_state": Key(bool, default=True),
}
# Keys in `rope_scaling` and `rope_parameters`.
ROPE_KEYS: dict[str, Key] = {
    "type": Key(str, default="default"),
    "rope_type": Key(str),
    "rope_theta": Key(float, TINY, 1e30),
    "factor": Key(float, TINY, 1e6, REQUIRED),
    "low_freq_factor": Key(float, TINY, 1e6, REQUIRED),
    "high_freq_factor": Key(float, TINY, 1e6, REQUIRED),
    "original_max_position_embeddings": Key(float, 1, 1 << 30, REQUIRED),
    "partial_rotary_factor": Key(float, TINY, 1.0),
    # Keys for YaRN.
    "beta_fast": Key(float, TINY, 1e6, 32.0),
    "beta_slow": Key(float, TINY, 1e6, 1.0),
    "truncate": Key(bool, default=True),
    "attention_factor": Key(float, TINY, 1e6),
    "mscale": Key(float, 0.0, 1e6, 0.0),
    "mscale_all_dim": Key(float, 0.0, 1e6, 0.0),
}
# Model type -> defaults of keys that its checkpoints may leave out, if they differ from
# the ones above. A null key does not count as left out.
_GEMMA: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DELTA: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_DELTA_MOE: dict[str, Any] = _DELTA | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_QWEN3_5: dict[str, Any] = _DELTA | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_QWEN3_5_MOE: dict[str, Any] = _DELTA_MOE | {
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENTS
    | {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
    },
    "deepseek_v3": _LATENTS
    | {
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
    "gemma2": _GEMMA
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
    },
    "mistral": {"sliding_window": 4096},
    "qwen3_next": _DELTA_MOE
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5_MOE),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
        {"use_sliding_window": False, "max_window_layers": 28},
    ),
}
