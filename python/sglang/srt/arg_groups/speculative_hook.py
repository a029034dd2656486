"""Checks and resolves the `--speculative-*` flags."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.arg_parser import flag_name
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.model_config import read_raw_config
from sglang.srt.utils.paths import bundled_demo_draft_path, bundled_demo_model_path

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_NGRAM_FLAGS = (
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_match_type",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_capacity",
)
_DEPENDENT_FLAGS = (
    "speculative_draft_model_path",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_layout",
    "speculative_token_map",
)
# Defaults of (steps, top-k, draft tokens).
_LLAMA_TREE = (5, 4, 8)
_OTHER_TREE = (3, 1, 4)
_NGRAM_NODES = 12
_LLAMA_TYPES = frozenset({"LlamaForCausalLM"})
# Defaults of --max-running-requests with speculative decoding, by device.
_MAX_RUNNING_REQUESTS = {"cpu": 64, "cuda": 48}


def handle_speculative(server_args: ServerArgs) -> None:
    """Resolve the flags of speculative decoding, or reject unsupported ones.

    Raises:
        ValueError: names the flag and the fix.
    """
    if server_args.speculative_algorithm != "NGRAM":
        _refuse_ngram_flags(server_args)
    if server_args.speculative_algorithm is not None:
        if server_args.draft_kind.has_model:
            _resolve_model_drafts(server_args)
        else:
            _resolve_ngram(server_args)
        _check_backend(server_args)
        _check_other_flags(server_args)
        return
    for name in _DEPENDENT_FLAGS:
        value = getattr(server_args, name)
        if value is not None:
            flag = flag_name(name)
            raise ValueError(
                f"{flag} {value} has no effect without --speculative-algorithm; "
                f"remove {flag}"
            )


def default_max_running_requests(server_args: ServerArgs) -> int:
    """Return the default of --max-running-requests with speculative decoding."""
    return _MAX_RUNNING_REQUESTS[server_args.device]


def _resolve_model_drafts(server_args: ServerArgs) -> None:
    """Resolve the flags of algorithms with a draft model."""
    _resolve_draft_path(server_args)
    _resolve_tree(server_args)
    if server_args.speculative_draft_layout is None:
        server_args.speculative_draft_layout = "region"


def _refuse_ngram_flags(server_args: ServerArgs) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(server_args)}
    for name in _NGRAM_FLAGS:
        value = getattr(server_args, name)
        if value != defaults[name]:
            raise ValueError(
                f"{flag_name(name)} {value} has no effect without "
                "--speculative-algorithm NGRAM; remove it"
            )


# Flags that NGRAM does not take, and what to do instead.
_NO_NGRAM_FLAGS = {
    "speculative_draft_model_path": "no model drafts; remove it",
    "speculative_draft_load_format": "no model drafts; remove it",
    "speculative_draft_model_quantization": "no model drafts; remove it",
    "speculative_draft_kv_cache_dtype": "no model drafts; remove it",
    "speculative_eagle_topk": "use --speculative-ngram-max-bfs-breadth",
    "speculative_draft_layout": "branches have no KV before verification; remove it",
    "speculative_token_map": "no model drafts; remove it",
}


def _resolve_ngram(args: ServerArgs) -> None:
    """Resolve the flags of NGRAM: the tree that is verified."""
    same = {"speculative_eagle_topk": args.speculative_ngram_max_bfs_breadth}
    for name, fix in _NO_NGRAM_FLAGS.items():
        value = getattr(args, name)
        if value is not None and value != same.get(name):
            raise ValueError(
                f"{flag_name(name)} {value} does not go with --speculative-algorithm "
                f"NGRAM: {fix}"
            )
    nodes, steps = args.speculative_num_draft_tokens, args.speculative_num_steps
    if nodes is None:
        nodes = _NGRAM_NODES if steps is None else max(_NGRAM_NODES, steps + 1)
    args.speculative_num_draft_tokens = nodes
    args.speculative_num_steps = max(nodes - 1, 1) if steps is None else steps
    args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
    _resolve_tree(args)


def _resolve_draft_path(args: ServerArgs) -> None:
    if args.speculative_draft_model_path is not None:
        return
    assert args.model_path is not None and args.speculative_algorithm is not None
    if args.speculative_algorithm == "NEXTN":
        args.speculative_draft_model_path = args.model_path
        return
    if Path(args.model_path) != bundled_demo_model_path():
        raise ValueError(
            f"--speculative-algorithm {args.speculative_algorithm} needs "
            "--speculative-draft-model-path: a draft that was trained for "
            f"{args.model_path}; a head inside that checkpoint is --speculative-"
            "algorithm NEXTN"
        )
    path = bundled_demo_draft_path(args.speculative_algorithm)
    args.speculative_draft_model_path = str(path)


def _resolve_tree(args: ServerArgs) -> None:
    """Fill in missing numbers of the tree and check that such a tree exists."""
    steps, topk, nodes = _with_defaults(
        args,
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )
    if topk == 1 and nodes != steps + 1:
        logger.warning(
            "--speculative-num-draft-tokens %d becomes %d: a chain (top-k 1) of %d "
            "steps has no other size",
            nodes,
            steps + 1,
            steps,
        )
        nodes = steps + 1
    most = topk + topk**2 * (steps - 1) + 1
    if nodes < steps + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens {nodes} must be at least "
            f"--speculative-num-steps {steps} + 1 = {steps + 1}; raise it, or lower "
            "the steps"
        )
    if nodes > most:
        raise ValueError(
            f"--speculative-num-draft-tokens {nodes}: top-k {topk} and {steps} steps "
            f"yield {most - 1} candidates, so use at most {most}"
        )
    args.speculative_num_steps = steps
    args.speculative_eagle_topk = topk
    args.speculative_num_draft_tokens = nodes


def _with_defaults(
    args: ServerArgs, steps: int | None, topk: int | None, nodes: int | None
) -> tuple[int, int, int]:
    """Return (steps, top-k, draft tokens).

    The default tree if nothing is given, otherwise a chain unless a top-k is given.
    """
    if steps is None and topk is None and nodes is None:
        is_llama = _architecture(args) in _LLAMA_TYPES
        return _LLAMA_TREE if is_llama else _OTHER_TREE
    topk = 1 if topk is None else topk
    if steps is None:
        steps = _OTHER_TREE[0] if nodes is None or topk > 1 else nodes - 1
        steps = max(steps, 1)
    if nodes is None:
        candidates = topk + topk**2 * (steps - 1)
        nodes = steps + 1 if topk == 1 else min(topk * steps, candidates) + 1
    return steps, topk, nodes


def _architecture(args: ServerArgs) -> str | None:
    """Return the target's architecture, or None if its config cannot be read.

    An unreadable config is reported by the model loader.
    """
    assert args.model_path is not None
    try:
        return str(read_raw_config(Path(args.model_path))["architectures"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def _check_backend(args: ServerArgs) -> None:
    name = args.attention_backend
    assert name is not None
    topk = args.speculative_eagle_topk
    capabilities = ATTENTION_BACKENDS[name]
    if not capabilities.supports_speculation:
        raise ValueError(
            f"--attention-backend {name} does not serve --speculative-algorithm "
            f"{args.speculative_algorithm}; use one of {_tree_backends()}"
        )
    if topk is not None and topk > 1 and not capabilities.supports_tree_draft:
        raise ValueError(
            f"--attention-backend {name} serves chains only, not "
            f"--speculative-eagle-topk {topk}; use one of {_tree_backends()}, or "
            "top-k 1"
        )


def _tree_backends() -> str:
    """Return the backends that verify draft trees, with their devices."""
    return ", ".join(
        f"{name} ({', '.join(sorted(able.devices))})"
        for name, able in ATTENTION_BACKENDS.items()
        if able.supports_tree_draft
    )


def _check_other_flags(args: ServerArgs) -> None:
    """Reject flags that conflict with this algorithm or have no effect on it."""
    if args.speculative_token_map is not None:
        if args.speculative_algorithm not in ("EAGLE", "NEXTN"):
            raise ValueError(
                f"--speculative-token-map {args.speculative_token_map} is for "
                "--speculative-algorithm EAGLE or NEXTN: an EAGLE3 head brings its own "
                "map, a STANDALONE draft has its own head; remove it"
            )
        if args.tp_size > 1:
            raise ValueError(
                f"--speculative-token-map {args.speculative_token_map} slices the "
                f"target's head, which --tp-size {args.tp_size} has split; remove one "
                "of them"
            )
    for name in ("single", "acc"):
        value = getattr(args, f"speculative_accept_threshold_{name}")
        if not 0.0 < value <= 1.0:
            raise ValueError(
                f"--speculative-accept-threshold-{name} {value} must lie in (0, 1]"
            )
