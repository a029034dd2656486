"""Qwen2 dense: the Llama decoder with biases on q, k and v."""

from __future__ import annotations

from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(qkv_bias=True)
