"""Qwen3 dense: the Llama decoder with per-head norms of q and k."""

from __future__ import annotations

from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(qk_norm=True)
