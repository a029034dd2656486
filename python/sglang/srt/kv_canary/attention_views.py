"""Comparison of the views of K and V that attention is given: with the pool's tensors,
and with the layers that read them.

`AttentionCalls` sees that each layer gets its own view at every call, by identity. What
that view shows is compared here, once: the pool hands out the same objects for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sglang.srt.layers.latent_attention import ExpandedAttention
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kv_canary.layout import PoolLayout
    from sglang.srt.kv_canary.groups import PoolGroup
    from sglang.srt.mem_cache.memory_pool import KVCache


def check_views(pool: KVCache, groups: Iterable[PoolGroup], model: nn.Module) -> None:
    """Check the views that `pool` gives to the layers of `model`.

    K must be the layer's part of the tensor whose bytes the canary compares, and V the
    same of its own tensor or, in a pool of latents, the first channels of K.

    Args:
        groups: the canary's groups of the pool.

    Raises:
        RuntimeError: a view is another part of the pool, or has other heads or channels
            than its layer. The message names the layer.
    """
    due = {layer: views for group in groups for layer, views in _due_views(group)}
    for layer, (due_k, due_v) in due.items():
        k, v = pool.get_kv_buffer(layer)
        _check_view("K", layer, k, due_k)
        # As many channels as the layer says, which is compared below.
        _check_view("V", layer, v, due_v[..., : v.shape[-1]])
    for module in model.modules():
        if isinstance(module, RadixAttention) and not isinstance(
            module, ExpandedAttention
        ):
            k, v = pool.get_kv_buffer(module.layer_id)
            heads = module.num_kv_heads
            _check_shape("K", module.layer_id, k, (heads, module.head_dim))
            _check_shape("V", module.layer_id, v, (heads, module.v_head_dim))


def _due_views(group: PoolGroup) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each layer of a group with its part of K and V; V of a latent is whole."""
    layout: PoolLayout = group.buffers.layout
    (tensors,) = layout.groups
    for index, layer in enumerate(group.kv.layers):
        k = tensors.k[index]
        if tensors.v is None:
            # All heads read the one latent.
            latent = k.unsqueeze(1)
            yield layer, (latent, latent)
        else:
            yield layer, (k, tensors.v[index])


def _check_view(name: str, layer: int, view: Tensor, due: Tensor) -> None:
    for what, found, expected in (
        ("address", view.data_ptr(), due.data_ptr()),
        ("shape", list(view.shape), list(due.shape)),
        ("strides", list(view.stride()), list(due.stride())),
        ("dtype", view.dtype, due.dtype),
    ):
        if found != expected:
            raise RuntimeError(
                f"KV canary: {name} of layer {layer} is given to attention with "
                f"{what} {found}; in the pool it has {expected}"
            )


def _check_shape(name: str, layer: int, view: Tensor, due: tuple[int, int]) -> None:
    if tuple(view.shape[1:]) != due:
        raise RuntimeError(
            f"KV canary: {name} of layer {layer} has {view.shape[1]} heads of "
            f"{view.shape[2]} channels in the pool; its attention has {due[0]} of "
            f"{due[1]}"
        )
