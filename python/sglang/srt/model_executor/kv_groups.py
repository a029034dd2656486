"""The KV groups of a model: which layers, how many slots, and which tensors.

The registry of secondary groups is here. A new kind of KV is an entry in `SECONDARY`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.layer_types import FULL as FULL_LAYER
from sglang.srt.configs.layer_types import SLIDING
from sglang.srt.mem_cache.groups.grouped_pool import GroupedKVPool
from sglang.srt.mem_cache.groups.kv_group import KVGroup
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    kv_bytes_per_token,
)
from sglang.srt.mem_cache.mla_memory_pool import (
    MLATokenToKVPool,
    latent_bytes_per_token,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.groups.slots import PagedSlots
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Steps in flight, and tokens by which a finished request may overshoot.
MIN_SLACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Requirements on the slots of a secondary group.

    Fields:
        size, page_size: size and page size of the primary group.
        reserve: slots that a request takes beyond its tokens (speculation).
        region_size: slots of a draft region.
    """

    size: int
    page_size: int
    reserve: int
    region_size: int
    device: str


class SecondaryGroup(ABC):
    """A kind of KV in addition to the primary slots.

    Attributes:
        name: name of its `PagedSlots`.
    """

    name: str

    @abstractmethod
    def is_wanted(self, config: ModelConfig, args: ServerArgs) -> bool:
        """Whether a target gets the group. Logs why not if a user may wonder."""

    @abstractmethod
    def share(self, args: ServerArgs) -> float:
        """Return the slots of the group per primary slot."""

    @abstractmethod
    def create_slots(
        self, config: ModelConfig, args: ServerArgs, plan: SlotPlan
    ) -> PagedSlots:
        """Create its slots.

        Raises:
            ValueError: they cannot hold one request. The message names the flags.
        """

    @abstractmethod
    def layers(
        self, config: ModelConfig, slots: PagedSlots | None = None
    ) -> tuple[int, ...]:
        """Return the layers of a model that the group can serve.

        Args:
            slots: slots of the target; this model may be its draft.
        """


class WindowGroup(SecondaryGroup):
    """Sliding layers of a model that also has full-attention layers."""

    name = WindowSlots.name

    def is_wanted(self, config: ModelConfig, args: ServerArgs) -> bool:
        window = config.sliding_window
        if args.disable_hybrid_swa_memory or window is None or not self.layers(config):
            return False
        # A context never leaves such a window.
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

    def share(self, args: ServerArgs) -> float:
        return args.swa_full_tokens_ratio

    def layers(
        self, config: ModelConfig, slots: PagedSlots | None = None
    ) -> tuple[int, ...]:
        window, types = config.sliding_window, config.layer_types
        is_mixed = FULL_LAYER in types and SLIDING in types
        if config.latent is not None or window is None or not is_mixed:
            return ()
        # A draft's window must lie within the target's.
        if isinstance(slots, WindowSlots) and window > slots.window:
            return ()
        return tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)

    def create_slots(
        self, config: ModelConfig, args: ServerArgs, plan: SlotPlan
    ) -> PagedSlots:
        window, ratio = config.sliding_window, args.swa_full_tokens_ratio
        assert window is not None
        size, pages = plan.size, plan.size // plan.page_size
        slots = WindowSlots(
            num_pages=pages,
            num_window_pages=max(int(pages * ratio), 1),
            page_size=plan.page_size,
            window=window,
            slack=plan.page_size + max(MIN_SLACK, plan.reserve),
            reserve=plan.reserve,
            device=plan.device,
            region_size=plan.region_size,
        )
        chunk = args.chunked_prefill_size
        longest = min(config.context_len, size)
        prefill = longest if chunk is None or chunk < 0 else min(chunk, longest)
        needed = min(prefill + slots.span + plan.reserve, size)
        if slots.size < needed:
            raise ValueError(
                f"--swa-full-tokens-ratio {ratio} of {size} KV slots leaves "
                f"{slots.size} window slots; a prefill of {prefill} tokens beside a "
                f"window of {window} needs {needed}: raise it or --max-total-tokens, "
                "lower --chunked-prefill-size, or use --disable-hybrid-swa-memory"
            )
        return slots


def _refusal(args: ServerArgs) -> str:
    """Return the flag that rules out window slots, or an empty string."""
    assert args.attention_backend is not None
    if not ATTENTION_BACKENDS[args.attention_backend].supports_window_slots:
        return f"--attention-backend {args.attention_backend}"
    return ""


SECONDARY: dict[str, SecondaryGroup] = {kind.name: kind for kind in (WindowGroup(),)}


def wanted_groups(config: ModelConfig, args: ServerArgs) -> list[SecondaryGroup]:
    """Return the secondary groups that a target gets."""
    return [kind for kind in SECONDARY.values() if kind.is_wanted(config, args)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What one layer stores for one token, on this rank.

    Fields:
        layer_bytes: bytes of one slot in one layer.
        heads: KV heads whose bytes the canary may keep sums of; 0 if it keeps none.
        create: makes tensors for some layers; takes `size`, `layer_num`, `page_size`
            and `device`.
    """

    layer_bytes: int
    heads: int
    create: Callable[..., KVCache]

    @classmethod
    def of(
        cls, config: ModelConfig, *, dtype: torch.dtype, kv_heads: int
    ) -> TensorSpec:
        """Return the spec of a model; this rank has `kv_heads` of its KV heads."""
        latent = config.latent
        if latent is not None:
            return cls(
                layer_bytes=latent_bytes_per_token(
                    layer_num=1, width=latent.width, dtype=dtype
                ),
                heads=0,
                create=partial(
                    MLATokenToKVPool,
                    kv_lora_rank=latent.rank,
                    rope_dim=latent.rope_dim,
                    dtype=dtype,
                ),
            )
        head_dim = config.head_dim
        return cls(
            layer_bytes=kv_bytes_per_token(
                layer_num=1, head_num=kv_heads, head_dim=head_dim, dtype=dtype
            ),
            heads=kv_heads,
            create=partial(
                MHATokenToKVPool, head_num=kv_heads, head_dim=head_dim, dtype=dtype
            ),
        )


def create_kv_pool(
    config: ModelConfig,
    spec: TensorSpec,
    *,
    size: int,
    page_size: int,
    secondary: tuple[PagedSlots, ...],
    region_size: int,
    device: str,
) -> KVCache:
    """Create the KV bytes of a model for the allocator's slots and, for a draft, for
    the slots of its region.

    Args:
        size: primary slots of the allocator.
        secondary: the allocator's other groups. Groups that serve none of this model's
            layers get no bytes.
        region_size: slots of a draft's region; 0 for a target.

    Raises:
        ValueError: a layer is in two groups. The message names them.
    """
    served = [
        (slots, layers)
        for slots in secondary
        if (layers := SECONDARY[slots.name].layers(config, slots))
    ]
    taken = {layer for _, layers in served for layer in layers}
    rest = tuple(layer for layer in config.attention_layers if layer not in taken)
    create = partial(spec.create, page_size=page_size, device=device)
    primary = create(size=size + region_size, layer_num=len(rest))
    if len(rest) == config.num_layers:
        return primary
    return GroupedKVPool(
        [
            KVGroup(name=primary.kind, layers=rest, slots=None, tensors=primary),
            *(
                KVGroup(
                    name=slots.name,
                    layers=layers,
                    slots=slots,
                    tensors=create(
                        size=slots.size + region_size, layer_num=len(layers)
                    ),
                )
                for slots, layers in served
            ),
        ],
        layers=config.attention_layers,
    )
