"""How published checkpoints lay quantised weights out, and their one form here.

A layout names the tensors that make up a weight and turns them into `Canonical`. Knows
no files and no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import FORMATS, decode_e8m0, pack_nibbles

if TYPE_CHECKING:
    from sglang.srt.configs.quantization_config import QuantizationConfig, WeightScheme

_PER_WORD = 8
"""Codes of 4 bits in an int32."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each code in a word of AWQ."""


class Canonical(NamedTuple):
    """A weight with a scale per row and group of columns; see `QuantizedWeight`.

    Fields:
        codes: [..., N, K / per_item]. scales, zeros: [..., N, groups].
        columns: int64 [K], or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    columns: Tensor | None = None


class Found(NamedTuple):
    """A tensor of a weight: its name and its values."""

    name: str
    values: Tensor


Tensors = Mapping[str, Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A published layout.

    Fields:
        codes: suffix of the codes' name. weight: suffix that a plain weight has there.
        needed, optional: suffixes of the other tensors of a weight. Of several that are
            joined by "|" a checkpoint has one.
        convert: makes a weight of its tensors, by suffix.
    """

    codes: str
    weight: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    convert: Callable[[Tensors, QuantizationConfig], Canonical]


def scale_by_row(found: Found, scheme: WeightScheme, codes: Tensor) -> Tensor:
    """Return a scale per row and group of columns, float32 [..., N, groups].

    Raises:
        ValueError: the scales have another shape than the scheme's, or one of them is
            not a positive number. The message names the tensor.
    """
    *stack, n, k = codes.shape
    rows, columns = scheme.group_rows, scheme.group_columns
    values = found.values.float()
    check_scales(found.name, values)
    if columns is not None:
        expected = (*stack, -(-n // rows), -(-k // columns))
        if values.shape == expected:
            return values.repeat_interleave(rows, dim=-2)[..., :n, :]
    else:
        expected = (*stack, n, 1)
        count = codes.shape[:-2].numel()
        if values.numel() in (count, count * n):
            return values.reshape(*stack, -1, 1).expand(expected)
    raise ValueError(
        f"tensor {found.name} has shape {tuple(values.shape)}, but quantization_config "
        f"makes it {expected}{' or one value' if columns is None else ''} for a weight "
        f"of {(n, k)}"
    )


def check_scales(name: str, values: Tensor) -> None:
    """Raises:
    ValueError: a scale is not a positive number. The message names the tensor.
    """
    bad = ~(values.isfinite() & (values > 0))
    if bool(bad.any()):
        raise ValueError(
            f"tensor {name} holds a scale of {values[bad][0].item()}; scales must be "
            "positive numbers"
        )


def check_codes(name: str, codes: Tensor) -> None:
    """Check e4m3 codes. Kernels for devices without the type do not know its NaN.

    Raises:
        ValueError: a code is NaN. The message names the tensor.
    """
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"tensor {name} holds NaN; weights must be finite numbers")


def _convert_e4m3(tensors: Tensors, config: QuantizationConfig) -> Canonical:
    codes = tensors[E4M3.codes].values
    check_codes(tensors[E4M3.codes].name, codes)
    scales = scale_by_row(tensors[E4M3.needed[0]], config.weights, codes)
    return Canonical(codes, scales)


def _convert_mxfp4(tensors: Tensors, config: QuantizationConfig) -> Canonical:
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    shape = (*scales.values.shape, 16)
    is_bytes = blocks.values.dtype == scales.values.dtype == torch.uint8
    if not is_bytes or blocks.values.shape != shape or scales.values.dim() < 2:
        raise ValueError(
            f"{blocks.name} is {blocks.values.dtype} {tuple(blocks.values.shape)} and "
            f"{scales.name} {scales.values.dtype} {tuple(scales.values.shape)}; "
            "expected uint8 [..., G, 16] and [..., G]"
        )
    check_scales(scales.name, decode_e8m0(scales.values))
    return Canonical(blocks.values.flatten(-2), scales.values)


# -- 4 bits in words ---------------------------------------------------------------


def _codes_of_words(words: Tensor, dim: int) -> Tensor:
    """Return the codes of int32 words along a dimension: uint8, the lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.uint8).movedim(-1, dim + 1).flatten(dim, dim + 1)


def _check_words(found: Found) -> Tensor:
    if found.values.dtype != torch.int32 or found.values.dim() != 2:
        raise ValueError(
            f"tensor {found.name} is {found.values.dtype} "
            f"{tuple(found.values.shape)}; expected int32 words, [rows, columns]"
        )
    return found.values


def _check_groups(
    found: Found, *, inputs: int, outputs: int, dim: int, size: int
) -> None:
    """Check the shape of scales or zeros, which have `inputs` / `size` along `dim`.

    Raises:
        ValueError: the group size does not divide the inputs, or the shape is another.
    """
    if inputs % size:
        raise ValueError(
            f"tensor {found.name}: group_size {size} does not divide the {inputs} "
            "inputs of the weight"
        )
    expected = (inputs // size, outputs) if dim == 0 else (outputs, inputs // size)
    if found.values.shape != expected:
        raise ValueError(
            f"tensor {found.name} has shape {tuple(found.values.shape)}, but "
            f"group_size {size} makes it {expected}"
        )


def _convert_gptq(tensors: Tensors, config: QuantizationConfig) -> Canonical:
    """[K / 8, N] words; scales [G, N], zeros [G, N / 8] words, the group of each
    input."""
    codes = _codes_of_words(_check_words(tensors[".qweight"]), 0).t()
    n, k = codes.shape
    size = config.weights.group_columns or k
    scales = tensors[".scales"]
    _check_groups(scales, inputs=k, outputs=n, dim=0, size=size)
    zeros = _codes_of_words(_check_words(tensors[".qzeros"]), 1).to(torch.int8)
    # The first format stores one less, and wraps around.
    zeros = zeros if config.stores_zeros else (zeros + 1) % 16
    found = Found(tensors[".qzeros"].name, zeros)
    _check_groups(found, inputs=k, outputs=n, dim=0, size=size)
    columns = None
    if ".g_idx" in tensors and config.weights.has_columns:
        group = tensors[".g_idx"].values.long()
        columns = _order_of_groups(tensors[".g_idx"].name, group, k // size, size)
        codes = codes[:, columns]
    return _of_4_bits(codes, scales, found, config, columns=columns)


def _order_of_groups(name: str, group: Tensor, groups: int, size: int) -> Tensor:
    """Return the inputs ordered by their group.

    Raises:
        ValueError: the groups do not have `size` inputs each. The message names the
            tensor.
    """
    counts = group.clamp(0, groups).bincount(minlength=groups)
    in_range = bool(((group >= 0) & (group < groups)).all())
    if not in_range or not bool((counts == size).all()):
        raise ValueError(
            f"tensor {name} must put {size} inputs into each of {groups} groups"
        )
    return group.argsort(stable=True)


def _convert_awq(tensors: Tensors, config: QuantizationConfig) -> Canonical:
    """[K, N / 8] words of interleaved columns; scales [G, N], zeros [G, N / 8]
    words."""

    def codes_of(found: Found) -> Tensor:
        words = _codes_of_words(_check_words(found), 1).view(
            len(found.values), -1, _PER_WORD
        )
        return words[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1)

    codes = codes_of(tensors[".qweight"]).t()
    n, k = codes.shape
    size = config.weights.group_columns or k
    scales = tensors[".scales"]
    _check_groups(scales, inputs=k, outputs=n, dim=0, size=size)
    zeros = Found(tensors[".qzeros"].name, codes_of(tensors[".qzeros"]).to(torch.int8))
    _check_groups(zeros, inputs=k, outputs=n, dim=0, size=size)
    return _of_4_bits(codes, scales, zeros, config)


def _of_4_bits(
    codes: Tensor,
    scales: Found,
    zeros: Found,
    config: QuantizationConfig,
    *,
    columns: Tensor | None = None,
) -> Canonical:
    """Make a weight of codes [N, K], scales [G, N] and zeros [G, N] of 0 to 16."""
    check_scales(scales.name, scales.values.float())
    relative = (zeros.values - 8).t()
    if not config.weights.has_zeros and bool(relative.any()):
        raise ValueError(
            f"tensor {zeros.name} holds other zeros than 8, but quantization_config "
            "says that the weights are symmetric"
        )
    return Canonical(
        pack_nibbles(codes.contiguous()),
        scales.values.float().t(),
        relative if config.weights.has_zeros else None,
        columns,
    )


def _convert_packed(tensors: Tensors, config: QuantizationConfig) -> Canonical:
    """[N, K / 8] words; scales [N, G], zeros [N / 8, G] words, both offset by 8."""
    codes = _codes_of_words(_check_words(tensors[".weight_packed"]), 1)
    n, k = codes.shape
    size = config.weights.group_columns or k
    scales, zeros = tensors[".weight_scale"], None
    _check_groups(scales, inputs=k, outputs=n, dim=1, size=size)
    check_scales(scales.name, scales.values.float())
    if config.weights.has_zeros:
        found = tensors[".weight_zero_point"]
        zeros = _codes_of_words(_check_words(found), 0).to(torch.int8) - 8
        given = Found(found.name, zeros)
        _check_groups(given, inputs=k, outputs=n, dim=1, size=size)
    return Canonical(pack_nibbles(codes), scales.values.float(), zeros)


E4M3 = Layout(
    codes="",
    weight="",
    needed=("_scale_inv|_scale",),
    convert=_convert_e4m3,
)
MXFP4 = Layout(codes="_blocks", weight="", needed=("_scales",), convert=_convert_mxfp4)
GPTQ = Layout(
    codes=".qweight",
    weight=".weight",
    needed=(".scales", ".qzeros"),
    optional=(".g_idx",),
    convert=_convert_gptq,
)
AWQ = Layout(
    codes=".qweight",
    weight=".weight",
    needed=(".scales", ".qzeros"),
    convert=_convert_awq,
)
PACKED = Layout(
    codes=".weight_packed",
    weight=".weight",
    needed=(".weight_scale",),
    optional=(".weight_zero_point", ".weight_g_idx"),
    convert=_convert_packed,
)
# By method and format of the codes.
LAYOUTS: dict[tuple[str, str], Layout] = {
    ("fp8", "e4m3"): E4M3,
    ("w8a8_fp8", "e4m3"): E4M3,
    ("compressed-tensors", "e4m3"): E4M3,
    ("compressed-tensors", "int4"): PACKED,
    ("mxfp4", "mxfp4"): MXFP4,
    ("gptq", "int4"): GPTQ,
    ("awq", "int4"): AWQ,
}


def layout_of(config: QuantizationConfig) -> Layout:
    """Return the layout of a checkpoint."""
    return LAYOUTS[config.method, config.weights.format]


def per_item(config: QuantizationConfig) -> int:
    return FORMATS[config.weights.format].per_item


def plain_names(names: Iterable[str], config: QuantizationConfig | None) -> set[str]:
    """Return names of tensors, with those of codes as plain weights would have them."""
    if config is None:
        return set(names)
    layout = layout_of(config)
    return {
        name.removesuffix(layout.codes) + layout.weight
        if name.endswith(layout.codes)
        else name
        for name in names
    }


def names_of(codes: str, layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Return the tensors of the weight with these codes, by suffix, as far as they are
    among `names`."""
    known = set(names) if not isinstance(names, (set, frozenset, dict)) else names
    stem = codes.removesuffix(layout.codes)
    found = {layout.codes: codes}
    for choices in (*layout.needed, *layout.optional):
        for suffix in choices.split("|"):
            if stem + suffix in known:
                found[choices] = stem + suffix
                break
    return found
