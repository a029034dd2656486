"""Hidden states that a draft head reads, from the configuration of the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

DEFAULT_NUM_SOURCES = 3


def layers_to_capture(draft: ModelConfig, *, num_target_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs an EAGLE3 head reads.

    A checkpoint lists layers whose outputs are read: the inputs of the next ones.
    """
    listed = _eagle_config(draft).get("eagle_aux_hidden_state_layer_ids")
    if listed:
        return tuple(int(layer) + 1 for layer in listed)
    return (2, num_target_layers // 2, num_target_layers - 3)


def num_hidden_sources(draft: ModelConfig) -> int:
    """Return how many concatenated hidden states of the target an EAGLE3 head reads."""
    settings = _eagle_config(draft)
    if not settings.get("use_aux_hidden_state", True):
        return 1
    explicit = draft.raw.get("num_aux_hidden_states")
    listed = settings.get("eagle_aux_hidden_state_layer_ids") or ()
    return int(explicit or len(listed) or DEFAULT_NUM_SOURCES)


def hidden_source_size(draft: ModelConfig) -> int:
    """Return the channels of one of these hidden states."""
    return int(draft.raw.get("target_hidden_size") or draft.hidden_size)


def _eagle_config(draft: ModelConfig) -> dict[str, Any]:
    settings = draft.raw.get("eagle_config") or {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"{draft.path / 'config.json'}: eagle_config must be an object, got "
            f"{settings!r}"
        )
    return settings
