"""The pool as the canary sees it, and which of its bytes are fingerprinted.

Knows tensors and their strides; knows no engine's pool class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

CHUNK_BYTES = 16
"""Bytes that `partial` samples, and of which a slot's bytes are made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV lies in the same slots.

    Fields:
        name: of the group, for reports ("full", "swa", "latent").
        k: [layers, slots, ...]; a slot's bytes of one layer are contiguous, other
            strides are free. In a latent pool its only tensor.
        v: like `k`; None: a latent pool.
        window: tokens that a query of these layers sees; None: all. Views of their
            reads begin there (`KVReadView.first_position`).
    """

    name: str
    k: Tensor
    v: Tensor | None = None
    window: int | None = None

    def sources(self) -> tuple[Tensor, Tensor]:
        """The tensors of both halves of a fingerprint; a latent is cut in two.

        Raises:
            ValueError: the tensors do not belong together, or a latent cannot be cut.
        """
        if self.v is not None:
            if self.k.shape[:2] != self.v.shape[:2]:
                raise ValueError(
                    f"group {self.name!r}: K has layers and slots "
                    f"{list(self.k.shape[:2])}, V {list(self.v.shape[:2])}"
                )
            return self.k, self.v
        size = self.k.shape[-1]
        # Both halves are runs of whole chunks.
        half = size * self.k.element_size() // CHUNK_BYTES // 2
        half = half * CHUNK_BYTES // self.k.element_size()
        if half == 0 or self.k.dim() != 3:
            raise ValueError(
                f"group {self.name!r}: a latent of shape {list(self.k.shape)} and "
                f"{self.k.element_size()} bytes per value; expected [layers, slots, "
                f"dim] of at least {2 * CHUNK_BYTES} bytes per slot"
            )
        return self.k[..., :half], self.k[..., half:]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """A KV pool: slots in pages, and the layers that store into them.

    A slot is `page * page_size + offset`; page 0 is scratch, which padded rows use.

    Fields:
        groups: layers by the slots that they share. One group at present.
        page_size: slots of a page.
    """

    groups: Sequence[LayerGroup]
    page_size: int = 1

    def __post_init__(self) -> None:
        if len(self.groups) != 1:
            raise ValueError(
                f"PoolLayout: {len(self.groups)} groups; one canary checks one group"
            )
        if self.page_size < 1:
            raise ValueError(f"PoolLayout: page_size={self.page_size} is not positive")
        group = self.groups[0]
        if group.k.dim() < 3 or group.k.shape[1] % self.page_size:
            raise ValueError(
                f"PoolLayout: K of group {group.name!r} has shape "
                f"{list(group.k.shape)}; expected [layers, slots, ...] with a multiple "
                f"of page_size={self.page_size} slots"
            )

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the scratch page included."""
        return self.groups[0].k.shape[1]

    @property
    def device(self) -> torch.device:
        return self.groups[0].k.device


class FingerprintMode(IntEnum):
    """Which bytes of a slot its fingerprint covers, and when they are hashed again.

    PARTIAL: 16 bytes of K and of V in one layer, on every read. ROTATE: all bytes, on
    read those of slots whose turn it is. ALL: all bytes on every read.
    """

    NONE = 0
    PARTIAL = 1
    ROTATE = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The pool's bytes as int64 words [layers, slots, words], any strides of the first
    two dimensions.

    In ROTATE a row of prefix length L that can grow by n tokens rehashes the slots for
    which (slot + L + i) % period is 0 for some i < n: while the row grows by `period`
    tokens, whatever its steps, each slot's turn comes.

    Fields:
        k_places, v_places: int64 [layers], words from the first layer to each, where
            layers lie at distances that differ; the stride of the first dimension then
            says nothing. Both or neither; Triton's kernels alone read them.
        sums: int32 [slots, layers, KV heads], contiguous, `head_sums` of what lies in
            each slot since its record was written, for attention that compares them;
            None: none does. They are then what bytes are compared with everywhere, and
            records hold no fingerprints. Kept by the torch and Triton launches.
    """

    mode: FingerprintMode = FingerprintMode.NONE
    k_words: Tensor | None = None
    v_words: Tensor | None = None
    rotation_period: int = 1
    k_places: Tensor | None = None
    v_places: Tensor | None = None
    sums: Tensor | None = None

    def strided_words(self) -> tuple[Tensor | None, Tensor | None]:
        """`k_words` and `v_words`, whose strides say where each layer is.

        Raises:
            ValueError: they do not.
        """
        if self.k_places is not None:
            raise ValueError(
                "layers at distances that differ are read by Triton's kernels alone"
            )
        return self.k_words, self.v_words


NO_FINGERPRINT = Fingerprint()


def create_fingerprint(
    mode: FingerprintMode, layout: PoolLayout, *, rotation_period: int = 1024
) -> Fingerprint:
    """Fingerprints of a pool's bytes, viewed without a copy.

    Raises:
        ValueError: a slot's bytes of one layer are not one run of 16-byte chunks, K and
            V differ in layers or slots, or the period is not positive.
    """
    if mode is FingerprintMode.NONE:
        return NO_FINGERPRINT
    if rotation_period < 1:
        raise ValueError(f"rotation_period={rotation_period} must be positive")
    k, v = layout.groups[0].sources()
    return Fingerprint(
        mode=mode,
        k_words=_words_of("k_buffer", k),
        v_words=_words_of("v_buffer", v),
        rotation_period=rotation_period,
    )


def scattered_fingerprint(
    mode: FingerprintMode, halves: Sequence[Sequence[Tensor]], page_size: int, name: str
) -> Fingerprint:
    """Fingerprints of a pool whose layers lie anywhere.

    Args:
        halves: layers of K and of V, or of a latent alone; each [slots, ...], all of a
            half of one shape, strides and type.
        name: of the group, for errors.

    Raises:
        ValueError: as `create_fingerprint`, or layers are not 16 bytes apart.
    """
    stacks = [half[0].flatten(1).expand(len(half), -1, -1) for half in halves]
    group = LayerGroup(name=name, k=stacks[0], v=stacks[1] if stacks[1:] else None)
    source = create_fingerprint(mode, PoolLayout(groups=[group], page_size=page_size))
    return replace(
        source, k_places=_places_of(halves[0]), v_places=_places_of(halves[-1])
    )


def _places_of(layers: Sequence[Tensor]) -> Tensor:
    """int64 [layers]: words from the first to each."""
    begin = layers[0].data_ptr()
    steps = [layer.data_ptr() - begin for layer in layers]
    odd = [step for step in steps if step % CHUNK_BYTES]
    if odd:
        raise ValueError(
            f"layers lie {odd[0]} bytes apart, no multiple of {CHUNK_BYTES}"
        )
    return torch.tensor([step // 8 for step in steps], device=layers[0].device)


def _words_of(name: str, buffer: Tensor) -> Tensor:
    slot = buffer[0, 0]
    strides = [s * buffer.element_size() for s in (buffer.stride(0), buffer.stride(1))]
    is_whole = slot.is_contiguous() and slot.nbytes % CHUNK_BYTES == 0
    if not is_whole or any(s % CHUNK_BYTES for s in strides):
        raise ValueError(
            f"{name}: a slot has {slot.nbytes} bytes per layer at strides {strides}; "
            "the canary fingerprints runs of 16 bytes"
        )
    return buffer.flatten(2).view(torch.int64)
