"""Configurations of SGLang that the plugin cannot check completely, and refuses by
name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# They verify trees, or chains, under a mask of all tokens of a row.
SPECULATION = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
SEEN = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Supported pools, for `doctor`; `pool.py` says what a pool must have."""


class Limit(NamedTuple):
    """Fields: name: of the option; applies: to `ServerArgs`; why: reason for
    refusal."""

    name: str
    applies: Callable[[Any], object]
    why: str


def _above_one(name: str) -> Callable[[Any], object]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _is_set(name: str) -> Callable[[Any], object]:
    return lambda args: getattr(args, name, None)


def _disaggregates(args: Any) -> object:
    return getattr(args, "disaggregation_mode", "null") not in (None, "null")


def _speculates_otherwise(args: Any) -> object:
    name = getattr(args, "speculative_algorithm", None)
    return name is not None and str(name).upper() not in SPECULATION


_PIPELINE = "later stages are not given the tokens of a forward"
_SPREAD = "a request's slots are spread over ranks"
_PAST = "KV is brought into slots that no forward wrote"
_HALVES = "halves of a batch run at once, with tables of their own"

LIMITS = (
    Limit("pp_size > 1", _above_one("pp_size"), _PIPELINE),
    Limit("dcp_size > 1", _above_one("dcp_size"), _SPREAD),
    Limit("attn_cp_size > 1", _above_one("attn_cp_size"), _SPREAD),
    Limit(
        "enable_dp_attention",
        _is_set("enable_dp_attention"),
        "batches are padded to those of other ranks before they are seen",
    ),
    Limit("enable_two_batch_overlap", _is_set("enable_two_batch_overlap"), _HALVES),
    Limit("enable_pdmux", _is_set("enable_pdmux"), _HALVES),
    Limit("disaggregation_mode", _disaggregates, _PAST),
    Limit("enable_hierarchical_cache", _is_set("enable_hierarchical_cache"), _PAST),
    Limit("enable_lmcache", _is_set("enable_lmcache"), _PAST),
    Limit(
        "enable_hisparse",
        _is_set("enable_hisparse"),
        "slots are swapped with host memory during a forward",
    ),
    Limit(
        "enable_memory_saver",
        _is_set("enable_memory_saver"),
        "the pool's memory may be taken away and come back empty",
    ),
    Limit(
        "enable_torch_compile",
        _is_set("enable_torch_compile"),
        "the model's forward is compiled, and the checks with it",
    ),
    Limit(
        "dllm_algorithm",
        _is_set("dllm_algorithm"),
        "tokens of a block change after their KV was written",
    ),
    Limit(
        "speculative_algorithm",
        _speculates_otherwise,
        f"its verification is none of {', '.join(SPECULATION)}",
    ),
)


def refused_by(args: Any) -> list[str]:
    """Return the options of a `ServerArgs` that are refused, each with its reason."""
    return [
        f"{limit.name}: {limit.why}" for limit in LIMITS if bool(limit.applies(args))
    ]
