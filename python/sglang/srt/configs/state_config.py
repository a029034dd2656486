"""Shape of the recurrent state that layers of a hybrid model keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.layer_types import CONV, LAYER_TYPES, LINEAR

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of a gated delta rule: `heads` value heads of `d_v` channels, served by
    `key_heads` key heads of `d_k`; a state is [heads, d_k, d_v].
    """

    heads: int
    key_heads: int
    d_k: int
    d_v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The state of a model, all ranks together.

    Fields:
        layers: layers with a state, ascending; all have the same shape.
        conv_channels, conv_width: of the short convolution; its state is the last
            conv_width - 1 inputs.
        delta: the matrices, or None if there is only the convolution.
    """

    layers: tuple[int, ...]
    conv_channels: int
    conv_width: int
    delta: DeltaShape | None

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights in a layer's projections."""
        delta = self.delta
        if delta is None:
            # Two gates and the inputs come in, the results go out.
            return 4 * hidden_size * self.conv_channels
        values = delta.heads * delta.d_v
        return hidden_size * (self.conv_channels + 2 * values + 2 * delta.heads)


def read_state_config(
    values: ConfigValues, *, layer_types: tuple[str, ...]
) -> StateConfig | None:
    """Return the state of the layers that keep one, or None if none does.

    Raises:
        ValueError: a size is missing or impossible, or layers have states of different
            shapes; names the file and the key.
    """
    kinds = sorted({name for name in layer_types if LAYER_TYPES[name].keeps_state})
    if not kinds:
        return None
    if len(kinds) > 1:
        raise values.error(
            "layer_types",
            f"names {' and '.join(kinds)}; all layers with a state must be of one type",
        )
    kind = kinds[0]
    layers = tuple(i for i, name in enumerate(layer_types) if name == kind)
    return _READERS[kind](values, layers)


def _read_conv(values: ConfigValues, layers: tuple[int, ...]) -> StateConfig:
    return StateConfig(
        layers=layers,
        conv_channels=values.get("hidden_size"),
        conv_width=values.get("conv_L_cache"),
        delta=None,
    )


def _read_delta(values: ConfigValues, layers: tuple[int, ...]) -> StateConfig:
    delta = DeltaShape(
        heads=values.get("linear_num_value_heads"),
        key_heads=values.get("linear_num_key_heads"),
        d_k=values.get("linear_key_head_dim"),
        d_v=values.get("linear_value_head_dim"),
    )
    if delta.heads % delta.key_heads:
        raise values.wrong(
            "linear_num_key_heads",
            f"must divide linear_num_value_heads, {delta.heads}",
        )
    return StateConfig(
        layers=layers,
        conv_channels=2 * delta.key_heads * delta.d_k + delta.heads * delta.d_v,
        conv_width=values.get("linear_conv_kernel_dim"),
        delta=delta,
    )


_READERS: dict[str, Callable[[ConfigValues, tuple[int, ...]], StateConfig]] = {
    CONV: _read_conv,
    LINEAR: _read_delta,
}
