"""Quantised weights in their stored form, and what their codes mean.

Owns the formats. Knows nothing of checkpoints, layers or sharding.
"""

from __future__ import annotations

import dataclasses
import functools
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


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-number for number in _E2M1))
"""Values of the codes of MXFP4 (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """What a code means.

    Fields:
        dtype: of the stored codes, one byte.
        values: value of each code, before scaling: 256 of them, or 16 if a byte holds
            two codes, the low half first.
        scale_dtype: of stored scales: float32, or uint8 for exponents (`decode_e8m0`).
    """

    dtype: torch.dtype
    values: tuple[float, ...]
    scale_dtype: torch.dtype = torch.float32

    @property
    def per_item(self) -> int:
        """Codes in a byte, along K."""
        return 2 if len(self.values) == 16 else 1

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes [..., M], float32 [..., M * per_item]."""
        table = _byte_table(self.values, str(codes.device))
        # An index is several times faster on a CPU than a conversion from 8 bits.
        places = codes.view(torch.uint8).reshape(-1).int()
        found = table.index_select(0, places).view(torch.float32)
        return found.view(*codes.shape[:-1], codes.shape[-1] * self.per_item)


@functools.cache
def _byte_table(values: tuple[float, ...], device: str) -> Tensor:
    """Return what each byte stands for: float32 [256], or pairs of float32 as float64
    [256], which are copied as one."""
    numbers = torch.tensor(values)
    if len(values) == 256:
        return numbers.to(device)
    low, high = numbers.repeat(16), numbers.repeat_interleave(16)
    return torch.stack((low, high), dim=1).view(torch.float64)[:, 0].to(device)


def decode_e8m0(scales: Tensor) -> Tensor:
    """Return 2 ** (scale - 127) of uint8 scales, exactly; 255 is NaN."""
    powers = [*(2.0 ** (scale - 127) for scale in range(255)), math.nan]
    return torch.tensor(powers, device=scales.device)[scales.int()]


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FORMATS: dict[WeightFormat, CodeFormat] = {
    "e4m3": CodeFormat(dtype=torch.float8_e4m3fn, values=tuple(_E4M3.tolist())),
    "int4": CodeFormat(dtype=torch.uint8, values=tuple(map(float, range(-8, 8)))),
    "mxfp4": CodeFormat(dtype=torch.uint8, values=E2M1, scale_dtype=torch.uint8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K] as codes with scales, or a stack of them [E, N, K].

    value[n, k] = (decode(codes) - zero)[n, k] * scale, where scale and zero are
    those at [n // group_rows, k // group_columns].

    Fields:
        format: key of `FORMATS`.
        codes: [..., N, K / per_item], contiguous. The halves of byte b of a row are
            its columns c and c + run, with c = b // run * 2 * run + b % run.
        scales: [..., ceil(N / group_rows), ceil(K / group_columns)], contiguous.
        zeros: int8 like `scales`, or None for zeros; `group_rows` is then 1.
        columns: int64 [K], the input that column k multiplies, or None for k.
        group_rows, group_columns: rows and columns that share a scale;
            `group_columns` K means all of a row.
        quantizes_inputs: products of many rows may round their inputs to 8 bits.
        run: columns between the halves of a byte; 1 as in checkpoints. Kernels read
            the inputs of a run at once.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    group_rows: int
    group_columns: int
    quantizes_inputs: bool = False
    zeros: Tensor | None = None
    columns: Tensor | None = None
    run: int = 1

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


def dequantize(weight: QuantizedWeight | QuantizedPanels) -> Tensor:
    """Return the weight in float32, [..., N, K], with columns as they are stored. Its
    products are the oracle of every kernel that reads the codes."""
    if isinstance(weight, QuantizedPanels):
        return (
            weight.dequantize(0, len(weight.codes))
            .transpose(1, 2)
            .flatten(0, 1)[: weight.n]
        )
    values = FORMATS[weight.format].decode(weight.codes)
    if weight.run > 1:
        pairs = values.unflatten(-1, (-1, weight.run, 2))
        values = pairs.transpose(-1, -2).flatten(-3)
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


def pack_nibbles(codes: Tensor, run: int = 1) -> Tensor:
    """Pack codes [..., K] of 4 bits, uint8, in bytes: [..., K / 2]. The halves of a
    byte are `run` columns apart; twice that divides K."""
    runs: Tensor = codes.unflatten(-1, (-1, 2, run))
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).flatten(-2)


def unpack_nibbles(packed: Tensor, run: int = 1) -> Tensor:
    """Undo `pack_nibbles`."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(-3)


MOST_RUN = 16
"""Inputs of 16 bits that a kernel reads at once from one place: 32 bytes. The smallest
groups that it multiplies have twice as many columns."""


def in_runs(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight in longer runs of columns, if a byte holds two codes. The codes
    are rewritten in place."""
    run = math.gcd(weight.shape[-1] // 2, MOST_RUN)
    if FORMATS[weight.format].per_item == 1 or weight.run == run:
        return weight
    for codes in weight.codes.view(-1, *weight.codes.shape[-2:]):
        codes.copy_(pack_nibbles(unpack_nibbles(codes, weight.run), run))
    return dataclasses.replace(weight, run=run)


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


PANEL = 32
"""Rows per panel of the native format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPanels:
    """A quantised weight [N, K] in the order of the native product, which dequantises
    some panels at a time.

    Fields:
        format, group_columns, columns: as in `QuantizedWeight`.
        n: outputs.
        codes: uint8 [ceil(N / 32), K, 32 / per_item]; the halves of a byte are
            neighbouring rows.
        scales, zeros: float32 [ceil(N / 32), groups, 32], or no zeros.
    """

    format: WeightFormat
    n: int
    group_columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    columns: Tensor | None

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> QuantizedPanels:
        """Pack a matrix; copies it."""
        n, k = weight.shape
        two = FORMATS[weight.format].per_item == 2
        codes = weight.codes.view(torch.uint8)
        if two:
            codes = unpack_nibbles(codes, weight.run)
        panels = _to_panels(codes)
        scales = weight.scales
        if scales.dtype == torch.uint8:
            scales = decode_e8m0(scales)
        scales = scales.repeat_interleave(weight.group_rows, dim=0)[:n]
        zeros = weight.zeros
        return cls(
            format=weight.format,
            n=n,
            group_columns=min(weight.group_columns, k),
            codes=pack_nibbles(panels) if two else panels,
            scales=_to_panels(scales),
            zeros=None if zeros is None else _to_panels(zeros.float()),
            columns=weight.columns,
        )

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    def in_order(self, x: Tensor) -> Tensor:
        """Return inputs [..., K] in the order of the columns."""
        return x if self.columns is None else x.index_select(-1, self.columns)

    def dequantize(self, first: int, last: int) -> Tensor:
        """Return the values of panels [first, last), float32 [panels, K, 32]."""
        values = FORMATS[self.format].decode(self.codes[first:last])
        if self.zeros is not None:
            values = self._combine(torch.sub, values, self.zeros[first:last])
        return self._combine(torch.mul, values, self.scales[first:last])

    def _combine(
        self, combine: Callable[..., Tensor], values: Tensor, of_groups: Tensor
    ) -> Tensor:
        size = self.group_columns
        if self.k % size:
            wide = of_groups.repeat_interleave(size, dim=1)[:, : self.k]
            return combine(values, wide, out=values)
        groups = values.unflatten(1, (-1, size))
        combine(groups, of_groups[:, :, None], out=groups)
        return values


def _to_panels(rows: Tensor) -> Tensor:
    """[N, M] -> [ceil(N / 32), M, 32], zeros beyond N."""
    missing = -len(rows) % PANEL
    padded: Tensor = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()
