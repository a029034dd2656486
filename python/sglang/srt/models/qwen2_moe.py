"""Qwen2 with experts: the Qwen2 decoder with sparse feed-forward blocks and a shared
expert that every token takes."""

from __future__ import annotations

from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM
from sglang.srt.models.moe import qwen_feed_forward


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(qkv_bias=True, feed_forward=qwen_feed_forward)
    has_experts = True
