"""Quantised weights in their stored form, and what their codes mean.

Owns the formats. Knows nothing of checkpoints, layers or sharding.
"""

from __future__ import annotations

import dataclasses
import math
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
        per_item: codes in one element of `dtype`, along K; the low half of a byte is
            the first of two.
        scale_dtype: of stored scales: float32, or uint8 for exponents (`decode_e8m0`).
        decode: codes [..., N, K / per_item] -> float32 [..., N, K], before scaling.
    """

    dtype: torch.dtype
    per_item: int
    decode: Callable[[Tensor], Tensor]
    scale_dtype: torch.dtype = torch.float32


def _nibbles(codes: Tensor) -> Tensor:
    """Return the halves of bytes, the low one first: [..., N, K]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-number for number in _E2M1))
"""Values of the codes of MXFP4 (OCP Microscaling Formats 1.0)."""


def _decode_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor(E2M1, device=codes.device)
    return table[_nibbles(codes).int()]


def decode_e8m0(scales: Tensor) -> Tensor:
    """Return 2 ** (scale - 127) of uint8 scales, exactly; 255 is NaN."""
    powers = [*(2.0 ** (scale - 127) for scale in range(255)), math.nan]
    return torch.tensor(powers, device=scales.device)[scales.int()]


FORMATS: dict[WeightFormat, CodeFormat] = {
    "e4m3": CodeFormat(
        dtype=torch.float8_e4m3fn, per_item=1, decode=lambda codes: codes.float()
    ),
    "int4": CodeFormat(
        dtype=torch.uint8, per_item=2, decode=lambda codes: _nibbles(codes).float() - 8
    ),
    "mxfp4": CodeFormat(
        dtype=torch.uint8, per_item=2, decode=_decode_e2m1, scale_dtype=torch.uint8
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K] as codes with scales, or a stack of them [E, N, K].

    value[n, k] = (decode(codes) - zero)[n, k] * scale, where scale and zero are
    those at [n // group_rows, k // group_columns].

    Fields:
        format: key of `FORMATS`.
        codes: [..., N, K / per_item], contiguous.
        scales: [..., ceil(N / group_rows), ceil(K / group_columns)], contiguous.
        zeros: int8 like `scales`, or None for zeros; `group_rows` is then 1.
        columns: int64 [K], the input that column k multiplies, or None for k.
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
    zeros: Tensor | None = None
    columns: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight that this stands for."""
        *stack, columns = self.codes.shape
        return torch.Size((*stack, columns * FORMATS[self.format].per_item))

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    @property
    def is_scaled_by_row(self) -> bool:
        """Whether all columns of a row share a scale."""
        return self.group_columns >= self.shape[-1]

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """Return a view of the rows [first, last) of a matrix; `first` is a multiple
        of `group_rows`."""
        group, zeros = self.group_rows, self.zeros
        return dataclasses.replace(
            self,
            codes=self.codes[first:last],
            scales=self.scales[first // group : -(-last // group)],
            zeros=None if zeros is None else zeros[first:last],
        )

    def expert(self, index: int) -> QuantizedWeight:
        """Return a view of one matrix of a stack."""
        zeros = self.zeros
        return dataclasses.replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            zeros=None if zeros is None else zeros[index],
        )

    def in_order(self, x: Tensor) -> Tensor:
        """Return inputs [..., K] in the order of the columns."""
        return x if self.columns is None else x.index_select(-1, self.columns)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return the weight in float32, [..., N, K], with columns as they are stored. Its
    products are the oracle of every kernel that reads the codes."""
    values = FORMATS[weight.format].decode(weight.codes)
    if weight.zeros is not None:
        values = values - _spread(weight, weight.zeros)
    scales = weight.scales
    if scales.dtype == torch.uint8:
        scales = decode_e8m0(scales)
    return values * _spread(weight, scales)


def _spread(weight: QuantizedWeight, of_groups: Tensor) -> Tensor:
    """Return what belongs to every weight, broadcastable to [..., N, K]."""
    n, k = weight.shape[-2:]
    if weight.group_rows > 1:
        of_groups = of_groups.repeat_interleave(weight.group_rows, dim=-2)[..., :n, :]
    if weight.is_scaled_by_row:
        return of_groups
    return of_groups.repeat_interleave(weight.group_columns, dim=-1)[..., :k]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes [..., K] of 4 bits, uint8, in bytes: [..., K / 2]."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


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
