"""Hidden states that a draft head reads, according to its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.config_values import KEYS

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

DEFAULT_NUM_SOURCES = 3


def layers_to_capture(draft: ModelConfig, *, num_target_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs an EAGLE3 head reads.

    A checkpoint lists layers whose outputs are read, which are the next layers' inputs.
    """
    listed = _captured_layers(draft)
    if listed:
        return tuple(layer + 1 for layer in listed)
    return (2, num_target_layers // 2, num_target_layers - 3)


def num_hidden_sources(draft: ModelConfig) -> int:
    """Return how many concatenated hidden states of the target an EAGLE3 head reads."""
    if not draft.values.within("eagle_config", KEYS).get("use_aux_hidden_state"):
        return 1
    explicit: int | None = draft.values.get("num_aux_hidden_states")
    return explicit or len(_captured_layers(draft)) or DEFAULT_NUM_SOURCES


def hidden_source_size(draft: ModelConfig) -> int:
    """Return the channels of one of these hidden states."""
    own: int | None = draft.values.get("target_hidden_size")
    return own or draft.hidden_size


def _captured_layers(draft: ModelConfig) -> list[int]:
    settings = draft.values.within("eagle_config", KEYS)
    limit = KEYS["num_hidden_layers"].high
    return settings.integers(
        "eagle_aux_hidden_state_layer_ids", low=-1, high=int(limit)
    )
