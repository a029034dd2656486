"""Checks and consequences of the CUDA graph flags.

Each phase, decode or prefill, has its own kind of graphs or none. SGLang's current
flags (`--cuda-graph-backend-*`, `--cuda-graph-config`) resolve to the older ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from sglang.srt.arg_groups.arg_parser import Synonym
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DECODE_GRAPHS = "full"
PREFILL_GRAPHS = "breakable"
"""The kinds that this engine has."""
DECODE_GRAPH_KINDS = tuple(
    Synonym(name, DECODE_GRAPHS, f"decode graphs are {DECODE_GRAPHS} here")
    for name in ("breakable", "tc_piecewise")
)
PREFILL_GRAPH_KINDS = tuple(
    Synonym(name, PREFILL_GRAPHS, f"prefill graphs are {PREFILL_GRAPHS} here")
    for name in ("full", "tc_piecewise")
)
_CONFIG_FLAG = "--cuda-graph-config"
# Largest batch with a decode graph if memory decides how large a batch may be.
_DEFAULT_MAX_BATCH = 256

_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Graphs of a phase.

    Fields:
        backend: kind of the graphs. bs, max_bs: batch sizes, in tokens for prefills.
        tc_compiler, max_seq_len, max_context: options of kinds that are not supported.
    """

    backend: Literal["full", "breakable", "tc_piecewise", "disabled"] | None = None
    bs: list[_Size] | None = None
    max_bs: _Size | None = None
    tc_compiler: str | None = None
    max_seq_len: _Size | None = None
    max_context: _Size | None = None


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    decode: _Phase = _Phase()
    prefill: _Phase = _Phase()


def handle_graph_phases(server_args: ServerArgs) -> None:
    """Resolve SGLang's current flags to the flags of each phase.

    Raises:
        ValueError: the JSON is invalid; names the key and the fix.
    """
    if server_args.cuda_graph_config is not None:
        _apply_config(server_args, server_args.cuda_graph_config)
    if server_args.debug_cuda_graph or (
        server_args.cuda_graph_backend_decode == "disabled"
    ):
        server_args.disable_cuda_graph = True
    if server_args.debug_cuda_graph or (
        server_args.cuda_graph_backend_prefill == "disabled"
    ):
        server_args.disable_piecewise_cuda_graph = True


def _apply_config(server_args: ServerArgs, text: str) -> None:
    try:
        config = msgspec.json.decode(text, type=_Config)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{_CONFIG_FLAG} {text!r}: {error}; write JSON such as "
            '{"decode": {"backend": "full", "max_bs": 64}}'
        ) from None
    decode, prefill = config.decode, config.prefill
    if decode.backend is not None:
        server_args.disable_cuda_graph = decode.backend == "disabled"
    if prefill.backend is not None:
        server_args.disable_piecewise_cuda_graph = prefill.backend == "disabled"
    server_args.cuda_graph_bs = decode.bs or server_args.cuda_graph_bs
    server_args.cuda_graph_max_bs = decode.max_bs or server_args.cuda_graph_max_bs
    if prefill.bs or prefill.max_bs:
        logger.warning(
            "%s: the sizes of prefill graphs follow --chunked-prefill-size",
            _CONFIG_FLAG,
        )


def handle_cuda_graph(server_args: ServerArgs) -> None:
    """Reject flags that contradict each other or have no effect; resolve the others.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    sizes = server_args.cuda_graph_bs or []
    if any(size < 1 for size in sizes):
        raise ValueError(f"--cuda-graph-bs {sizes} must be positive batch sizes")
    if server_args.device == "cpu" and (sizes or server_args.cuda_graph_max_bs):
        flag = "--cuda-graph-bs" if sizes else "--cuda-graph-max-bs"
        logger.warning("%s has no effect with --device cpu: a CPU has no graphs", flag)
        server_args.cuda_graph_bs = server_args.cuda_graph_max_bs = None
    if server_args.enable_breakable_cuda_graph:
        _check_breakable(server_args)
    if server_args.disaggregation_mode == "prefill":
        _handle_prefill_role(server_args)
    elif server_args.max_running_requests is None and not sizes:
        # As many as memory allows; each graph takes memory and time.
        server_args.cuda_graph_max_bs = (
            server_args.cuda_graph_max_bs or _DEFAULT_MAX_BATCH
        )


def has_prefill_graphs(server_args: ServerArgs) -> bool:
    """Whether prefill runs as breakable CUDA graphs.

    It does if they can be captured, unless they are switched off.
    """
    return (
        server_args.device == "cuda"
        and _supports_graphs(server_args)
        and not server_args.disable_piecewise_cuda_graph
    )


def _check_breakable(server_args: ServerArgs) -> None:
    flag = "--enable-breakable-cuda-graph"
    if server_args.disable_piecewise_cuda_graph:
        raise ValueError(
            f"{flag} contradicts --disable-piecewise-cuda-graph; remove one of them"
        )
    if server_args.device != "cuda":
        raise ValueError(
            f"{flag} has no effect with --device {server_args.device}; remove it"
        )
    if not _supports_graphs(server_args):
        raise ValueError(
            f"{flag} needs an attention backend that can be captured, not "
            f"--attention-backend {server_args.attention_backend}; use triton or "
            "flashinfer, or remove it"
        )


def _handle_prefill_role(server_args: ServerArgs) -> None:
    """Switch decode graphs off: this role never decodes, so they would only waste
    memory.

    Raises:
        ValueError: a flag asks for decode graphs.
    """
    if server_args.cuda_graph_bs or server_args.cuda_graph_max_bs:
        flag = "bs" if server_args.cuda_graph_bs else "max-bs"
        raise ValueError(
            f"--cuda-graph-{flag} has no effect with --disaggregation-mode prefill, "
            "which never decodes; remove one of them"
        )
    server_args.disable_cuda_graph = True


def _supports_graphs(server_args: ServerArgs) -> bool:
    assert server_args.attention_backend is not None
    return ATTENTION_BACKENDS[server_args.attention_backend].supports_cuda_graph
