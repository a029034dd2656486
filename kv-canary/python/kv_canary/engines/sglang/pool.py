"""SGLang's KV pool: its layers, by strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kv_canary.engines.hooks import Refusal
from kv_canary.layout import (
    NO_FINGERPRINT,
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
    scattered_fingerprint,
)
from kv_canary.slot_bytes import SlotBytes
from kv_canary.slot_places import PageLayout
from kv_canary.span import stack_layers

FULL, LATENT = "full", "latent"
_ROW_MAJOR = (None, "nhd")


ROTATION_STEPS = 128
"""Tokens of a row in which `rotate` compares each of its slots once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPool:
    """A pool as its canary needs it.

    Fields:
        group: "full", or "latent" if K and V are one.
        tensors: its layers' tensors, kept alive for the fingerprint.
        num_slots: number of slots, including the scratch page.
        fingerprint: covers layers at equal distances, and on a GPU all layers;
            scattered: covers other layers on the CPU.
    """

    group: str
    tensors: Sequence[Tensor]
    num_slots: int
    page_size: int
    fingerprint: Fingerprint
    scattered: SlotBytes | None

    @property
    def num_layers(self) -> int:
        return len(self.tensors) // (1 if self.group == LATENT else 2)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device


def read_pool(pool: Any, mode: FingerprintMode) -> SeenPool:
    """Read the pool of a model.

    Raises:
        Refusal: a slot is not one row of each layer's tensors.
    """
    name = type(pool).__name__
    if getattr(pool, "post_capture_active", False):
        raise Refusal(f"{name}: its memory is only there after the graphs' capture")
    if getattr(pool, "k_scale_buffer", None) is not None:
        raise Refusal(f"{name}: scales beside K and V are not fingerprinted")
    layout = getattr(pool, "kv_cache_layout", None)
    if layout not in _ROW_MAJOR:
        raise Refusal(f"{name}: looked for a slot per row, found layout {layout!r}")
    k, v = _tensors(pool, "k_buffer"), _tensors(pool, "v_buffer")
    latent = _tensors(pool, "kv_buffer")
    if k and v:
        halves = {"K": k, "V": v}
    elif latent and not k and not v:
        halves = {"the latent": latent}
    else:
        raise Refusal(
            f"looked for a pool with k_buffer and v_buffer, or with kv_buffer, found "
            f"{name}: sliding-window, hybrid and sparse pools are not seen"
        )
    slots, page_size = int(pool.size) + int(pool.page_size), int(pool.page_size)
    for what, layers in halves.items():
        _check(name, what, layers, slots)
    group = FULL if "K" in halves else LATENT
    tensors = [layer for layers in halves.values() for layer in layers]
    fingerprint, scattered = NO_FINGERPRINT, None
    if mode is not FingerprintMode.NONE:
        stacks = [stack_layers([x.flatten(1) for x in h]) for h in halves.values()]
        try:
            if all(stack is not None for stack in stacks):
                fingerprint = _fingerprint(mode, group, stacks, page_size)
            elif tensors[0].is_cpu:
                scattered = _scattered(mode, group, tensors, page_size)
            else:
                fingerprint = scattered_fingerprint(
                    mode, list(halves.values()), page_size, group
                )
        except ValueError as error:
            raise Refusal(f"{name}: {error}") from error
    return SeenPool(
        group=group,
        tensors=tensors,
        num_slots=slots,
        page_size=page_size,
        fingerprint=fingerprint,
        scattered=scattered,
    )


def _fingerprint(
    mode: FingerprintMode, group: str, stacks: Sequence[Tensor | None], page_size: int
) -> Fingerprint:
    k, v = stacks[0], stacks[1] if group == FULL else None
    assert k is not None
    layers = LayerGroup(name=group, k=k, v=v)
    layout = PoolLayout(groups=[layers], page_size=page_size)
    return create_fingerprint(mode, layout, rotation_period=ROTATION_STEPS)


def _scattered(
    mode: FingerprintMode, group: str, tensors: Sequence[Tensor], page_size: int
) -> SlotBytes:
    """Return bytes by offsets: each tensor of K and of V is a layer, cut in two."""
    step, size = tensors[0].stride(0), tensors[0][0].numel()
    offsets = torch.arange(page_size)[:, None] * step + torch.arange(size)
    pages = PageLayout(
        page_stride=page_size * step,
        k=offsets[:, : size // 2],
        v=offsets[:, size // 2 :],
    )
    halves = 2 if group == FULL else 1
    return SlotBytes(
        tensors,
        pages,
        mode,
        num_slots=len(tensors[0]),
        numbers=[*range(len(tensors) // halves)] * halves,
    )


def _tensors(pool: Any, name: str) -> list[Tensor]:
    found = getattr(pool, name, None)
    return list(found) if isinstance(found, list | tuple) else []


def _check(pool: str, what: str, layers: Sequence[Tensor], slots: int) -> None:
    first = layers[0]
    kind = (first.dtype, first.shape, first.stride())
    for number, layer in enumerate(layers):
        found = (layer.dtype, layer.shape, layer.stride())
        if found != kind or layer.dim() < 2 or layer.shape[0] != slots:
            raise Refusal(
                f"{pool}: looked for {what} of layer {number} with {slots} slots like "
                f"{kind}, found {found}"
            )
    if not first[0].is_contiguous():
        raise Refusal(f"{pool}: a slot of {what} is not one run of bytes")
