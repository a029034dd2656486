"""Finds layers of a stack that are alike, that is, launch the same kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, nn

# A trait that tells apart layers that are otherwise alike.
_NUMBER = "layer_id"


def one_of_each_kind(layers: Sequence[nn.Module]) -> frozenset[int]:
    """Return the first layer, which nothing precedes, and the first of each kind among
    the others."""
    kinds: dict[Hashable, int] = {}
    for i, layer in enumerate(layers[1:], start=1):
        kinds.setdefault(_kind(layer), i)
    return frozenset(kinds.values()) | frozenset(range(min(1, len(layers))))


def _kind(layer: nn.Module) -> Hashable:
    """Return everything a layer is made of, except the values of tensors."""
    return tuple(
        (name, type(module), tuple(_traits(module)))
        for name, module in layer.named_modules()
    )


def _traits(module: nn.Module) -> list[Hashable]:
    found: list[Hashable] = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, Tensor):
            found.append((name, value.shape, value.dtype))
        elif name != _NUMBER and isinstance(value, (bool, int, float, str, type(None))):
            found.append((name, value))
    for name, tensor in module.named_parameters(recurse=False):
        found.append((name, tensor.shape, tensor.dtype))
    return found
