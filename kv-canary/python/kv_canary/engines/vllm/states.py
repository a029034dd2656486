"""vLLM's recurrent states: Mamba, linear attention, short convolutions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.engines.hooks import Refusal
from kv_canary.engines.state_canary import StateGroup, StatePool
from kv_canary.engines.vllm.hooks_of import V2_STATES
from kv_canary.engines.vllm.limits import STATE_KINDS, is_state, spec_name
from kv_canary.engines.vllm.pool import OF_V2

if TYPE_CHECKING:
    from kv_canary.engines.state_canary import StateCanary

NAME = "state"
_MODES = ("none", "align")
_BY_ROW = ("non_spec_state_indices_tensor", "state_indices_tensor")
_BY_KIND_OF_ROW = ("state_indices_tensor_d", "state_indices_tensor_p")
"""Decodes come first. Attributes of the metadata that layers of states get."""
_LAYER_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")


def read_states(runner: Any) -> StatePool | None:
    """Read the recurrent states of a runner whose KV cache was just initialised; None
    if its model has none.

    Raises:
        Refusal: states that are not supported.
    """
    config = runner.kv_cache_config
    found = [
        (number, group)
        for number, group in enumerate(config.kv_cache_groups)
        if is_state(group.kv_cache_spec)
    ]
    if not found:
        return None
    specs = [spec for _, group in found for spec in _specs(group)]
    refused = [text for spec in specs for text in _refused_by(spec)]
    refused += _refused_options(runner)
    if refused:
        raise Refusal("recurrent states: " + "; ".join(dict.fromkeys(refused)))
    modes = {(spec.mamba_cache_mode, spec.block_size) for spec in specs}
    if len(modes) > 1:
        raise Refusal(
            f"recurrent states: looked for one cache mode and block size, found {modes}"
        )
    mode, block_tokens = modes.pop()
    if mode == "none":
        # A request has one block, whatever its length.
        block_tokens = max(block_tokens, runner.vllm_config.model_config.max_model_len)
    modules = runner.vllm_config.compilation_config.static_forward_context
    return StatePool(
        name=NAME,
        groups=[
            StateGroup(
                number=number,
                layers=[_tensors(modules[name], name) for name in group.layer_names],
                numbers=[_layer_number(name) for name in group.layer_names],
            )
            for number, group in found
        ],
        num_blocks=int(config.num_blocks),
        block_tokens=block_tokens,
    )


def state_blocks(
    runner: Any, states: StateCanary | None, metadata: Mapping[str, Any]
) -> list[Tensor]:
    """Return the blocks [>= R] that the layers of each group of states get for the rows
    of a forward.

    Args:
        metadata: of the forward, by layer.

    Raises:
        Refusal: metadata of another kind.
    """
    if states is None:
        return []
    groups = runner.kv_cache_config.kv_cache_groups
    layers = [groups[number].layer_names[0] for number in states.pool.numbers]
    return [_blocks_of(metadata[layer], layer) for layer in layers]


def _blocks_of(metadata: Any, layer: str) -> Tensor:
    for name in _BY_ROW:
        found = getattr(metadata, name, None)
        if found is not None:
            return _first_column(found)
    parts = [getattr(metadata, name, None) for name in _BY_KIND_OF_ROW]
    blocks = [_first_column(part) for part in parts if part is not None]
    if not blocks:
        raise Refusal(
            f"layer {layer}: looked for {' or '.join((*_BY_ROW, *_BY_KIND_OF_ROW))} in "
            f"{type(metadata).__name__}, found none"
        )
    return torch.cat(blocks)


def _first_column(blocks: Tensor) -> Tensor:
    return blocks if blocks.dim() == 1 else blocks[:, 0]


def _specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    of_layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if of_layers is None else list(of_layers.values())


def _refused_by(spec: Any) -> list[str]:
    kind = getattr(getattr(spec, "mamba_type", None), "name", spec_name(spec))
    refused = []
    if kind not in STATE_KINDS:
        refused.append(f"mamba_type {kind}; {', '.join(STATE_KINDS)} are seen")
    if spec.mamba_cache_mode not in _MODES:
        refused.append(f"mamba_cache_mode {spec.mamba_cache_mode}; use align or none")
    if getattr(spec, "num_prefill_checkpoint_blocks", 0):
        refused.append("checkpoints that a kernel stores in the middle of a prefill")
    if getattr(spec, "num_speculative_blocks", 0):
        refused.append(
            "speculative_config: the state that the next forward begins with is chosen "
            "on the device, by how many proposals were accepted"
        )
    return refused


def _refused_options(runner: Any) -> list[str]:
    refused = []
    if getattr(runner.vllm_config.cache_config, "use_replayssm", False):
        refused.append("use_replayssm: inputs are folded into a state steps later")
    owner = getattr(runner, "model_state", None)
    if hasattr(runner, OF_V2) and not hasattr(owner, V2_STATES.method):
        refused.append(
            f"looked for {V2_STATES.method} of the second runner's model_state, found "
            f"a {type(owner).__name__} without"
        )
    return refused


def _tensors(layer: Any, name: str) -> list[Tensor]:
    found = layer.kv_cache
    tensors = list(found) if isinstance(found, list | tuple) else [found]
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise Refusal(f"layer {name}: looked for tensors of its states, found {found}")
    return tensors


def _layer_number(name: str) -> int:
    found = _LAYER_NUMBER.search(name)
    return int(found.group(1)) if found else 0
