"""The layer stack of a dense decoder as one native operator.

It launches the native kernels of its ops in the same order and on the same numbers, so
its results match theirs bit by bit, without the Python overhead of about sixty calls
per step. Knows weights and slots; knows nothing of modules or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.ops.linear.op import PackedWeight

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackLayer:
    """The weights of one layer, float32; products are packed in the native format.

    Fields:
        input_norm, post_norm: [H]. Without `input_norm` the layer, a first one, reads
            the `first` of each run.
        qkv, o, gate_up, down: as in `DecoderLayer`, each with a bias or None.
        cos_sin_cache: float32 [positions, rotary channels], or None without rotation.
        q_norm, k_norm: [head_dim], or None.
    """

    input_norm: Tensor | None
    qkv: PackedWeight
    qkv_bias: Tensor | None
    cos_sin_cache: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedWeight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """The weights in the order in which the native plan takes them."""
        return [
            self.input_norm,
            self.qkv.data,
            self.qkv_bias,
            self.cos_sin_cache,
            self.q_norm,
            self.k_norm,
            self.o.data,
            self.o_bias,
            self.post_norm,
            self.gate_up.data,
            self.gate_up_bias,
            self.down.data,
            self.down_bias,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSizes:
    """Sizes that all layers share: heads, channels of a head, of the stream and of the
    MLP. `activation` is a key of `GATED`, `eps` serves every norm, and `scale`
    multiplies scores. `first` is the width of the input that the first layer takes
    instead of the normalised stream (in a draft head), or 0 if it takes none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    activation: str
    eps: float
    scale: float
    first: int = 0

    @property
    def scratch_width(self) -> int:
        """Floats that one token needs between the operator's parts."""
        heads = 2 * (self.num_heads + self.num_kv_heads)
        return heads * self.head_dim + 3 * self.inner


class StackInput(NamedTuple):
    """The stream `x` [T, H], which is overwritten, and `first` and `captured` as in
    `StackPlan.run`."""

    x: Tensor
    first: Tensor | None = None
    captured: tuple[int, ...] = ()


class StackRun(NamedTuple):
    """Results of a stack: `hidden` [T, H], the input of the head, and `captured`, the
    layer inputs beside each other in one tensor [T, n * H]; empty without any."""

    hidden: Tensor
    captured: list[Tensor]


class StackPlan:
    """The weights of a stack as the native operator reads them, checked and gathered
    once. They must not be replaced afterwards, but may be written to.

    Attributes:
        num_layers, sizes: number of layers, and their sizes.
        words: int64; addresses of the weights, which this object keeps alive.
    """

    def __init__(
        self, layers: Sequence[StackLayer], final_norm: Tensor | None, sizes: StackSizes
    ) -> None:
        """
        Args:
            final_norm: [H], or None if runs return the stream unnormalised.

        Raises:
        RuntimeError: a weight contradicts `sizes`; names it.
        """
        from sglang_kernels import ops

        self.num_layers = len(layers)
        self.sizes = sizes
        self._weights = [tensor for layer in layers for tensor in layer.tensors()]
        self._weights.append(final_norm)
        self.words = torch.empty(
            ops.decoder_plan_words(len(layers)), dtype=torch.int64, device="cpu"
        )
        numbers = [len(layers), sizes.hidden, sizes.num_heads, sizes.num_kv_heads]
        numbers += [sizes.head_dim, sizes.inner, _ACTIVATIONS[sizes.activation]]
        numbers.append(sizes.first)
        ops.decoder_plan(self._weights, numbers, sizes.eps, sizes.scale, self.words)
        self._run = ops.decoder_stack

    def run(
        self,
        x: Tensor,
        *,
        k_caches: list[Tensor],
        v_caches: list[Tensor],
        positions: Tensor,
        out_cache_loc: Tensor,
        page_table: Tensor,
        row_index: Tensor | None,
        read_lens: Tensor | None,
        prefix_lens: Tensor | None,
        qo_indptr: Tensor | None,
        tree_mask: Tensor | None,
        page_size: int,
        first: Tensor | None = None,
        captured: tuple[int, ...] = (),
    ) -> StackRun:
        """Run all layers and the final norm on the stream x [T, H], which then holds
        the output of the last layer.

        Every layer stores the new K and V and attends once, over its own cache.

        Args:
            first: [T, `sizes.first`], input of the first layer's attention. Defaults to
                the normalised stream.
            captured: ascending numbers of the layers whose inputs are wanted; the
                number of layers means the output of the last one.
            k_caches, v_caches: of each layer, [slots, Hkv, D] float32.
            read_lens: for a decode. An extend passes None, and `prefix_lens` and
                `qo_indptr`. These and the rest are as in `layers.ops.attention` and
                `layers.ops.rope`.

        Raises:
            RuntimeError: an argument is not as described, or a slot is outside the
                pool. The message names it.
        """
        tokens = x.shape[0]
        scratch = x.new_empty(tokens * self.sizes.scratch_width)
        out = torch.empty_like(x)
        streams = x.new_empty(tokens, len(captured), x.shape[1]) if captured else None
        self._run(
            self.words,
            x,
            scratch,
            out,
            k_caches,
            v_caches,
            positions,
            out_cache_loc,
            page_table,
            row_index,
            prefix_lens if read_lens is None else read_lens,
            qo_indptr,
            tree_mask,
            page_size,
            first,
            captured,
            streams,
        )
        return StackRun(out, [] if streams is None else [streams.flatten(1)])


def run_stack(plan: StackPlan, x: Tensor, **call: object) -> StackRun:
    """`StackPlan.run` as an op, so that it can be wrapped."""
    return plan.run(x, **call)  # type: ignore[arg-type]
