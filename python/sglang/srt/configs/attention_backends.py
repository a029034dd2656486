"""Capabilities of the attention backends, as data that argument checks may read.

The backends themselves are in `layers.attention`; they take their capabilities from
this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendCapabilities:
    """Capabilities of one attention backend.

    Fields:
        devices: device types that it runs on.
        supports_speculation: serves drafts and their verification.
        supports_tree_draft: serves draft trees with top-k > 1.
        needs_paged_draft_rows: reads whole pages per draft branch when page_size > 1.
        needs_cpu_seq_lens: its metadata needs lengths on the host.
        supports_cuda_graph: can be captured and replayed.
        captures_prefill: prefill attention can be captured, too: its launches depend
            on shapes alone and read only the batch's tensors and the pools.
        needs_power_of_two_pages: serves no other page sizes.
    """

    devices: frozenset[str]
    supports_speculation: bool
    supports_tree_draft: bool
    needs_paged_draft_rows: bool
    needs_cpu_seq_lens: bool
    supports_cuda_graph: bool
    captures_prefill: bool = False
    needs_power_of_two_pages: bool = False


ATTENTION_BACKENDS: dict[str, AttentionBackendCapabilities] = {
    "torch_native": AttentionBackendCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=True,
        needs_cpu_seq_lens=True,
        supports_cuda_graph=False,
    ),
    "cpu_native": AttentionBackendCapabilities(
        devices=frozenset({"cpu"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=True,
        needs_cpu_seq_lens=False,
        supports_cuda_graph=False,
        captures_prefill=True,
    ),
    "triton": AttentionBackendCapabilities(
        devices=frozenset({"cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=False,
        needs_cpu_seq_lens=False,
        supports_cuda_graph=True,
        captures_prefill=True,
        needs_power_of_two_pages=True,
    ),
    "flashinfer": AttentionBackendCapabilities(
        devices=frozenset({"cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=False,
        needs_cpu_seq_lens=True,
        supports_cuda_graph=True,
    ),
    "fa3": AttentionBackendCapabilities(
        devices=frozenset({"cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=True,
        needs_cpu_seq_lens=False,
        supports_cuda_graph=True,
    ),
}

DEFAULT_ATTENTION_BACKEND = {"cpu": "cpu_native", "cuda": "triton"}


def supported_names(device: str) -> list[str]:
    """Return the backends that run on `device`, sorted."""
    return sorted(
        name
        for name, capabilities in ATTENTION_BACKENDS.items()
        if device in capabilities.devices
    )


def check_available(name: str) -> None:
    """Check that this version can serve attention through the backend `name`.

    Raises:
        ValueError: it cannot.
    """
    if name == "fa3":
        refuse_fa3()


def refuse_fa3() -> NoReturn:
    """Refuse the backend fa3.

    Raises:
        ValueError: always; names what is missing and the alternatives.
    """
    instead = "use --attention-backend flashinfer or triton"
    if find_spec("sgl_kernel") is None:
        raise ValueError(
            "--attention-backend fa3 needs the package sgl_kernel, which is not "
            "installed: pip install sgl-kernel (0.3.21 needs torch 2.9.1 and CUDA 12); "
            f"this version has not been verified with it, so {instead}"
        )
    raise ValueError(
        "--attention-backend fa3: the package sgl_kernel is installed, but this "
        "version has not been verified with it, and serves nothing unverified; "
        f"{instead}"
    )
