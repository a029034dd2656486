"""Configurations of vLLM that the plugin cannot check completely, and refuses by
name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MODEL_FREE_DRAFTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of drafting that have no KV of their own."""
FULL_SPECS = ("FullAttentionSpec",)
WINDOW_SPECS = ("SlidingWindowSpec",)
LATENT_SPECS = ("MLAAttentionSpec",)
"""Seen in the second runner only, whose tables are one for all backends."""
STATE_SPECS = ("MambaSpec",)
STATE_KINDS = ("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN")
"""Kinds of recurrent states by the names of their backends."""


class Limit(NamedTuple):
    """Fields: name: of the option; applies: to a `VllmConfig`; why: reason for
    refusal."""

    name: str
    applies: Callable[[Any], object]
    why: str


def _get(config: Any, path: str) -> Any:
    """Return an attribute by its dotted path, or None if a part is missing."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _above_one(path: str) -> Callable[[Any], object]:
    return lambda config: (_get(config, path) or 1) > 1


def _is_set(path: str) -> Callable[[Any], object]:
    return lambda config: _get(config, path)


def judges_ahead(config: Any) -> bool:
    """Whether a step is planned before the proposals of the last one are judged."""
    is_ahead = _get(config, "scheduler_config.async_scheduling")
    return bool(is_ahead) and _get(config, "speculative_config") is not None


def _loads_ahead(config: Any) -> object:
    return judges_ahead(config) and _get(config, "kv_transfer_config") is not None


LIMITS = (
    Limit(
        "pipeline_parallel_size > 1",
        _above_one("parallel_config.pipeline_parallel_size"),
        "later stages are not given the tokens of a forward",
    ),
    Limit(
        "decode_context_parallel_size > 1",
        _above_one("parallel_config.decode_context_parallel_size"),
        "a request's blocks are spread over ranks",
    ),
    Limit(
        "prefill_context_parallel_size > 1",
        _above_one("parallel_config.prefill_context_parallel_size"),
        "a request's blocks are spread over ranks",
    ),
    Limit(
        "enable_dbo",
        _is_set("parallel_config.enable_dbo"),
        "micro-batches have tables of their own",
    ),
    Limit(
        'kv_transfer_config with kv_load_failure_policy "fail"',
        lambda config: (
            _get(config, "kv_transfer_config.kv_load_failure_policy") == "fail"
        ),
        "a block that was not loaded intact would end its request; set "
        '"kv_load_failure_policy": "recompute"',
    ),
    Limit(
        "kv_sharing_fast_prefill",
        _is_set("cache_config.kv_sharing_fast_prefill"),
        "some layers do not store every token",
    ),
    Limit(
        "enable_prompt_embeds",
        _is_set("model_config.enable_prompt_embeds"),
        "embeddings have no token ids",
    ),
    Limit(
        "hisparse_config",
        _is_set("attention_config.hisparse_config"),
        "blocks move between host and device",
    ),
    Limit(
        "speculative_config with async_scheduling and kv_transfer_config",
        _loads_ahead,
        "from which token on a request is computed again is not known in time; turn "
        "one of them off",
    ),
    Limit(
        "enable_adaptive_verification",
        _is_set("speculative_config.enable_adaptive_verification"),
        "how many proposals of a request are judged is decided on the device",
    ),
)


HEAL_LIMITS = (
    Limit(
        "KV_CANARY=heal with tensor_parallel_size > 1",
        _above_one("parallel_config.tensor_parallel_size"),
        "the scheduler gets the output of one rank, and does not hear what the others "
        "find; use raise",
    ),
)


def refused_by(config: Any, *, heals: bool = False) -> list[str]:
    """Return the options of a `VllmConfig` that are refused, with the reason.

    Args:
        heals: whether `HEAL_LIMITS` apply, too.
    """
    limits = (*LIMITS, *HEAL_LIMITS) if heals else LIMITS
    return [f"{limit.name}: {limit.why}" for limit in limits if limit.applies(config)]


def spec_name(spec: Any) -> str:
    return type(spec).__name__


def is_seen(spec: Any) -> bool:
    """Whether the layers of a KV cache spec are supported."""
    return spec_name(spec) in (*FULL_SPECS, *WINDOW_SPECS, *LATENT_SPECS)


def is_state(spec: Any) -> bool:
    """Whether layers keep one recurrent state per request."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if of_layers is None else of_layers.values()
    return all(spec_name(each) in STATE_SPECS for each in specs)


def is_latent(spec: Any) -> bool:
    """Whether layers keep one latent per token."""
    return spec_name(spec) in LATENT_SPECS
