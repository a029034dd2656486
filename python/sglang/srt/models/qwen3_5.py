"""Qwen3.5: the layers of Qwen3-Next, dense or with experts, alone or as the text part
of a multimodal checkpoint, whose other parts are not read."""

from __future__ import annotations

import dataclasses

from sglang.srt.models.moe import qwen_feed_forward
from sglang.srt.models.qwen3_next import ATTENTION_PARTS, QwenHybrid


class Qwen3_5ForCausalLM(QwenHybrid):
    packed_modules = ATTENTION_PARTS | {
        "in_proj_qkv": ("in_proj", "qkv"),
        "in_proj_z": ("in_proj", "z"),
        "in_proj_b": ("in_proj", "b"),
        "in_proj_a": ("in_proj", "a"),
    }


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    traits = dataclasses.replace(QwenHybrid.traits, feed_forward=qwen_feed_forward)
    has_experts = True


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    is_text_part = True


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    is_text_part = True
