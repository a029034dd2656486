"""The pool as the canary sees it, and which of its bytes are fingerprinted.

Knows tensors and their strides. Knows no engine's pool class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

CHUNK_BYTES = 16
"""Bytes that `partial` samples. A slot's bytes are a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV lies in the same slots.

    Fields:
        name: name of the group, for reports ("full", "swa", "latent").
        k: [layers, slots, ...]; a slot's bytes in one layer are contiguous, other
            strides are free. The only tensor of a latent pool.
        v: like `k`, or None in a latent pool.
        window: tokens that a query of these layers sees, or None for all. Views of
            their reads begin there (`KVReadView.first_position`).
    """

    name: str
    k: Tensor
    v: Tensor | None = None
    window: int | None = None

    def sources(self) -> tuple[Tensor, Tensor]:
        """Return the tensors of both halves of a fingerprint; a latent is cut in two.

        Raises:
            ValueError: the tensors do not match, or a latent cannot be cut.
        """
        if self.v is not None:
            if self.k.shape[:2] != self.v.shape[:2]:
                raise ValueError(
                    f"group {self.name!r}: K has layers and slots "
                    f"{list(self.k.shape[:2])}, V {list(self.v.shape[:2])}"
                )
            return self.k, self.v
        size = self.k.shape[-1]
        # Both halves consist of whole chunks.
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
        groups: layers by the slots that they share. Only one group is supported.
        page_size: slots per page.
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
        """Slots of the pool, including the scratch page."""
        return self.groups[0].k.shape[1]

    @property
    def device(self) -> torch.device:
        return self.groups[0].k.device


class FingerprintMode(IntEnum):
    """Which bytes of a slot its fingerprint covers, and when they are hashed again.

    PARTIAL: 16 bytes of K and of V in one layer, on every read. ROTATE: all bytes, but
        a read
    only compares slots whose turn it is. ALL: all bytes on every read.
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
    which (slot + L + i) % period is 0 for some i < n. So while the row grows by
    `period` tokens, in steps of any size, each slot gets its turn.

    Fields:
        k_places, v_places: int64 [layers], words from the first layer to each, if
            layers are not equally spaced; the stride of the first dimension is then
            meaningless. Both or neither. Only Triton's kernels read them.
        page_size, page_gap: slots of a page, and words between the last slot of a page
            and the first one of the next; run_words, run_gap: words of K, or of V, of
            one slot that lie together, and words of others between two such runs. The
            words' strides then count for page 0 and its slots' first runs alone. 0 if
            there are no such pages or runs. Only Triton's kernels read them.
        sums: int32 [slots, layers, KV heads], contiguous: `head_sums` of each slot's
            content since its record was written, for attention that compares them, or
            None. If given, all bytes are compared with them, and records hold no
            fingerprints. The torch and Triton launches keep them.
    """

    mode: FingerprintMode = FingerprintMode.NONE
    k_words: Tensor | None = None
    v_words: Tensor | None = None
    rotation_period: int = 1
    k_places: Tensor | None = None
    v_places: Tensor | None = None
    page_size: int = 0
    page_gap: int = 0
    run_words: int = 0
    run_gap: int = 0
    sums: Tensor | None = None

    def strided_words(self) -> tuple[Tensor | None, Tensor | None]:
        """Return `k_words` and `v_words`, whose strides say where each layer is.

        Raises:
            ValueError: layers are not equally spaced, or pages have gaps.
        """
        if self.k_places is not None or self.page_size:
            raise ValueError(
                "layers at distances that differ, and pages with gaps, are read by "
                "Triton's kernels alone"
            )
        return self.k_words, self.v_words


NO_FINGERPRINT = Fingerprint()


def require_samples(source: Fingerprint) -> None:
    """Raise ValueError if all bytes are to be hashed, of states."""
    if source.mode in (FingerprintMode.ROTATE, FingerprintMode.ALL):
        raise ValueError(
            f"a fingerprint of states in mode {source.mode.name}: only samples are "
            "hashed; all bytes are compared by whoever folds (`StateRows.marks`)"
        )


def create_fingerprint(
    mode: FingerprintMode, layout: PoolLayout, *, rotation_period: int = 1024
) -> Fingerprint:
    """Create the fingerprint of a pool's bytes, viewed without a copy.

    Raises:
        ValueError: a slot's bytes in one layer are not one run of 16-byte chunks, K and
            V differ in layers or slots, or the period is not positive.
    """
    if mode is FingerprintMode.NONE:
        return NO_FINGERPRINT
    if rotation_period < 1:
        raise ValueError(f"rotation_period={rotation_period} must be positive")
    k, v = layout.groups[0].sources()
    return Fingerprint(
        mode=mode,
        k_words=_as_words("k_buffer", k),
        v_words=_as_words("v_buffer", v),
        rotation_period=rotation_period,
    )


def scattered_fingerprint(
    mode: FingerprintMode, halves: Sequence[Sequence[Tensor]], page_size: int, name: str
) -> Fingerprint:
    """Create the fingerprint of a pool whose layers lie anywhere.

    Args:
        halves: layers of K and of V, or of a latent; each [slots, ...]. All layers of a
            half have one shape, strides and dtype.
        name: name of the group, for errors.

    Raises:
        ValueError: as in `create_fingerprint`, or layers are not a multiple of 16 bytes
            apart.
    """
    stacks = [half[0].flatten(1).expand(len(half), -1, -1) for half in halves]
    group = LayerGroup(name=name, k=stacks[0], v=stacks[1] if stacks[1:] else None)
    source = create_fingerprint(mode, PoolLayout(groups=[group], page_size=page_size))
    return replace(
        source, k_places=layer_places(halves[0]), v_places=layer_places(halves[-1])
    )


def layer_places(layers: Sequence[Tensor]) -> Tensor:
    """Return int64 [layers]: words from the first layer to each."""
    begin = layers[0].data_ptr()
    steps = [layer.data_ptr() - begin for layer in layers]
    odd = [step for step in steps if step % CHUNK_BYTES]
    if odd:
        raise ValueError(
            f"layers lie {odd[0]} bytes apart, not a multiple of {CHUNK_BYTES}"
        )
    return torch.tensor([step // 8 for step in steps], device=layers[0].device)


def _as_words(name: str, buffer: Tensor) -> Tensor:
    slot = buffer[0, 0]
    strides = [s * buffer.element_size() for s in (buffer.stride(0), buffer.stride(1))]
    is_whole = slot.is_contiguous() and slot.nbytes % CHUNK_BYTES == 0
    if not is_whole or any(s % CHUNK_BYTES for s in strides):
        raise ValueError(
            f"{name}: a slot has {slot.nbytes} bytes per layer at strides {strides}; "
            "the canary fingerprints runs of 16 bytes"
        )
    return buffer.flatten(2).view(torch.int64)
