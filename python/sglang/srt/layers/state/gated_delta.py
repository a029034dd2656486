"""The gated delta rule behind a short convolution (Yang et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs
from sglang.srt.layers.ops.state.gated_delta.op import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_tree,
)
from sglang.srt.layers.state.layer import StateLayer

if TYPE_CHECKING:
    from sglang.srt.configs.state_config import DeltaShape
    from sglang.srt.layers.state.forward import StateCommit, StateForward
    from sglang.srt.layers.state.short_conv import DepthwiseConv


class GatedDelta(StateLayer):
    """Folds keys and values into a matrix per value head, and reads it with queries.

    `packed` is [q | k | v | b | a] of this rank's heads, before the convolution of q, k
    and v. b becomes the strength of the write, a the decay. Results are [T, heads *
    d_v].

    Args:
        shape: heads of this rank.
        conv: of q, k and v, with SiLU.
        a_log, dt_bias: float32 [heads]; decay is exp(a_log) * softplus(a + dt_bias).
    """

    def __init__(
        self,
        *,
        layer_id: int,
        shape: DeltaShape,
        conv: DepthwiseConv,
        a_log: Tensor,
        dt_bias: Tensor,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.conv = conv
        self.a_log = a_log
        self.dt_bias = dt_bias
        self.out_width = shape.heads * shape.d_v
        self._shape = shape
        self._keys = shape.key_heads * shape.d_k
        self._sizes = [conv.channels, shape.heads, shape.heads]
        self.width = sum(self._sizes)
        self._rate: Tensor | None = None

    def process_weights_after_loading(self) -> None:
        self._rate = -self.a_log.data.exp()

    def fold(self, packed: Tensor, state: StateForward) -> Tensor:
        own = state.layer(self.layer_id)
        assert own.matrix is not None
        qkv, b, a = packed.split_with_sizes(self._sizes, dim=1)
        inputs = self._inputs(self.conv(qkv, self.layer_id, state), b, a)
        if state.trees is not None:
            nodes = state.trees.nodes.layer(self.layer_id).narrow(len(inputs.v)).delta
            assert nodes is not None
            out: Tensor = gated_delta_tree(
                inputs,
                own.matrix,
                slots=state.slots,
                mask=state.trees.mask,
                nodes=nodes,
                sums=own.matrix_sums,
            )
        elif state.qo_indptr is None:
            out = gated_delta_decode(
                inputs,
                own.matrix,
                slots=state.slots,
                folded=own.matrix_folded,
                sums=own.matrix_sums,
            )
        else:
            out = gated_delta_prefill(
                inputs,
                own.matrix,
                folded=own.matrix_folded,
                sums=own.matrix_sums,
                **state.prefill_rows(),
            )
        # In memory, the CPU has the heads of trees outside of their nodes.
        return out.flatten(1)

    def commit(self, accepted: StateCommit) -> None:
        self.conv.commit(self.layer_id, accepted)
        own = accepted.pool.layer(self.layer_id)
        nodes = accepted.layer_nodes(self.layer_id).delta
        assert own.matrix is not None and nodes is not None
        gated_delta_commit(
            nodes,
            own.matrix,
            folded=own.matrix_folded,
            sums=own.matrix_sums,
            **accepted.rows(),
        )

    def _inputs(self, qkv: Tensor, b: Tensor, a: Tensor) -> DeltaInputs:
        assert self._rate is not None, "process_weights_after_loading was not called"
        shape = self._shape
        q, k, v = qkv.split_with_sizes([self._keys, self._keys, self.out_width], dim=1)
        return DeltaInputs(
            q=q.unflatten(1, (shape.key_heads, shape.d_k)),
            k=k.unflatten(1, (shape.key_heads, shape.d_k)),
            v=v.unflatten(1, (shape.heads, shape.d_v)),
            g=functional.softplus(a + self.dt_bias).mul_(self._rate),
            beta=b.sigmoid(),
            scale=shape.d_k**-0.5,
            normalise=True,
        )
