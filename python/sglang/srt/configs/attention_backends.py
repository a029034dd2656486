"""Capabilities of the attention backends, as data that argument checks can read.

The backends in `layers.attention` take their capabilities from this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendCapabilities:
    """Capabilities of one attention backend.

    Fields:
        devices: device types it runs on.
        supports_speculation: serves drafts and their verification.
        supports_tree_draft: serves draft trees with top-k > 1.
        needs_paged_draft_rows: reads whole pages per draft branch when page_size > 1
            and branches follow the prefix.
        needs_cpu_seq_lens: its metadata needs lengths on the host.
        supports_cuda_graph: can be captured and replayed.
        captures_prefill: prefill attention can also be captured: its launches depend
            only on shapes, and read only the batch's tensors and the pools.
        needs_power_of_two_pages: serves no other page sizes.
        supports_sinks: weighs logits without a value in the softmax.
        supports_logit_cap: caps scores by a tanh.
        supports_windowed_trees: serves draft trees whose nodes attend a window.
        supports_window_slots: reads window slots of sliding layers.
        supports_latent: attends latents, which serve as both K and V.
        supports_kv_8_bits: reads KV of 8 bits.
        expands_latents: long prefills attend keys and values expanded from latents.
        gathers_prefixes: long prefills attend copies of cached K and V.
        compares_bytes: decodes over K and V compare the bytes they load with their
            checksums.
    """

    devices: frozenset[str]
    supports_speculation: bool
    supports_tree_draft: bool
    needs_paged_draft_rows: bool
    needs_cpu_seq_lens: bool
    supports_cuda_graph: bool
    captures_prefill: bool = False
    needs_power_of_two_pages: bool = False
    supports_sinks: bool = False
    supports_logit_cap: bool = False
    supports_windowed_trees: bool = False
    supports_window_slots: bool = False
    supports_latent: bool = False
    supports_kv_8_bits: bool = False
    expands_latents: bool = False
    gathers_prefixes: bool = False
    compares_bytes: bool = False


ATTENTION_BACKENDS: dict[str, AttentionBackendCapabilities] = {
    "torch_native": AttentionBackendCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=True,
        needs_cpu_seq_lens=True,
        supports_cuda_graph=False,
        supports_sinks=True,
        supports_logit_cap=True,
        supports_windowed_trees=True,
        supports_window_slots=True,
        supports_latent=True,
        supports_kv_8_bits=True,
    ),
    "cpu_native": AttentionBackendCapabilities(
        devices=frozenset({"cpu"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=True,
        needs_cpu_seq_lens=False,
        supports_cuda_graph=False,
        captures_prefill=True,
        supports_sinks=True,
        supports_logit_cap=True,
        supports_windowed_trees=True,
        supports_window_slots=True,
        supports_latent=True,
        supports_kv_8_bits=True,
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
        supports_sinks=True,
        supports_logit_cap=True,
        supports_windowed_trees=True,
        supports_window_slots=True,
        supports_latent=True,
        supports_kv_8_bits=True,
        expands_latents=True,
        gathers_prefixes=True,
        compares_bytes=True,
    ),
    "flashinfer": AttentionBackendCapabilities(
        devices=frozenset({"cuda"}),
        supports_speculation=True,
        supports_tree_draft=True,
        needs_paged_draft_rows=False,
        needs_cpu_seq_lens=True,
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


class AttentionNeed(NamedTuple):
    """A need of a model that some backends do not support: the capability, and its name
    in errors.
    """

    capability: str
    text: str


KV_8_BITS = AttentionNeed("supports_kv_8_bits", "KV of 8 bits (--kv-cache-dtype)")
SINKS = AttentionNeed("supports_sinks", "attention sinks")
LATENT = AttentionNeed("supports_latent", "latents in place of K and V")
LOGIT_CAP = AttentionNeed("supports_logit_cap", "capped attention scores")
WINDOWED_TREES = AttentionNeed(
    "supports_windowed_trees",
    "sliding windows with --speculative-eagle-topk above 1",
)


def check_needs(name: str, needs: Iterable[AttentionNeed], *, device: str) -> None:
    """Check that the backend `name` supports what a model needs.

    Raises:
        ValueError: it does not; names the need and the backends on `device` that do.
    """
    for need in needs:
        able = [
            other
            for other in supported_names(device)
            if getattr(ATTENTION_BACKENDS[other], need.capability)
        ]
        if name not in able:
            raise ValueError(
                f"--attention-backend {name} does not serve {need.text}, which is "
                f"needed here; use --attention-backend {' or '.join(able)}"
            )
