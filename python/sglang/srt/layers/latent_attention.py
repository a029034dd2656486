"""Attention over latents: one vector of a token is the key and value of all heads.

In the absorbed form each head's key projection is multiplied into its query before
attention, and its value projection into its result afterwards (DeepSeek-V2, 2024,
section 2.1). In the expanded form both multiply the latents instead. The pool holds the
same data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.head_linear.op import PackedHeads, head_linear, pack_heads
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.distributed.partition import Part
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.layernorm import RMSNorm


class OverLatents(RadixAttention):
    """`RadixAttention` whose K and V both come from one latent.

    Args:
        head_dim, v_head_dim: channels of a query and of a result.
        norm: norm of the latent.
        others: as in `RadixAttention`.
    """

    is_latent = True

    def __init__(
        self, *, head_dim: int, v_head_dim: int, norm: RMSNorm, **others: Any
    ) -> None:
        super().__init__(num_kv_heads=1, head_dim=head_dim, k_norm=norm, **others)
        self.v_head_dim = v_head_dim


class LatentAttention(OverLatents):
    """`RadixAttention` whose K is one head [latent | rotated key] and whose V is the
    first `latent.rank` channels of K.

    `qkv` is [T, (Hq + 1) * latent.width]: queries, whose last `latent.rope_dim`
    channels are not rotated yet, then K, neither normed nor rotated yet.

    Args:
        others: as in `OverLatents`.
    """

    def __init__(self, *, latent: LatentConfig, **others: Any) -> None:
        super().__init__(head_dim=latent.width, v_head_dim=latent.rank, **others)
        self.qkv_width = (self.num_heads + 1) * latent.width

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], self.num_heads + 1, self.head_dim)
        k = heads[:, self.num_heads :]
        return heads[:, : self.num_heads], k, k[..., : self.v_head_dim]


class ExpandedAttention(OverLatents):
    """The `LatentAttention` of a layer in its expanded form, for forwards in which
    `is_chosen`: queries come straight from the projection, results are per head.

    Only `attend` may be called: q is [T, Hq, query_dim], its last `rope_dim` channels
    not rotated yet, k [T, 1, latent.width] and v its first channels, as in
    `LatentAttention`.

    Args:
        projection: projection of the same heads.
        others: as in `OverLatents`.
    """

    def __init__(
        self, *, latent: LatentConfig, projection: LatentProjection, **others: Any
    ) -> None:
        super().__init__(
            head_dim=latent.query_dim, v_head_dim=latent.value_dim, **others
        )
        self._latent = latent
        self._projection = projection

    @property
    def weight(self) -> Tensor:
        """The projection's whole matrix, which is kept on CUDA."""
        weight = self._projection.weight
        assert weight is not None, "the matrix was packed for the absorbed form"
        return weight.data

    def is_chosen(self, forward_batch: ForwardBatch) -> bool:
        """Whether the backend expands latents in this forward. A captured stack always
        uses the absorbed form."""
        context = get_forward_context()
        is_captured = context.attention_breaks is not None
        expands = context.attn_backend.expands
        return not is_captured and expands(self._latent, forward_batch)


class LatentProjection(Module):
    """A head's projections of the latent to keys and to values, `kv_b_proj`.

    A rank holds the projections of its own heads. Once loaded, the checkpoint's matrix
    is cut in two.

    Args:
        heads: this rank's part of the heads.
    """

    def __init__(self, latent: LatentConfig, heads: Part) -> None:
        super().__init__()
        outputs = heads.scaled(latent.nope_dim + latent.value_dim)
        self.weight: LoadableParameter | None = LoadableParameter.create(
            torch.empty(outputs.size, latent.rank), {None: outputs}
        )
        self._latent = latent
        self._num_heads = heads.size
        self._keys: Tensor | PackedHeads | None = None
        self._values: Tensor | PackedHeads | None = None

    def process_weights_after_loading(self) -> None:
        """Cut keys from values, and drop the parts of the matrix that were copied."""
        assert self.weight is not None
        heads = self.weight.data.view(self._num_heads, -1, self._latent.rank)
        sizes = [self._latent.nope_dim, self._latent.value_dim]
        keys, values = heads.split_with_sizes(sizes, dim=1)
        self._keys = pack_heads(keys.transpose(1, 2))
        self._values = pack_heads(values)
        if isinstance(self._keys, PackedHeads):
            self.weight = None

    def absorb(self, queries: Tensor, *, out: Tensor) -> None:
        """Map queries [T, H, nope_dim] into latent space, [T, H, rank]."""
        assert self._keys is not None
        head_linear(queries, self._keys, out=out)

    def values(self, attended: Tensor) -> Tensor:
        """Map averages of latents [T, H, rank] to head results [T, H, value_dim]."""
        assert self._values is not None
        return head_linear(attended, self._values)


def half_split_order(dim: int) -> Tensor:
    """Return the channels of interleaved pairs in half-split order: 0, 2, ..., 1, 3,
    ...; int64 [dim].

    Reordering the channels of queries and keys alike leaves scores unchanged.
    """
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))
