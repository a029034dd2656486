"""Whether a model's sliding layers get a pool of window slots, and how many of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.layer_types import FULL, SLIDING
from sglang.srt.mem_cache.swa_slots import SwaSlots

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Steps in flight, and tokens that a finished request may have too many.
MIN_SLACK = 4


def is_sliding(config: ModelConfig) -> tuple[bool, ...]:
    """Of every layer, whether it has a sliding window."""
    return tuple(kind == SLIDING for kind in config.layer_types)


def has_window_slots(config: ModelConfig, args: ServerArgs) -> bool:
    """Whether the model's sliding layers get slots of their own.

    A model of one kind of layers does not, nor one whose window no context leaves. What
    cannot serve them is logged.
    """
    window = config.sliding_window
    mixed = FULL in config.layer_types and SLIDING in config.layer_types
    if args.disable_hybrid_swa_memory or window is None or not mixed:
        return False
    if window >= config.context_len:
        return False
    reason = _refusal(args)
    if reason:
        logger.warning(
            "%s does not serve window slots: all layers keep every token, as with "
            "--disable-hybrid-swa-memory",
            reason,
        )
    return not reason


def _refusal(args: ServerArgs) -> str:
    """The flag because of which there are no window slots; empty: none."""
    assert args.attention_backend is not None
    if not ATTENTION_BACKENDS[args.attention_backend].supports_window_slots:
        return f"--attention-backend {args.attention_backend}"
    if args.disaggregation_mode != "null":
        return f"--disaggregation-mode {args.disaggregation_mode}"
    return ""


def create_swa_slots(
    config: ModelConfig,
    args: ServerArgs,
    *,
    size: int,
    page_size: int,
    reserve: int,
    region_size: int,
    device: str,
) -> SwaSlots:
    """Window slots beside `size` slots.

    Args:
        reserve: slots that a request keeps beyond its tokens (speculation).
        region_size: slots of a draft region.

    Raises:
        ValueError: they do not hold one request; names the flags.
    """
    assert config.sliding_window is not None
    pages = size // page_size
    swa = SwaSlots(
        num_pages=pages,
        num_window_pages=max(int(pages * args.swa_full_tokens_ratio), 1),
        page_size=page_size,
        window=config.sliding_window,
        slack=page_size + max(MIN_SLACK, reserve),
        device=device,
        region_size=region_size,
    )
    chunk = args.chunked_prefill_size
    longest = min(config.context_len, size)
    prefill = longest if chunk is None or chunk < 0 else min(chunk, longest)
    needed = min(prefill + swa.span + reserve, size)
    if swa.size < needed:
        raise ValueError(
            f"--swa-full-tokens-ratio {args.swa_full_tokens_ratio} of {size} KV slots "
            f"leaves {swa.size} window slots; a prefill of {prefill} tokens beside a "
            f"window of {config.sliding_window} needs {needed}: raise it or "
            "--max-total-tokens, lower --chunked-prefill-size, or use "
            "--disable-hybrid-swa-memory"
        )
    return swa
