"""Determines which layers of a model attend everything and which a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues

FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)


def read_layer_types(
    values: ConfigValues, *, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Return the type of every layer, and the window of sliding layers or None.

    The first of these keys in config.json decides: `layer_types`;
    `sliding_window_pattern` P: every P-th layer attends everything (Gemma 3);
    `max_window_layers` M: the first M layers do (Qwen2). Without any of them,
    `sliding_window` applies to all layers (Mistral 7B v0.1). `use_sliding_window` false
    switches the window off.

    Raises:
        ValueError: layer types are unknown, too many or too few, or a sliding layer has
            no window; names the file and the key.
    """
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    given, pattern = values.get("layer_types"), values.get("sliding_window_pattern")
    first = values.get("max_window_layers")
    if given is not None:
        types = _checked(values, given, num_layers, has_window=window is not None)
    elif window is None:
        types = (FULL,) * num_layers
    elif pattern is not None:
        types = tuple(
            SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)
        )
    else:
        types = tuple(SLIDING if i >= first else FULL for i in range(num_layers))
    return types, window if SLIDING in types else None


def _checked(
    values: ConfigValues, given: list[Any], num_layers: int, *, has_window: bool
) -> tuple[str, ...]:
    if len(given) != num_layers:
        raise values.error(
            "layer_types",
            f"names {len(given)} layers, but num_hidden_layers is {num_layers}",
        )
    for layer_type in given:
        if layer_type not in LAYER_TYPES:
            raise values.error(
                "layer_types",
                f"names {shown(layer_type)}, which is not supported; supported: "
                f"{', '.join(LAYER_TYPES)}",
            )
    if SLIDING in given and not has_window:
        raise values.error(
            "layer_types", f"names {SLIDING}, but there is no sliding_window"
        )
    return tuple(given)
