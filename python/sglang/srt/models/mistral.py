"""Mistral dense: the Llama decoder without biases, with a sliding window over all
layers if the checkpoint has one."""

from __future__ import annotations

from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(qkv_bias=False)
