"""vLLM's attention layers, which let the canary compare the bytes that they read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kv_canary.engines.vllm.pool import LATENT_PARTS, kv_tensor, target_names

if TYPE_CHECKING:
    from kv_canary.engines.engine_canary import EngineCanary
    from kv_canary.engines.group_canary import GroupCanary

FULL_GRAPHS = "full CUDA graphs replay attention without its Python code"
IN_KERNELS = "the kernels that verify sample them"


def compare_in_pass(runner: Any, canary: EngineCanary) -> str:
    """Let each layer compare its bytes when its attention is about to read them.

    Returns an empty string, or why this cannot be: bytes are then compared before the
    forward.
    """
    if all(group.bytes is None for group in canary.groups):
        return IN_KERNELS
    mode = runner.vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        return FULL_GRAPHS
    for group in canary.groups:
        group.compares_in_pass = True
        for index, layer in enumerate(_owners(runner, group.group.number)):
            # A latent layer stores and reads around its implementation.
            owner, name = (
                (layer, "forward_impl")
                if hasattr(layer, LATENT_PARTS[0])
                else (layer.impl, "forward")
            )
            _wrap_forward(owner, name, group, index)
    return ""


def _owners(runner: Any, number: int) -> Iterator[Any]:
    """Return the layers of a group that have KV of their own, in order."""
    modules = runner.vllm_config.compilation_config.static_forward_context
    seen: set[int] = set()
    for name in target_names(runner, runner.kv_cache_config.kv_cache_groups[number]):
        place = kv_tensor(modules[name], name).data_ptr()
        if place not in seen:
            seen.add(place)
            yield modules[name]


def _wrap_forward(owner: Any, name: str, group: GroupCanary, index: int) -> None:
    """Wrap the method of this layer only: classes serve all layers."""
    found = getattr(owner, name)
    method: Callable[..., Any] = getattr(found, "__wrapped__", found)

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        group.attend(index)
        return method(*args, **kwargs)

    setattr(owner, name, forward)
