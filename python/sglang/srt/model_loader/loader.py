"""Builds a model and loads its weights."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sglang.srt.layers.linear import Linear, LoadableParameter
from sglang.srt.layers.module import Module, cache_attributes
from sglang.srt.layers.moe.experts import ExpertParameter
from sglang.srt.layers.ops.linear.quantized import E4M3_MAX
from sglang.srt.layers.quantization import (
    COLUMNS,
    SCALE,
    ZERO,
    keep_plain,
    quantized_modules,
    quantized_parameters,
)
from sglang.srt.model_loader.quantized import (
    QuantizedTensors,
    Readers,
    quantized_online,
)
from sglang.srt.model_loader.text_part import text_tensor_name
from sglang.srt.model_loader.weight_utils import (
    iterate_weights,
    tensor_headers,
    tensor_names,
)
from sglang.srt.models.registry import CausalLM, MockModel, create_model
from sglang.srt.utils.memory import HostBlocks
from sglang.srt.utils.progress import with_progress

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.llama import LoadableModel

logger = logging.getLogger(__name__)

DUMMY_SEED = 20260101
DUMMY_SCALE = 0.02
DUMMY_CODE_SCALE = 64.0
DUMMY_EXPONENT = 120
# Name of one expert's tensor.
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>[0-9]+)\.(?P<module>\w+)"
    r"\.(?P<kind>weight|weight_scale|weight_zero|bias)"
)
_SUFFIXES = {"weight": "", "weight_scale": SCALE, "weight_zero": ZERO, "bias": "_bias"}
_KINDS = {suffix: kind for kind, suffix in _SUFFIXES.items() if suffix}
# Buffers that some checkpoints contain and that are recomputed here.
IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    # Scales of activations, which are quantised by what they are.
    ".input_scale",
    ".activation_scale",
    ".weight_shape",
    # Scales of stored KV; see `kv_scales.py`.
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".prob_scale",
    ".output_scale",
)


def load_model(
    config: ModelConfig,
    *,
    load_format: str,
    dtype: torch.dtype,
    rope_rows: int,
    device: str = "cpu",
    rounds_inputs: bool = True,
) -> CausalLM:
    """Build a model in evaluation mode, weights in `dtype`, packed for `device`.

    Args:
        load_format: "auto" or "safetensors" read the folder; "dummy" draws random
            values.
        rounds_inputs: products of many rows with quantised weights may round their
            inputs to 8 bits.

    Raises:
        ValueError: an unsupported architecture, or a tensor that is missing, unknown or
            of the wrong shape. The message names it.
    """
    quantization = config.quantization
    scheme = None if quantization is None else quantization.weights
    if scheme is not None and device == "cpu" and not scheme.is_kept_on_cpu:
        scheme = None
    if scheme is not None and not rounds_inputs:
        scheme = dataclasses.replace(scheme, quantizes_inputs=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), quantized_modules(scheme):
            model = create_model(config, rope_rows=rope_rows)
            if not isinstance(model, MockModel) and load_format != "dummy":
                model.add_optional_parts(tensor_names(config.path))
    finally:
        torch.set_default_dtype(before)
    if isinstance(model, MockModel):
        model.fill_weights()
    elif load_format == "dummy":
        fill_dummy_weights(model, device)
        model.finish_loading("--load-format dummy")
    else:
        source = str(config.path)
        needed = {
            name
            for name in tensor_names(config.path)
            if own_name(model, name) is not None
        }
        weights = with_progress(
            iterate_weights(config.path, needed),
            total=len(needed),
            what="Loading weights",
            unit="tensor",
            logger=logger,
        )
        if quantization is not None:
            weights = _quantized(model, weights, config, dtype=dtype, device=device)
        load_weights(model, weights, source=source)
    for module in model.modules():
        if isinstance(module, Module):
            module.process_weights_after_loading()
    _gather_packed(model)
    cache_attributes(model)
    return model.eval()


def _quantized(
    model: LoadableModel,
    weights: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors as the modules store them, after telling the modules which of
    their weights are plain."""
    quantization, source = config.quantization, str(config.path)
    assert quantization is not None
    parameters = _loadable_parameters(model)

    def is_transposed(name: str) -> bool:
        parameter = parameters.get(_target(model, name) or "")
        if not isinstance(parameter, ExpertParameter):
            return False
        return parameter.stacked.is_transposed

    if quantization.is_online:
        kept = {name for _, _, name in quantized_parameters(model)}
    else:
        headers = tensor_headers(config.path)
        found = QuantizedTensors.find(headers, quantization, source)
        kept = _settle(model, found.tensors)
    readers = Readers(
        is_kept=lambda name: _target(model, name) in kept,
        is_transposed=is_transposed,
        dtype=dtype,
        device=device,
    )
    if quantization.is_online:
        return quantized_online(weights, readers)
    return found.read(weights, readers)


def _settle(model: LoadableModel, quantized: Iterable[str]) -> set[str]:
    """Make plain what the checkpoint quantises not at all or only in parts. Return the
    parameters that stay quantised."""
    parameters = _loadable_parameters(model)
    covered: dict[str, set[str | None]] = {}
    for name in quantized:
        own = own_name(model, name)
        if own is not None:
            target, shard = locate(own, model.packed_modules)
            if target in parameters:
                shards = parameters[target].covered_by(shard)
                covered.setdefault(target, set()).update(shards)
    kept, mixed = set(), []
    for module, name, target in list(quantized_parameters(model)):
        found = covered.get(target, set())
        if found == set(parameters[target].shards):
            kept.add(target)
            continue
        keep_plain(module, name)
        if found:
            mixed.append(target)
    if mixed:
        logger.warning(
            "%d weight(s) are quantised only in part and are dequantised: %s",
            len(mixed),
            ", ".join(mixed[:4]),
        )
    return kept


def _target(model: LoadableModel, name: str) -> str | None:
    """Return the parameter that a checkpoint tensor belongs to, or None."""
    own = own_name(model, name)
    return None if own is None else locate(own, model.packed_modules)[0]


def _gather_packed(model: nn.Module) -> None:
    """Move the packed weights into huge pages. A step reads all of them, and ordinary
    pages would be too many for the processor's TLB."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    packed = [linear.packed.data for linear in linears if linear.packed is not None]
    blocks = HostBlocks(sum(data.nbytes for data in packed))
    del packed
    for linear in linears:
        linear.move_packed(blocks.copy)


def load_weights(
    model: LoadableModel, weights: Iterable[tuple[str, Tensor]], *, source: str
) -> None:
    """Copy checkpoint tensors into the parameters of `model`.

    Raises:
        ValueError: a tensor is missing, unknown or of the wrong shape. The message
            names it.
    """
    parameters = _loadable_parameters(model)
    missing: set[tuple[str, str | None]] = {
        (name, shard)
        for name, parameter in parameters.items()
        for shard in parameter.shards
    }
    for name, tensor in weights:
        own = own_name(model, name)
        if own is None:
            continue
        target, shard = locate(own, model.packed_modules)
        parameter = parameters.get(target)
        covered = set() if parameter is None else set(parameter.covered_by(shard))
        if parameter is None or not covered:
            raise ValueError(
                f"{source}: tensor {name} has no place in {type(model).__name__}"
            )
        try:
            parameter.load(name, tensor, shard)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        missing.difference_update((target, each) for each in covered)
    if missing:
        names = sorted(
            {
                model.stored_name(
                    _checkpoint_name(
                        name, shard, parameters[name], model.packed_modules
                    )
                )
                for name, shard in missing
            }
        )
        raise ValueError(
            f"{source}: the checkpoint lacks {len(names)} tensor(s) that "
            f"{model.wanted_by} needs: {', '.join(names[:8])}"
        )
    model.finish_loading(source)


def fill_dummy_weights(model: nn.Module, device: str) -> None:
    """Fill the weights with random values of a plausible scale, the same every time.

    Norms are 1 and integers 0. A rank draws whole tensors and keeps its part, so that
    the model is the same for any --tp-size.
    """
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, parameter in _loadable_parameters(model).items():
        if parameter.quantizes is not None:
            _fill_dummy_codes(parameter, generator)
        elif name.endswith((SCALE, COLUMNS)):
            _fill_dummy_part(parameter)
        elif not parameter.is_floating_point():
            parameter.data.zero_()
        elif "norm" in name:
            parameter.data.fill_(1.0)
        elif parameter.full_shape() == parameter.shape:
            parameter.data.normal_(0.0, DUMMY_SCALE, generator=generator)
        else:
            full = parameter.data.new_empty(parameter.full_shape())
            full.normal_(0.0, DUMMY_SCALE, generator=generator)
            parameter.load_full(name, full)


def _fill_dummy_codes(parameter: LoadableParameter, generator: torch.Generator) -> None:
    """Draw codes whose values are the same for any --tp-size."""
    full = torch.empty(parameter.full_shape(), device=parameter.device)
    if parameter.dtype == torch.uint8:
        codes = full.uniform_(0, 256, generator=generator).to(torch.uint8)
    else:
        full.normal_(0.0, DUMMY_CODE_SCALE, generator=generator)
        codes = full.clamp_(-E4M3_MAX, E4M3_MAX).to(parameter.dtype)
    parameter.load_full("--load-format dummy", codes)


def _fill_dummy_part(parameter: LoadableParameter) -> None:
    """Fill scales, or the order of columns."""
    if parameter.is_common:
        size = parameter.shape[0]
        parameter.data.copy_(torch.arange(size, device=parameter.device))
    elif parameter.dtype == torch.uint8:
        parameter.data.fill_(DUMMY_EXPONENT)
    else:
        parameter.data.fill_(DUMMY_SCALE / DUMMY_CODE_SCALE)


def _loadable_parameters(model: nn.Module) -> dict[str, LoadableParameter]:
    """Return the parameters by name; a shared one (tied head) has its first name."""
    found: dict[str, LoadableParameter] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, LoadableParameter), name
        found[name] = parameter
    return found


def own_name(model: LoadableModel, name: str) -> str | None:
    """Return the model's name for a checkpoint tensor, or None if it is not needed."""
    if name.endswith(IGNORED_SUFFIXES):
        return None
    text_name = text_tensor_name(name) if model.is_text_part else name
    return None if text_name is None else model.own_name(text_name)


def locate(
    name: str, packed: dict[str, tuple[str, str | None]]
) -> tuple[str, str | None]:
    """Map a checkpoint name to (parameter name, shard)."""
    found = _EXPERT.fullmatch(name)
    if found is not None:
        target, part = packed.get(found["module"], (found["module"], None))
        suffix = _SUFFIXES[found["kind"]]
        shard = found["expert"] if part is None else f"{found['expert']}.{part}"
        return f"{found['experts']}.{target}{suffix}", shard
    parts, shard = name.split("."), None
    for i, part in enumerate(parts):
        if part in packed:
            parts[i], shard_here = packed[part]
            shard = shard_here or shard
    return ".".join(parts), shard


def _checkpoint_name(
    name: str,
    shard: str | None,
    parameter: LoadableParameter,
    packed: dict[str, tuple[str, str | None]],
) -> str:
    """Invert `locate`, for error messages."""
    experts, _, module = name.rpartition(".")
    if shard is not None and experts.endswith(".experts"):
        expert, _, part = shard.partition(".")
        suffix = next((end for end in _KINDS if module.endswith(end)), "")
        kind = _KINDS.get(suffix, "weight")
        module = module.removesuffix(suffix)
        stored = f"{experts}.{expert}.{module}.{kind}"
        return _checkpoint_name(stored, part or None, parameter, packed)
    parts = name.split(".")
    for original, (own, own_shard) in packed.items():
        is_here = own_shard in (None, shard) or shard in parameter.covered_by(own_shard)
        if is_here and own in parts:
            parts[parts.index(own)] = original
    return ".".join(parts)
