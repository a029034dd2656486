"""Reads quantised weights of a checkpoint in the one form that the layers store.

Whatever a checkpoint calls its scales and however many weights share one, a weight X is
yielded as its codes X and as X_scale, with a scale per row and group of columns. The
tensors of the file decide what is quantised; `quantization_config` says how, and must
not contradict them. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import re2
import torch
from torch import Tensor

from sglang.srt.configs.quantization_config import (
    CHANNELS,
    QuantizationConfig,
    WeightScheme,
)
from sglang.srt.layers.ops.linear.quantized import (
    QuantizedWeight,
    dequantize,
    quantize_rows,
)
from sglang.srt.layers.quantization import SCALE
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.model_loader.weight_utils import TensorHeader

_E4M3, _E5M2 = "F8_E4M3", "F8_E5M2"
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
# May be listed without being in the checkpoint: it is tied to the embedding.
_HEAD = "lm_head"

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensors:
    """The quantised weights of a checkpoint.

    Fields:
        scales: name of a weight -> name of its scales.
        scheme: how they are stored.
        source: the checkpoint, for errors.
    """

    scales: dict[str, str]
    scheme: WeightScheme
    source: str

    @classmethod
    def find(
        cls, headers: dict[str, TensorHeader], config: QuantizationConfig, source: str
    ) -> QuantizedTensors:
        """Find the quantised weights by the dtypes of the tensors.

        Raises:
            ValueError: scales are missing, or the list of modules that are not
                quantised names an unknown or a quantised module. The message names the
                tensor or the module.
        """
        assert config.scheme is not None
        scales = {}
        for name, header in headers.items():
            if header.dtype == _E5M2:
                raise ValueError(
                    f"{source}: tensor {name} is {_E5M2}; weights of 8 bits must be "
                    f"{_E4M3}"
                )
            if header.dtype == _E4M3:
                found = [name + end for end in _SCALE_SUFFIXES if name + end in headers]
                if not found:
                    raise ValueError(
                        f"{source}: tensor {name} is {_E4M3}, but there is no "
                        f"{' or '.join(name + end for end in _SCALE_SUFFIXES)}"
                    )
                scales[name] = found[0]
        _check_ignored(config, headers.keys(), scales.keys(), source)
        return cls(scales=scales, scheme=config.scheme, source=source)

    def read(
        self,
        weights: Weights,
        *,
        is_kept: Callable[[str], bool],
        dtype: torch.dtype,
        device: str,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all `weights`, the quantised ones as codes and scales.

        Args:
            is_kept: whether the model keeps a weight quantised. Others are dequantised
                to `dtype`, on `device`.

        Raises:
            ValueError: scales have another shape than the scheme's, or one of them is
                not a positive number. The message names the tensor.
        """
        owners = {scale: weight for weight, scale in self.scales.items()}
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in owners and name not in self.scales:
                yield name, tensor
                continue
            other = owners.get(name) or self.scales[name]
            if other not in waiting:
                waiting[name] = tensor
                continue
            pair = {name: tensor, other: waiting.pop(other)}
            weight = owners.get(name, name)
            codes = pair[weight]
            scales = self._by_row(self.scales[weight], pair[self.scales[weight]], codes)
            if is_kept(weight):
                yield weight, codes
                yield weight + SCALE, scales
                continue
            whole = _whole(codes.to(device), scales.to(device), self.scheme)
            yield weight, dequantize(whole).to(dtype)

    def _by_row(self, name: str, scales: Tensor, codes: Tensor) -> Tensor:
        """Return a scale per row and group of columns, float32 [..., N, groups]."""
        *stack, n, k = codes.shape
        rows, columns = self.scheme.group_rows, self.scheme.group_columns
        values = scales.float()
        bad = ~(values.isfinite() & (values > 0))
        if bool(bad.any()):
            raise ValueError(
                f"{self.source}: tensor {name} holds a scale of "
                f"{values[bad][0].item()}; scales must be positive numbers"
            )
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
            f"{self.source}: tensor {name} has shape {tuple(scales.shape)}, but "
            f"quantization_config makes it {expected}"
            f"{' or one value' if columns is None else ''} for a weight of {(n, k)}"
        )


def _whole(codes: Tensor, scales: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    return QuantizedWeight(
        format=scheme.format,
        codes=codes,
        scales=scales,
        group_rows=1,
        group_columns=scheme.group_columns or codes.shape[-1],
    )


def quantized_online(
    weights: Weights,
    *,
    is_kept: Callable[[str], bool],
    is_transposed: Callable[[str], bool],
    device: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all `weights` of a plain checkpoint, those that `is_kept` as codes and
    scales by row (`CHANNELS`). Computed on `device`.

    Args:
        is_transposed: whether the rows of a weight are its last dimension.
    """
    assert CHANNELS.group_columns is None
    for name, tensor in weights:
        if not is_kept(name):
            yield name, tensor
            continue
        turned = tensor.dim() == 3 and is_transposed(name)
        matrix = tensor.transpose(-1, -2) if turned else tensor
        for suffix, made in zip(
            ("", SCALE), quantize_rows(matrix.to(device)), strict=True
        ):
            yield name + suffix, made.transpose(-1, -2) if turned else made


def _check_ignored(
    config: QuantizationConfig,
    names: Iterable[str],
    quantized: Iterable[str],
    source: str,
) -> None:
    """Check the list of modules that are not quantised.

    Raises:
        ValueError: an entry that is no pattern names no module of the checkpoint, or
            an entry names a quantised one.
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
