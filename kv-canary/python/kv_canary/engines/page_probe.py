"""Learns where an engine stores a token's K and V, from its own store.

Shapes of KV tensors are ambiguous (two heads look like K and V) and say nothing about
packing inside a page, so one token is stored at each offset of an empty page.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kv_canary.engines.hooks import Refusal
from kv_canary.slot_places import PageLayout

Store = Callable[[Tensor, Tensor, Tensor], None]
"""Stores the two parts of one token, as keys and values [1, heads, size], in slots
[1]."""

_PAGE = 1
"""The page that is tried; page 0 has no owner."""


def page_axis(kv: Tensor, num_pages: int, name: str) -> int:
    """Return the dimension of `kv` that counts pages.

    Raises:
        Refusal: there is none, or more than one.
    """
    axes = [axis for axis, size in enumerate(kv.shape) if size == num_pages]
    if axes and (len(axes) == 1 or axes[0] == 0):
        return axes[0]
    raise Refusal(
        f"layer {name}: looked for one dimension of {num_pages} blocks, found a KV "
        f"tensor of shape {list(kv.shape)}"
    )


def learn_pages(
    kv: Tensor,
    store: Store,
    *,
    name: str,
    axis: int,
    page_size: int,
    k_like: Tensor,
    v_like: Tensor,
) -> PageLayout:
    """Learn the page layout of `kv`. Its page 1 is empty and stays so.

    Args:
        k_like, v_like: [1, heads, size], samples of what is stored.

    Raises:
        Refusal: a store does not write one token's values, or two tokens share values.
    """
    page = kv.select(axis, _PAGE)
    k, v = (
        _learn(page, store, part, name=name, page_size=page_size)
        for part in (
            (torch.ones_like(k_like), torch.zeros_like(v_like)),
            (torch.zeros_like(k_like), torch.ones_like(v_like)),
        )
    )
    _require_apart(torch.cat([k, v], dim=1), name)
    return PageLayout(page_stride=kv.stride(axis), k=k, v=v)


def learn_latent_pages(
    kv: Tensor,
    store: Store,
    *,
    name: str,
    axis: int,
    page_size: int,
    parts: tuple[Tensor, Tensor],
) -> PageLayout:
    """Learn the page layout of a latent, of which there is one per token. Its values
    take the places of K and V by halves, because their parts have different sizes.

    Args:
        parts: samples of what is stored, [1, size] each: the latent, and what is
            rotated by position.

    Raises:
        Refusal: as `learn_pages`, or the number of values is odd.
    """
    page = kv.select(axis, _PAGE)
    ones = (torch.ones_like(parts[0]), torch.ones_like(parts[1]))
    places = _learn(page, store, ones, name=name, page_size=page_size)
    _require_apart(places, name)
    if places.shape[1] % 2:
        raise Refusal(f"layer {name}: looked for an even number of values of a latent")
    k, v = (half.contiguous() for half in places.chunk(2, dim=1))
    return PageLayout(page_stride=kv.stride(axis), k=k, v=v)


def _learn(
    page: Tensor,
    store: Store,
    parts: tuple[Tensor, Tensor],
    *,
    name: str,
    page_size: int,
) -> Tensor:
    """Return the offsets in a page of the values of `parts` that are 1, for each slot:
    int64 [page_size, n]."""
    before, found = page.clone(), []
    due = sum(int(part.count_nonzero()) for part in parts)
    try:
        for offset in range(page_size):
            page.zero_()
            slot = torch.tensor([_PAGE * page_size + offset], device=page.device)
            store(*parts, slot)
            found.append(_value_offsets(page))
            if len(found[-1]) != due:
                raise Refusal(
                    f"layer {name}: looked for a store of {due} values at offset "
                    f"{offset} of a block, found {len(found[-1])}"
                )
    finally:
        page.copy_(before)
    return torch.stack(found)


def _require_apart(offsets: Tensor, name: str) -> None:
    if offsets.unique().numel() != offsets.numel():
        raise Refusal(f"layer {name}: tokens of a block share bytes; looked for none")


def _value_offsets(page: Tensor) -> Tensor:
    """Return places of nonzero values, counted from the page's first value,
    ascending."""
    strides = torch.tensor(page.stride(), device=page.device)
    # As numbers, because not every 8-bit float supports `nonzero`.
    plain = page if page.element_size() > 1 else page.view(torch.uint8)
    places: Tensor = (plain.nonzero() * strides).sum(dim=1)
    return places.sort().values
