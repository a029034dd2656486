"""Where the values of slots lie in the pages of a pool, and which are sampled.

`layout.Fingerprint` views a pool whose slots are runs of bytes, as kernels need it. An
engine may keep one allocation per layer, K beside V, or a slot's values scattered over
its page. Values are then found by offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kv_canary.layout import CHUNK_BYTES, Fingerprint, FingerprintMode, layer_places
from kv_canary.records import sample_place
from kv_canary.span import memory_span

WORDS_PER_CHUNK = CHUNK_BYTES // torch.int64.itemsize
MARK = (0x3F953FB33FA73F9D, 0x3FB93F8D3FAB3FA1)
"""A chunk that marks a new slot until the model stores there. Its values are finite in
every float format: attention reads a slot whose store does not happen in the same
forward, and NaN would reach the host's sampler, which may then end the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Where the values of a page's slots lie; the same for all layers of a group.

    Fields:
        page_stride: values from one page to the next.
        k, v: int64 [page_size, n], offsets of a slot's values from the page's first
            value.
    """

    page_stride: int
    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[0]


class _Runs(NamedTuple):
    """Where the values of K, or of V, of a page's slots lie: from `begin` on, slots
    `stride` apart, in runs of `width` values that are `step` apart."""

    begin: int
    stride: int
    width: int
    step: int


def paged_fingerprint(
    mode: FingerprintMode, layers: Sequence[Tensor], layout: PageLayout
) -> Fingerprint | None:
    """Create the fingerprint of layers as Triton's kernels read them, or return None if
    slots are no runs of whole chunks, or K and V have other ones.

    Args:
        layers: as for `SlotPlaces`.
    """
    first, size = layers[0], layers[0].element_size()
    k, v = (_find_runs(half, layout.page_stride) for half in (layout.k, layout.v))
    if k is None or v is None or k[1:] != v[1:] or layout.k.shape != layout.v.shape:
        return None
    places = [k.begin, v.begin, k.stride, k.width, k.step, layout.page_stride]
    begins = {layer.data_ptr() % CHUNK_BYTES for layer in layers}
    if any(place * size % CHUNK_BYTES for place in places) or begins != {0}:
        return None
    shape = (1, layout.k.shape[1])
    k_words, v_words = (
        first.as_strided(shape, (k.stride, 1), first.storage_offset() + half.begin)
        .view(torch.int64)
        .as_strided(
            (len(layers), 1, shape[1] * size // 8), (0, k.stride * size // 8, 1)
        )
        for half in (k, v)
    )
    steps = layer_places(layers)
    page_gap = layout.page_stride - layout.page_size * k.stride
    return Fingerprint(
        mode=mode,
        k_words=k_words,
        v_words=v_words,
        k_places=steps,
        v_places=steps,
        page_size=layout.page_size,
        page_gap=page_gap * size // 8,
        run_words=k.width * size // 8,
        run_gap=(k.step - k.width) * size // 8,
    )


def _find_runs(half: Tensor, page_stride: int) -> _Runs | None:
    offsets = half.cpu()
    slots, count = offsets.shape
    begin = int(offsets[0, 0])
    stride = int(offsets[1, 0]) - begin if slots > 1 else page_stride
    ends = (offsets[0].diff() != 1).nonzero()
    width = int(ends[0]) + 1 if len(ends) else count
    step = int(offsets[0, width]) - begin if width < count else width
    value = torch.arange(count)
    place = value // width * step + value % width
    due = begin + stride * torch.arange(slots)[:, None] + place
    return _Runs(begin, stride, width, step) if torch.equal(offsets, due) else None


class SlotPlaces:
    """The values of a group's slots, in every layer.

    Args:
        layers: a tensor per layer, of any shape, that begins with page 0; all of one
            dtype and device. Kept alive.

    Raises:
        ValueError: the layers or offsets are impossible, or do not form whole chunks.

    Attributes:
        flat: the memory of all layers as integers of the values' size.
        bases: int64 [layers], index in `flat` of each layer's first value.
        halves: offsets of K and of V, int64 [page_size, n] each.
        page_size, page_stride: as in `PageLayout`.
        mark: `MARK` for K and for V, as integers of the values' size.
    """

    def __init__(self, layers: Sequence[Tensor], layout: PageLayout) -> None:
        first, size = layers[0], layers[0].element_size()
        for half in (layout.k, layout.v):
            if half.shape[1] == 0 or half.shape[1] * size % CHUNK_BYTES:
                raise ValueError(
                    f"SlotBytes: a slot has {half.shape[1]} values of {size} bytes per "
                    f"layer; the canary fingerprints runs of {CHUNK_BYTES} bytes"
                )
        if layout.k.shape != layout.v.shape:
            raise ValueError(
                f"SlotBytes: K has offsets {list(layout.k.shape)}, V "
                f"{list(layout.v.shape)}"
            )
        self._layers = list(layers)
        device = first.device
        self.halves = (layout.k.to(device), layout.v.to(device))
        self.page_size, self.page_stride = layout.page_size, layout.page_stride
        self.flat, begin = memory_span(layers)
        bases = [layer.data_ptr() - begin for layer in layers]
        if any(base % size for base in bases):
            raise ValueError(f"SlotBytes: layers at {bases} bytes, values of {size}")
        self.bases = torch.tensor([base // size for base in bases], device=device)
        self._per_chunk = CHUNK_BYTES // size
        self._num_chunks = layout.k.shape[1] // self._per_chunk
        self.mark = torch.tensor(2 * MARK, device=device).view(self.flat.dtype)
        # Chunks of K and V beside each other: [chunks, page_size, values].
        self._chunks = torch.cat(
            [half.unflatten(1, (self._num_chunks, -1)) for half in self.halves], dim=2
        ).transpose(0, 1)
        self._first_values: list[int] = self.bases.tolist()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def marked_index(self, slots: Tensor, turn: int) -> Tensor:
        """Return the places in `flat` of a chunk of K and of V of slots [n], in the
        layer whose turn it is: [n, values]."""
        begin = self._first_values[turn % self.num_layers]
        offsets = self._chunks[turn // self.num_layers % self._num_chunks]
        page = slots // self.page_size
        offset = slots - page * self.page_size
        return (page * self.page_stride + begin)[:, None] + offsets[offset]

    def sampled(self, slots: Tensor, lineages: Tensor) -> tuple[Tensor, Tensor]:
        """Return (layer, chunk), [n] each, that are sampled of slots whose records have
        these lineages."""
        return sample_place(lineages, layers=self.num_layers, chunks=self._num_chunks)

    def sample_index(self, half: Tensor, slots: Tensor, lineages: Tensor) -> Tensor:
        """Return the places in `flat` of the sampled values, [n, values of a chunk]."""
        layer, chunk = self.sampled(slots, lineages)
        steps = torch.arange(self._per_chunk, device=slots.device)
        values = chunk[:, None] * self._per_chunk + steps
        offset = (slots % self.page_size)[:, None]
        page = slots // self.page_size
        begins = self.bases[layer] + page * self.page_stride
        return begins[:, None] + half[offset, values]
