"""Model classes by the architecture name in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.layer_types import FULL, SLIDING
from sglang.srt.models.deepseek_v2 import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)
from sglang.srt.models.gemma import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
)
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.lfm2 import Lfm2ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.mock import MockForCausalLM
from sglang.srt.models.mock_draft import (
    MockForCausalLMDraft,
    MockForCausalLMEagle,
    MockForCausalLMEagle3,
)
from sglang.srt.models.nextn import HEADS, NextnHead, find_head
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

MockModel = MockForCausalLM | MockForCausalLMEagle
DraftHead = (
    LlamaForCausalLMEagle | LlamaForCausalLMEagle3 | MockForCausalLMEagle | NextnHead
)
CausalLM = LlamaForCausalLM | MockForCausalLM | DraftHead

_MODELS: dict[str, type[LlamaForCausalLM] | type[MockForCausalLM]] = {
    model.__name__: model
    for model in (
        DeepseekV2ForCausalLM,
        DeepseekV3ForCausalLM,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3ForConditionalGeneration,
        GptOssForCausalLM,
        Lfm2ForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        MockForCausalLM,
        Qwen2ForCausalLM,
        Qwen2MoeForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        Qwen3NextForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeForConditionalGeneration,
    )
}
# Models that draft for another one and cannot be served alone.
_HEADS: tuple[type[DraftHead], ...] = (
    LlamaForCausalLMEagle,
    LlamaForCausalLMEagle3,
    MockForCausalLMDraft,
    MockForCausalLMEagle,
    MockForCausalLMEagle3,
    *HEADS,
)
_DRAFT_MODELS = {model.__name__: model for model in _HEADS}


def supported_architectures() -> list[str]:
    """Return the models that can be served."""
    return sorted(_MODELS)


def supported_draft_architectures() -> list[str]:
    """Return the models that only draft, most of them from a target's hidden states."""
    return sorted(_DRAFT_MODELS)


def draft_architectures(algorithm: str) -> list[str]:
    """Return the models that draft for a --speculative-algorithm."""
    heads = [
        name for name, model in _DRAFT_MODELS.items() if model.algorithm == algorithm
    ]
    # Any language model may draft for another one.
    whole = supported_architectures() if algorithm == "STANDALONE" else []
    return sorted(heads + whole)


def head_of_checkpoint(architecture: str) -> type[NextnHead] | None:
    """Return the head for multi-token prediction that checkpoints of a model hold, or
    None if they hold none."""
    target = _MODELS.get(architecture)
    return None if target is None else find_head(target)


def num_layer_weights(config: ModelConfig) -> int:
    """Return the weights in the layers' matrices, a lower bound of the model's
    weights."""
    model = _find(config.architecture)
    has_experts = model is not None and model.has_experts
    return (config if has_experts else config.without_experts()).num_layer_weights


def _find(
    architecture: str,
) -> type[LlamaForCausalLM] | type[MockForCausalLM] | type[DraftHead] | None:
    return _MODELS.get(architecture) or _DRAFT_MODELS.get(architecture)


def create_model(config: ModelConfig, *, rope_rows: int) -> CausalLM:
    """Build the module with uninitialised weights.

    Raises:
        ValueError: the architecture is not supported, or has no use for the latents or
            the layers with a state that config.json describes. The message names it and
            what is supported.
    """
    model = _find(config.architecture)
    if model is None:
        known = supported_architectures() + supported_draft_architectures()
        raise ValueError(
            f"{config.file}: architecture {config.architecture} is not "
            f"supported; supported: {', '.join(known)}"
        )
    if config.latent is not None and not model.keeps_latents:
        raise ValueError(
            f"{config.file}: kv_lora_rank describes latents, which "
            f"{config.architecture} does not keep; remove it"
        )
    if config.state is not None:
        found = config.layer_types[config.state.layers[0]]
        if found != model.state_type:
            known = [FULL, SLIDING] + ([model.state_type] if model.state_type else [])
            raise ValueError(
                f"{config.file}: layer_types has layers of the type {found}, which "
                f"{config.architecture} does not have; supported: {', '.join(known)}"
            )
    return model(config, rope_rows=rope_rows)
