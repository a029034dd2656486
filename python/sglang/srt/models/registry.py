"""Model classes by the architecture name that config.json gives."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.mock import MockForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

CausalLM = (
    LlamaForCausalLM | MockForCausalLM | LlamaForCausalLMEagle | LlamaForCausalLMEagle3
)

_MODELS: dict[str, type[LlamaForCausalLM] | type[MockForCausalLM]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MockForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )
}
# Heads that draft from another model's hidden states and cannot be served alone.
_DRAFT_MODELS: dict[str, type[LlamaForCausalLMEagle] | type[LlamaForCausalLMEagle3]] = {
    model.__name__: model for model in (LlamaForCausalLMEagle, LlamaForCausalLMEagle3)
}


def supported_architectures() -> list[str]:
    """Models that can be served."""
    return sorted(_MODELS)


def supported_draft_architectures() -> list[str]:
    """Heads that need a target's hidden states."""
    return sorted(_DRAFT_MODELS)


def draft_architectures(algorithm: str) -> list[str]:
    """Models that draft for a --speculative-algorithm."""
    if algorithm == "STANDALONE":
        return supported_architectures()
    return sorted(
        name for name, model in _DRAFT_MODELS.items() if model.algorithm == algorithm
    )


def create_model(config: ModelConfig, *, rope_rows: int) -> CausalLM:
    """Build the module with uninitialised weights.

    Raises:
        ValueError: the architecture is not supported; names it and those that are.
    """
    model = _MODELS.get(config.architecture) or _DRAFT_MODELS.get(config.architecture)
    if model is None:
        known = supported_architectures() + supported_draft_architectures()
        raise ValueError(
            f"{config.path / 'config.json'}: architecture {config.architecture} is not "
            f"supported; supported: {', '.join(known)}"
        )
    return model(config, rope_rows=rope_rows)
