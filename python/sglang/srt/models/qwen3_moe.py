"""Qwen3 with experts: the Qwen3 decoder with sparse feed-forward blocks."""

from __future__ import annotations

from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM
from sglang.srt.models.moe import qwen_feed_forward


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(qk_norm=True, feed_forward=qwen_feed_forward)
    has_experts = True
