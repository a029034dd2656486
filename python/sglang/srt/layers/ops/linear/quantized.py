"""Quantised weights in their stored form, and what their codes mean.

Owns the formats. Knows nothing of checkpoints, layers or sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.configs.quantization_config import WeightFormat

E4M3_MAX = 448.0
_TINY = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """What a code means.

    Fields:
        dtype: of the stored codes.
        per_item: codes in one element of `dtype`, along K.
        decode: codes [..., N, K / per_item] -> float32 [..., N, K], before scaling.
    """

    dtype: torch.dtype
    per_item: int
    decode: Callable[[Tensor], Tensor]


FORMATS: dict[WeightFormat, CodeFormat] = {
    "e4m3": CodeFormat(
        dtype=torch.float8_e4m3fn, per_item=1, decode=lambda codes: codes.float()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K] as codes with scales, or a stack of them [E, N, K].

    value[n, k] = decode(codes)[n, k] * scales[n // group_rows, k // group_columns]

    Fields:
        format: key of `FORMATS`.
        codes: [..., N, K / per_item], contiguous.
        scales: [..., ceil(N / group_rows), ceil(K / group_columns)] float32,
            contiguous.
        group_rows, group_columns: rows and columns that share a scale;
            `group_columns` K means all of a row.
        quantizes_inputs: products of many rows may round their inputs to 8 bits.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    group_rows: int
    group_columns: int
    quantizes_inputs: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight that this stands for."""
        *stack, columns = self.codes.shape
        return torch.Size((*stack, columns * FORMATS[self.format].per_item))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_scaled_by_row(self) -> bool:
        """Whether all columns of a row share a scale."""
        return self.group_columns >= self.shape[-1]

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """Return a view of the rows [first, last) of a matrix; `first` is a multiple
        of `group_rows`."""
        group = self.group_rows
        return QuantizedWeight(
            format=self.format,
            codes=self.codes[first:last],
            scales=self.scales[first // group : -(-last // group)],
            group_rows=group,
            group_columns=self.group_columns,
            quantizes_inputs=self.quantizes_inputs,
        )

    def expert(self, index: int) -> QuantizedWeight:
        """Return a view of one matrix of a stack."""
        return QuantizedWeight(
            format=self.format,
            codes=self.codes[index],
            scales=self.scales[index],
            group_rows=self.group_rows,
            group_columns=self.group_columns,
            quantizes_inputs=self.quantizes_inputs,
        )


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return the weight in float32, [..., N, K]. Its products are the oracle of every
    kernel that reads the codes."""
    return FORMATS[weight.format].decode(weight.codes) * expand_scales(weight)


def expand_scales(weight: QuantizedWeight) -> Tensor:
    """Return the scale of every weight, float32, broadcastable to [..., N, K]."""
    n, k = weight.shape[-2:]
    scales = weight.scales
    if weight.group_rows > 1:
        scales = scales.repeat_interleave(weight.group_rows, dim=-2)[..., :n, :]
    if weight.is_scaled_by_row:
        return scales
    return scales.repeat_interleave(weight.group_columns, dim=-1)[..., :k]


def quantize_rows(
    weight: Tensor, group_columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) in e4m3 with one scale per row and group of columns.

    The largest magnitude of a group becomes the largest code. The error of a value is
    at most 2**-4 of itself, or 2**-10 of the scale for codes below 2**-6.

    Args:
        weight: [..., N, K] of any floating-point dtype.
        group_columns: columns that share a scale; None means all.

    Returns:
        codes [..., N, K] float8_e4m3fn; scales [..., N, ceil(K / group)] float32, 1 for
        groups of zeros.
    """
    k = weight.shape[-1]
    group = min(group_columns or k, k)
    count = -(-k // group)
    padded = torch.nn.functional.pad(weight.float(), (0, count * group - k))
    groups = padded.unflatten(-1, (count, group))
    largest = groups.abs().amax(dim=-1)
    scales = torch.where(largest > 0, (largest / E4M3_MAX).clamp_min(_TINY), 1.0)
    codes = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.flatten(-2)[..., :k].to(torch.float8_e4m3fn), scales
