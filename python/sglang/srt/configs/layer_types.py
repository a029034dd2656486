"""Determines what each layer of a model does: attend everything, attend a sliding
window, or fold tokens into a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """What the layers of a type need.

    Fields:
        attends: it has KV and a rotary embedding.
        keeps_state: it has a recurrent state per request.
    """

    attends: bool = False
    keeps_state: bool = False


FULL = "full_attention"
SLIDING = "sliding_attention"
CONV = "conv"
LINEAR = "linear_attention"
LAYER_TYPES = {
    FULL: LayerType(attends=True),
    SLIDING: LayerType(attends=True),
    CONV: LayerType(keeps_state=True),
    LINEAR: LayerType(keeps_state=True),
}


def read_layer_types(
    values: ConfigValues, *, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Return the type of every layer, and the window of sliding layers or None.

    The first of these keys in config.json decides: `layer_types`; `full_attn_idxs`: the
    layers that attend, between convolutions (LFM2); `full_attention_interval` N: every
    N-th layer attends, the others have linear attention (Qwen3-Next);
    `sliding_window_pattern` P: every P-th layer attends everything (Gemma 3);
    `max_window_layers` M: the first M layers do (Qwen2). Without any of them,
    `sliding_window` applies to all layers (Mistral 7B v0.1). `use_sliding_window` false
    switches the window off.

    Raises:
        ValueError: layer types are unknown, too many or too few, a sliding layer has no
            window, or no layer attends; names the file and the key.
    """
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    key, types = _hybrid_types(values, num_layers)
    if types is None:
        types = _window_types(values, num_layers, has_window=window is not None)
    if SLIDING in types and window is None:
        raise values.error(key, f"names {SLIDING}, but there is no sliding_window")
    if not any(LAYER_TYPES[layer_type].attends for layer_type in types):
        raise values.error(
            key, f"leaves none of the {num_layers} layers attention; one needs it"
        )
    return types, window if SLIDING in types else None


def _hybrid_types(
    values: ConfigValues, num_layers: int
) -> tuple[str, tuple[str, ...] | None]:
    """Return the deciding key and the types, or None if all layers attend."""
    given = values.get("layer_types")
    if given is not None:
        return "layer_types", _checked(values, given, num_layers)
    attending = values.get("full_attn_idxs")
    if attending is not None:
        beyond = [layer for layer in attending if layer >= num_layers]
        if beyond:
            raise values.error(
                "full_attn_idxs",
                f"names layer {beyond[0]}, but num_hidden_layers is {num_layers}",
            )
        chosen = set(attending)
        types = (FULL if layer in chosen else CONV for layer in range(num_layers))
        return "full_attn_idxs", tuple(types)
    interval = values.get("full_attention_interval")
    if interval is not None:
        types = (LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
        return "full_attention_interval", tuple(types)
    return "sliding_window", None


def _window_types(
    values: ConfigValues, num_layers: int, *, has_window: bool
) -> tuple[str, ...]:
    pattern = values.get("sliding_window_pattern")
    first = values.get("max_window_layers")
    if not has_window:
        return (FULL,) * num_layers
    if pattern is not None:
        return tuple(
            SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)
        )
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


def _checked(
    values: ConfigValues, given: list[Any], num_layers: int
) -> tuple[str, ...]:
    if len(given) != num_layers:
        raise values.error(
            "layer_types",
            f"names {len(given)} layers, but num_hidden_layers is {num_layers}",
        )
    for layer_type in given:
        if not isinstance(layer_type, str) or layer_type not in LAYER_TYPES:
            raise values.error(
                "layer_types",
                f"names {shown(layer_type)}, which is not supported; supported: "
                f"{', '.join(LAYER_TYPES)}",
            )
    return tuple(given)
