"""Short convolutions over the last inputs of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.joined_linear import Joined, JoinedParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.state.short_conv.conv_filter import ConvFilter
from sglang.srt.layers.ops.state.short_conv.op import (
    short_conv_commit,
    short_conv_decode,
    short_conv_prefill,
    short_conv_tree,
)
from sglang.srt.layers.state.layer import StateLayer

if TYPE_CHECKING:
    from sglang.srt.distributed.partition import Part
    from sglang.srt.layers.state.forward import StateCommit, StateForward


class DepthwiseConv(Module):
    """Weights of a causal depthwise convolution, which knows no rows.

    Checkpoints have one tensor [channels, 1, width], whose channels are those of all
    `parts`, in order.

    Args:
        parts: this rank's part of the channels.
        silu: whether results go through SiLU.
    """

    def __init__(
        self, parts: Mapping[str | None, Part], *, width: int, bias: bool, silu: bool
    ) -> None:
        super().__init__()
        self.channels = channels = sum(part.size for part in parts.values())
        joined: dict[str | None, Joined] = {None: Joined(shards=tuple(parts))}
        self.weight = JoinedParameter.join(
            torch.empty(channels, 1, width), parts, joined
        )
        self.bias: JoinedParameter | None = None
        if bias:
            self.bias = JoinedParameter.join(torch.empty(channels), parts, joined)
        self._silu = silu
        self._filter: ConvFilter | None = None

    def process_weights_after_loading(self) -> None:
        self._filter = ConvFilter(
            weight=self.weight.data.squeeze(1),
            bias=None if self.bias is None else self.bias.data,
            silu=self._silu,
        )

    def forward(self, x: Tensor, layer_id: int, state: StateForward) -> Tensor:
        """x [T, channels] -> [T, channels], and the layer's last inputs are updated, or
        kept with its nodes."""
        assert self._filter is not None, "process_weights_after_loading was not called"
        own, trees = state.layer(layer_id), state.trees
        if trees is not None:
            trees.nodes.layer(layer_id).narrow(len(x)).inputs.copy_(x)
            return short_conv_tree(
                x,
                self._filter,
                own.conv,
                slots=state.slots,
                parent_index=trees.parent_index,
                sums=own.conv_sums,
            )
        if state.qo_indptr is None:
            return short_conv_decode(
                x,
                self._filter,
                own.conv,
                slots=state.slots,
                folded=own.conv_folded,
                sums=own.conv_sums,
            )
        return short_conv_prefill(
            x,
            self._filter,
            own.conv,
            folded=own.conv_folded,
            sums=own.conv_sums,
            **state.prefill_rows(),
        )

    @staticmethod
    def commit(layer_id: int, accepted: StateCommit) -> None:
        """As `StateLayer.commit`."""
        own = accepted.pool.layer(layer_id)
        short_conv_commit(
            accepted.layer_nodes(layer_id).inputs,
            own.conv,
            folded=own.conv_folded,
            sums=own.conv_sums,
            **accepted.rows(),
        )


class ShortConv(StateLayer):
    """A layer whose only state is its convolution's; `packed` is what goes into it."""

    def __init__(self, *, layer_id: int, conv: DepthwiseConv) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.conv = conv
        self.width = self.out_width = conv.channels

    def fold(self, packed: Tensor, state: StateForward) -> Tensor:
        folded: Tensor = self.conv(packed, self.layer_id, state)
        return folded

    def commit(self, accepted: StateCommit) -> None:
        self.conv.commit(self.layer_id, accepted)
