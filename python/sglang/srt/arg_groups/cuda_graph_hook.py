"""Checks and consequences of the CUDA graph flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_cuda_graph(server_args: ServerArgs) -> None:
    """Refuse flags that contradict each other or have no effect; resolve the others.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    sizes = server_args.cuda_graph_bs or []
    if any(size < 1 for size in sizes):
        raise ValueError(f"--cuda-graph-bs {sizes} must be positive batch sizes")
    if server_args.device == "cpu" and (sizes or server_args.cuda_graph_max_bs):
        flag = "--cuda-graph-bs" if sizes else "--cuda-graph-max-bs"
        raise ValueError(f"{flag} has no effect with --device cpu; remove it")
    if server_args.enable_breakable_cuda_graph:
        _check_breakable(server_args)
    if server_args.disaggregation_mode == "prefill":
        _handle_prefill_role(server_args)


def has_prefill_graphs(server_args: ServerArgs) -> bool:
    """Whether prefill runs as breakable CUDA graphs.

    It does wherever they can be captured, unless they are switched off.
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
    """Switch decode graphs off: this role never decodes, they would only take memory.

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
