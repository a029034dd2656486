"""Shape of the recurrent state that layers of a hybrid model keep."""

from __future__ import annotations

from dataclasses import dataclass


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
