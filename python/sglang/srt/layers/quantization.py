"""Parameters of quantised weights: codes in the place of the weight, and their scales.

A parameter `weight` that is quantised has others beside it: `weight_scale`, with a
scale per row and group of columns, and by the scheme `weight_zero` and
`weight_columns`. All are made up of the same checkpoint tensors, so packing, joining
and tensor parallelism treat them alike. Knows no formats of checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang.srt.layers.ops.linear.quantized import FORMATS, QuantizedWeight, in_runs

if TYPE_CHECKING:
    from sglang.srt.configs.quantization_config import WeightScheme
    from sglang.srt.layers.linear import LoadableParameter
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What a parameter of codes stands for.

    Fields:
        scheme: how they are stored.
        dtype, shape, attributes: those of the plain parameter.
    """

    scheme: WeightScheme
    dtype: torch.dtype
    shape: torch.Size
    attributes: dict[str, Any]


SCALE, ZERO, COLUMNS = "_scale", "_zero", "_columns"
"""Suffixes of the parameters with scales, zeros and the order of the columns."""

_scheme: WeightScheme | None = None


@contextmanager
def quantized_modules(scheme: WeightScheme | None) -> Iterator[None]:
    """Scope in which modules are built with quantised weights; None changes nothing.

    Modules know only later whether the checkpoint quantises them, but plain weights of
    a large model would not fit, not even empty ones.
    """
    global _scheme
    before, _scheme = _scheme, scheme
    try:
        yield
    finally:
        _scheme = before


def quantize_parameter(module: nn.Module, name: str) -> None:
    """Replace a plain parameter [..., N, K] of a module by codes and what belongs to
    them, if the module is built in `quantized_modules`.

    It stays plain if the part of this rank cuts a group of columns.
    """
    scheme = _scheme
    if scheme is None:
        return
    plain: LoadableParameter = getattr(module, name)
    per_item, dtype = FORMATS[scheme.format].per_item, FORMATS[scheme.format].dtype
    *rows, columns = plain.shape
    groups = -(-columns // (scheme.group_columns or columns))
    codes = plain.data.new_empty(*rows, columns // per_item, dtype=dtype)
    try:
        if scheme.has_columns:
            _check_columns(plain)
        made = plain.like(codes, columns=per_item)
        parts = {
            ending: plain.like(
                plain.data.new_empty(*rows, groups, dtype=of_groups),
                columns=scheme.group_columns,
            )
            for ending, of_groups in _group_dtypes(scheme).items()
        }
    except ValueError as error:
        _warn_plain(error)
        return
    made.quantizes = Quantized(
        scheme=scheme,
        dtype=plain.dtype,
        shape=plain.shape,
        attributes=dict(plain.__dict__),
    )
    setattr(module, name, made)
    for ending, part in parts.items():
        setattr(module, name + ending, part)
    if scheme.has_columns:
        order = plain.like(torch.full((columns,), -1, device=plain.device))
        order.is_common = True
        setattr(module, name + COLUMNS, order)


def _group_dtypes(scheme: WeightScheme) -> dict[str, torch.dtype]:
    dtypes = {SCALE: FORMATS[scheme.format].scale_dtype}
    return dtypes | ({ZERO: torch.int8} if scheme.has_zeros else {})


def _check_columns(plain: LoadableParameter) -> None:
    """Raises:
    ValueError: the inputs cannot be reordered: this rank has a part of them, or there
        are several matrices.
    """
    if plain.dim() != 2 or plain.full_shape()[1] != plain.shape[1]:
        raise ValueError(
            f"inputs of a weight {plain.full_shape()} in another order (act-order) are "
            "neither split over ranks nor served for experts"
        )


_warned = False


def _warn_plain(error: ValueError) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "Weights that --tp-size cannot cut are dequantised while loading: %s", error
        )


def keep_plain(module: nn.Module, name: str) -> None:
    """Undo `quantize_parameter`, for a weight that the checkpoint does not quantise."""
    codes: LoadableParameter = getattr(module, name)
    found = codes.quantizes
    assert found is not None
    plain = codes.like(torch.empty(found.shape, dtype=found.dtype, device=codes.device))
    plain.quantizes = None
    plain.__dict__.update(found.attributes)
    setattr(module, name, plain)
    forget_parts(module, name)


def quantized_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, name in the module, name in the model) of quantised weights."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, "quantizes", None) is not None:
                yield module, name, f"{path}.{name}" if path else name


def quantized_weight(module: nn.Module, name: str) -> QuantizedWeight | None:
    """Return a loaded weight as the operations read it, or None if it is plain. Takes
    the parameter's data, and is called once."""
    parameter: LoadableParameter = getattr(module, name)
    if parameter.quantizes is None:
        return None
    scheme = parameter.quantizes.scheme
    scales = getattr(module, name + SCALE).data
    shared = _shared_rows(scales, scheme.group_rows)
    columns = parameter.shape[-1] * FORMATS[scheme.format].per_item
    zeros, order = getattr(module, name + ZERO, None), None
    if scheme.has_columns:
        order = getattr(module, name + COLUMNS).data
        if torch.equal(order, torch.arange(columns, device=order.device)):
            order = None
    weight = QuantizedWeight(
        format=scheme.format,
        codes=parameter.data,
        scales=scales if shared is None else shared,
        group_rows=1 if shared is None else scheme.group_rows,
        group_columns=scheme.group_columns or columns,
        quantizes_inputs=scheme.quantizes_inputs,
        zeros=None if zeros is None else zeros.data,
        columns=order,
    )
    return weight if parameter.is_cpu else in_runs(weight)


def parts_by_row(module: nn.Module, name: str) -> list[Tensor]:
    """Return the data of a weight and of what belongs to its rows: all of them move
    where a row does."""
    parts = (getattr(module, name + ending, None) for ending in ("", SCALE, ZERO))
    return [part.data for part in parts if part is not None]


def forget_parts(module: nn.Module, name: str) -> None:
    """Drop the parameters beside a weight, whose data `quantized_weight` returned."""
    for ending in (SCALE, ZERO, COLUMNS):
        if getattr(module, name + ending, None) is not None:
            setattr(module, name + ending, None)


def _shared_rows(scales: Tensor, group: int) -> Tensor | None:
    """Return one row of scales per `group` rows, or None if those do not agree: a rank
    or a joined tensor may cut blocks."""
    rows = scales.shape[-2]
    shared = scales[..., ::group, :].contiguous()
    whole = shared.repeat_interleave(group, dim=-2)[..., :rows, :]
    return shared if group > 1 and torch.equal(whole, scales) else None
