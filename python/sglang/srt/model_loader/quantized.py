"""Reads quantised weights of a checkpoint in the one form that the layers store.

Whatever a checkpoint calls its tensors and however it packs them, a weight X is yielded
as its codes X, and with a scale per row and group of columns as X_scale; further parts
are X_zero and X_columns. The tensors of the file decide what is quantised;
`quantization_config` says how, and must not contradict them. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import re2
import torch
from torch import Tensor

from sglang.srt.configs.quantization_config import CHANNELS, QuantizationConfig
from sglang.srt.layers.ops.linear.quantized import (
    QuantizedWeight,
    dequantize,
    quantize_rows,
)
from sglang.srt.layers.quantization import COLUMNS, SCALE, ZERO
from sglang.srt.model_loader.quantized_layouts import (
    E4M3,
    Canonical,
    Found,
    Layout,
    check_codes,
    layout_of,
    names_of,
    per_item,
)
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.model_loader.weight_utils import TensorHeader

_E4M3, _E5M2 = "F8_E4M3", "F8_E5M2"
# May be listed without being in the checkpoint: it is tied to the embedding.
_HEAD = "lm_head"

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What the model makes of weights, by the name that a plain one would have.

    Fields:
        is_kept: whether it keeps a weight quantised. Others are dequantised to `dtype`,
            on `device`.
        is_transposed: whether the rows of a stack of matrices are its last dimension.
    """

    is_kept: Callable[[str], bool]
    is_transposed: Callable[[str], bool]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensors:
    """The quantised weights of a checkpoint.

    Fields:
        tensors: name that a plain weight would have -> names of its tensors, by suffix.
        config: how they are stored. source: the checkpoint, for errors.
    """

    tensors: dict[str, dict[str, str]]
    config: QuantizationConfig
    source: str

    @classmethod
    def find(
        cls, headers: dict[str, TensorHeader], config: QuantizationConfig, source: str
    ) -> QuantizedTensors:
        """Find the quantised weights by the names and dtypes of the tensors.

        Raises:
            ValueError: a tensor of a weight is missing, or the list of modules that are
                not quantised names an unknown or a quantised module. The message names
                the tensor or the module.
        """
        layout = layout_of(config)
        tensors = {}
        for name, header in headers.items():
            if not _holds_codes(name, header, layout, source):
                continue
            found = names_of(name, layout, headers)
            stem = name.removesuffix(layout.codes)
            for choices in layout.needed:
                if choices not in found:
                    wanted = " or ".join(stem + end for end in choices.split("|"))
                    raise ValueError(
                        f"{source}: tensor {name} is quantised ({header.dtype}), but "
                        f"there is no {wanted}"
                    )
            tensors[stem + layout.weight] = found
        _check_ignored(config, headers.keys(), tensors.keys(), source)
        return cls(tensors=tensors, config=config, source=source)

    def read(self, weights: Weights, readers: Readers) -> Iterator[tuple[str, Tensor]]:
        """Yield all `weights`, the quantised ones in their parts.

        Raises:
            ValueError: a tensor does not fit the scheme. The message names it.
        """
        owners = {
            name: (weight, suffix)
            for weight, found in self.tensors.items()
            for suffix, name in found.items()
        }
        waiting: dict[str, dict[str, Found]] = {}
        for name, tensor in weights:
            if name not in owners:
                yield name, tensor
                continue
            weight, suffix = owners[name]
            parts = waiting.setdefault(weight, {})
            parts[suffix] = Found(name, tensor)
            if len(parts) == len(self.tensors[weight]):
                yield from self._finish(weight, waiting.pop(weight), readers)
        for weight, parts in waiting.items():
            missing = self.tensors[weight].keys() - parts.keys()
            names = ", ".join(self.tensors[weight][suffix] for suffix in missing)
            raise ValueError(f"{self.source}: {names} of {weight} cannot be read")

    def _finish(
        self, weight: str, parts: dict[str, Found], readers: Readers
    ) -> Iterator[tuple[str, Tensor]]:
        try:
            made = layout_of(self.config).convert(parts, self.config)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error
        is_stack = made.codes.dim() == 3 and readers.is_transposed(weight)
        if not readers.is_kept(weight):
            plain = _dequantized(self._whole(made, readers.device), readers.dtype)
            if made.columns is not None:
                plain = plain[:, made.columns.argsort()]
            yield weight, plain.transpose(1, 2) if is_stack else plain
            return
        for ending, part in (
            ("", made.codes),
            (SCALE, made.scales),
            (ZERO, made.zeros),
            (COLUMNS, made.columns),
        ):
            if part is not None:
                yield weight + ending, part.transpose(1, 2) if is_stack else part

    def _whole(self, made: Canonical, device: str) -> QuantizedWeight:
        inputs = made.codes.shape[-1] * per_item(self.config)
        return QuantizedWeight(
            format=self.config.weights.format,
            codes=made.codes.to(device),
            scales=made.scales.to(device),
            zeros=None if made.zeros is None else made.zeros.to(device),
            group_rows=1,
            group_columns=self.config.weights.group_columns or inputs,
        )


def _dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype`; a stack matrix by matrix, because all of it in
    float32 would be too large."""
    if weight.codes.dim() == 2:
        return dequantize(weight).to(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    for index, target in enumerate(out):
        target.copy_(dequantize(weight.expert(index)))
    return out


def _holds_codes(name: str, header: TensorHeader, layout: Layout, source: str) -> bool:
    if header.dtype == _E5M2:
        raise ValueError(
            f"{source}: tensor {name} is {_E5M2}; weights of 8 bits must be {_E4M3}"
        )
    if layout is E4M3:
        return header.dtype == _E4M3
    return name.endswith(layout.codes)


def quantized_online(
    weights: Weights, readers: Readers
) -> Iterator[tuple[str, Tensor]]:
    """Yield all `weights` of a plain checkpoint, those that are kept as codes and
    scales by row (`CHANNELS`).

    Raises:
        ValueError: one of those holds NaN or infinity. The message names the tensor.
    """
    assert CHANNELS.group_columns is None
    for name, tensor in weights:
        if not readers.is_kept(name):
            yield name, tensor
            continue
        turned = tensor.dim() == 3 and readers.is_transposed(name)
        matrix = tensor.transpose(-1, -2) if turned else tensor
        codes, scales = quantize_rows(matrix.to(readers.device))
        # Infinity over its scale is NaN as well.
        check_codes(name, codes)
        for ending, made in ("", codes), (SCALE, scales):
            yield name + ending, made.transpose(-1, -2) if turned else made


def _check_ignored(
    config: QuantizationConfig,
    names: Iterable[str],
    quantized: Iterable[str],
    source: str,
) -> None:
    """Check the list of modules that are not quantised.

    Raises:
        ValueError: an entry that is no pattern names no module of the checkpoint, an
            entry names a quantised one, or an expression is malformed.
    """
    modules = {name.rpartition(".")[0] for name in names}
    inner = {name.rpartition(".")[0] for name in quantized}
    for entry in config.ignored:
        try:
            named = _named_by(entry)
        except re2.error as error:
            raise ValueError(
                f"{source}: quantization_config excludes {shown(entry)}, which is no "
                f"regular expression: {error}"
            ) from error
        wrong = next(filter(named, inner), None)
        if wrong is not None:
            raise ValueError(
                f"{source}: quantization_config excludes {shown(entry)}, but the "
                f"checkpoint quantises {wrong}"
            )
        is_pattern = entry.startswith("re:") or "*" in entry
        if not is_pattern and entry != _HEAD and not any(map(named, modules)):
            raise ValueError(
                f"{source}: quantization_config excludes {shown(entry)}, but the "
                "checkpoint has no module of this name"
            )


def _named_by(entry: str) -> Callable[[str], bool]:
    """Return whether an entry names a module: by some of the dotted parts of its name,
    with wildcards, or as a regular expression after `re:`."""
    if entry.startswith("re:"):
        pattern = re2.compile(entry.removeprefix("re:"), _quiet())
        return lambda module: pattern.match(module) is not None
    if "*" in entry:
        wild = re2.compile(re2.escape(entry).replace(r"\*", ".*"), _quiet())
        return lambda module: wild.fullmatch(module) is not None
    return lambda module: f".{entry}." in f".{module}."


def _quiet() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options
