"""vLLM's KV pool as groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.engines.group_canary import Group
from kv_canary.engines.hooks import Refusal
from kv_canary.engines.page_probe import learn_pages, page_axis
from kv_canary.engines.vllm.limits import WINDOW_SPECS, is_seen, spec_name

if TYPE_CHECKING:
    from kv_canary.slot_places import PageLayout

_STORE = "do_kv_cache_update"


def read_groups(runner: Any) -> list[Group]:
    """Read the groups of a runner whose KV cache was just initialised.

    Raises:
        Refusal: layers whose KV is not supported.
    """
    config = runner.kv_cache_config
    return [
        _read_group(runner, number, group, int(config.num_blocks))
        for number, group in enumerate(config.kv_cache_groups)
    ]


def _read_group(runner: Any, number: int, group: Any, num_blocks: int) -> Group:
    names = list(group.layer_names)
    spec = group.kv_cache_spec
    of_layers = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if of_layers is None else [of_layers[name] for name in names]
    unseen = sorted({spec_name(s) for s in specs if not is_seen(s)})
    if unseen:
        raise Refusal(
            f"KV cache group {number} ({names[0]}, ...) is {', '.join(unseen)}: not "
            "seen by the canary; full and sliding-window attention are"
        )
    windows = {getattr(s, "sliding_window", None) for s in specs}
    window = None if len(windows) > 1 else windows.pop()
    is_window = spec_name(specs[0]) in WINDOW_SPECS
    layers, pages = _read_layers(runner, names, specs, num_blocks)
    return Group(
        name=("window" if is_window else "full") + (f" {number}" if number else ""),
        layers=layers,
        pages=pages,
        num_blocks=num_blocks,
        # A full-attention group keeps its blocks, whatever its layers see.
        window=window if is_window else None,
    )


def _read_layers(
    runner: Any, names: Sequence[str], specs: Sequence[Any], num_blocks: int
) -> tuple[list[Tensor], PageLayout]:
    """Return the tensors of layers, each once, and the layout that they share."""
    modules = runner.vllm_config.compilation_config.static_forward_context
    tensors: dict[int, Tensor] = {}
    pages: PageLayout | None = None
    kind: tuple[object, ...] = ()
    for index, name in enumerate(names):
        layer, spec = modules[name], specs[index % len(specs)]
        kv = kv_tensor(layer, name)
        if kv.data_ptr() in tensors:
            continue  # shares the KV of an earlier layer
        axis = page_axis(kv, num_blocks, name)
        found = (axis, kv.dtype, kv.stride(), kv.shape, type(layer.impl))
        if pages is None:
            pages = _learn(runner, layer, spec, kv, axis, name)
            kind = found
        elif found != kind:
            raise Refusal(
                f"layer {name}: looked for a KV tensor like that of {names[0]} "
                f"({kind}), found {found}"
            )
        tensors[kv.data_ptr()] = kv
    assert pages is not None
    return list(tensors.values()), pages


def kv_tensor(layer: Any, name: str) -> Tensor:
    """Return the KV tensor of a layer.

    Raises:
        Refusal: it has none, or several.
    """
    kv = layer.kv_cache
    if isinstance(kv, list | tuple) and len(kv) == 1:
        kv = kv[0]
    if not isinstance(kv, Tensor):
        raise Refusal(f"layer {name}: looked for one KV tensor, found a {type(kv)}")
    return kv


def _learn(
    runner: Any, layer: Any, spec: Any, kv: Tensor, axis: int, name: str
) -> PageLayout:
    update = getattr(layer.impl, _STORE, None)
    if update is None:
        raise Refusal(
            f"layer {name}: looked for {type(layer.impl).__name__}.{_STORE}, found no "
            "such method; this attention backend stores KV where it cannot be learned"
        )
    dtype = runner.vllm_config.model_config.dtype
    heads = spec.num_kv_heads

    def like(size: int) -> Tensor:
        return torch.ones((1, heads, size), dtype=dtype, device=kv.device)

    return learn_pages(
        kv,
        lambda keys, values, slots: update(layer, keys, values, kv, slots),
        name=name,
        axis=axis,
        page_size=spec.block_size,
        k_like=like(spec.head_size),
        v_like=like(getattr(spec, "head_size_v", None) or spec.head_size),
    )
