"""vLLM's KV pool as groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.engines.group_canary import Group
from kv_canary.engines.hooks import Refusal
from kv_canary.engines.page_probe import learn_latent_pages, learn_pages, page_axis
from kv_canary.engines.vllm.limits import (
    MODEL_FREE_DRAFTS,
    WINDOW_SPECS,
    is_latent,
    is_seen,
    is_state,
    spec_name,
)

if TYPE_CHECKING:
    from kv_canary.slot_places import PageLayout

_STORE = "do_kv_cache_update"
LATENT_PARTS = ("kv_lora_rank", "qk_rope_head_dim")
OF_V2 = "req_states"
_DRAFT_LAYERS = (
    ("speculator", "draft_attn_layer_names"),
    ("drafter", "_draft_attn_layer_names"),
)
"""Attributes of the second and of the first runner, and of these."""


def read_groups(runner: Any) -> list[Group]:
    """Read the groups of tokens of a runner whose KV cache was just initialised.
    Recurrent states are left to `states.py`.

    Raises:
        Refusal: layers whose KV is not supported.
    """
    config = runner.kv_cache_config
    left_out = draft_groups(runner)
    return [
        _read_group(runner, number, group, int(config.num_blocks))
        for number, group in enumerate(config.kv_cache_groups)
        if number not in left_out and not is_state(group.kv_cache_spec)
    ]


def draft_groups(runner: Any) -> dict[int, int]:
    """Return the groups that have layers of a draft's model alone, with the tokens of
    their blocks. They are not checked; see `draft_layers`.

    Raises:
        Refusal: the draft's layers are not known.
    """
    drafts = draft_layers(runner)
    return {
        number: int(group.kv_cache_spec.block_size)
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        if group.layer_names and drafts.issuperset(group.layer_names)
    }


def draft_layers(runner: Any) -> frozenset[str]:
    """Return the layers of a draft's model. They lie in the blocks of the target's, but
    are written after the forward that is checked; what they hold changes no answer.

    Raises:
        Refusal: there is such a model, and its layers are not known.
    """
    method = getattr(runner.vllm_config.speculative_config, "method", None)
    if method is None or method in MODEL_FREE_DRAFTS:
        return frozenset()
    for owner, attribute in _DRAFT_LAYERS:
        names = getattr(getattr(runner, owner, None), attribute, None)
        if names is not None:
            return frozenset(names)
    places = " or ".join(f"{owner}.{attribute}" for owner, attribute in _DRAFT_LAYERS)
    raise Refusal(
        f"speculative_config with {method}: looked for the draft's layers in {places}, "
        "found no such attribute"
    )


def target_names(runner: Any, group: Any) -> list[str]:
    """Return the layers of a group that are not a draft's, in order."""
    drafts = draft_layers(runner)
    return [name for name in group.layer_names if name not in drafts]


def _read_group(runner: Any, number: int, group: Any, num_blocks: int) -> Group:
    names = target_names(runner, group)
    spec = group.kv_cache_spec
    of_layers = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if of_layers is None else [of_layers[name] for name in names]
    unseen = sorted({spec_name(s) for s in specs if not is_seen(s)})
    if unseen:
        raise Refusal(
            f"KV cache group {number} ({names[0]}, ...) is {', '.join(unseen)}: not "
            "seen by the canary; full, sliding-window and latent attention and "
            "recurrent states are"
        )
    is_latents = is_latent(specs[0])
    if is_latents and not hasattr(runner, OF_V2):
        raise Refusal(
            f"KV cache group {number} ({names[0]}, ...) is {spec_name(specs[0])}: its "
            "tables are only seen in vLLM's second runner; set "
            "VLLM_USE_V2_MODEL_RUNNER=1"
        )
    windows = {getattr(s, "sliding_window", None) for s in specs}
    window = None if len(windows) > 1 else windows.pop()
    is_window = spec_name(specs[0]) in WINDOW_SPECS
    layers, pages = _read_layers(runner, names, specs, num_blocks)
    kind = "window" if is_window else "latent" if is_latents else "full"
    return Group(
        name=kind + (f" {number}" if number else ""),
        number=number,
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
        impl = type(getattr(layer, "impl", None))
        found = (axis, kv.dtype, kv.stride(), kv.shape, impl)
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
    impl = getattr(layer, "impl", None)
    update = getattr(impl, _STORE, None)
    if update is None:
        raise Refusal(
            f"layer {name}: looked for {type(impl).__name__}.{_STORE}, found no "
            "such method; this attention backend stores KV where it cannot be learned"
        )
    dtype = runner.vllm_config.model_config.dtype
    if is_latent(spec):
        sizes = [getattr(layer, part, None) for part in LATENT_PARTS]
        if None in sizes:
            raise Refusal(
                f"layer {name}: looked for {' and '.join(LATENT_PARTS)} in "
                f"{type(layer).__name__}, found another kind of cache"
            )
        latent, rotated = (
            torch.ones((1, size), dtype=dtype, device=kv.device)  # type: ignore[arg-type]
            for size in sizes
        )
        return learn_latent_pages(
            kv,
            lambda one, two, slots: update(
                one, two[:, None], kv, slots, layer.kv_cache_dtype, layer._k_scale
            ),
            name=name,
            axis=axis,
            page_size=spec.block_size,
            parts=(latent, rotated),
        )
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
