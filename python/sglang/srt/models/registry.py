"""Model classes by the architecture name that config.json gives."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.mock import MockForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

CausalLM = LlamaForCausalLM | MockForCausalLM

_MODELS: dict[str, type[LlamaForCausalLM] | type[MockForCausalLM]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MockForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )
}


def supported_architectures() -> list[str]:
    return sorted(_MODELS)


def create_model(config: ModelConfig, *, rope_rows: int) -> CausalLM:
    """Build the module with uninitialised weights.

    Raises:
        ValueError: the architecture is not supported; names it and those that are.
    """
    model = _MODELS.get(config.architecture)
    if model is None:
        raise ValueError(
            f"{config.path / 'config.json'}: architecture {config.architecture} is not "
            f"supported; supported: {', '.join(supported_architectures())}"
        )
    return model(config, rope_rows=rope_rows)
