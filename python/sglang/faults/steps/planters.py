"""What plants each fault of a step: the function that has the fault's name, or one of
lengths or stores that a table parametrizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kv_canary.faults.catalogue import STEP_FAULTS
from sglang.faults.steps import (
    carried,
    draws,
    lengths,
    publishing,
    results,
    stores,
    trees,
)
from sglang.faults.steps.site import FaultSite
from sglang.faults.steps.stores import StoreOf
from sglang.srt.forward.batch import ForwardMode

Plant = Callable[[FaultSite], None]

_STORES = {
    "prefill": StoreOf(mode=ForwardMode.EXTEND),
    "decode": StoreOf(mode=ForwardMode.DECODE),
    "verify": StoreOf(mode=ForwardMode.TARGET_VERIFY),
    "draft_prefill": StoreOf(mode=ForwardMode.EXTEND, is_draft=True),
    "draft_step": StoreOf(mode=ForwardMode.DECODE, is_draft=True),
    "draft_extend": StoreOf(mode=ForwardMode.DRAFT_EXTEND_V2, is_draft=True),
}
_TARGET_LENGTHS = {
    "decode_lens_short": (ForwardMode.DECODE, lengths.one_short),
    "decode_lens_stale": (ForwardMode.DECODE, lengths.short_prefix),
    "prefill_view_at_prefix": (ForwardMode.EXTEND, lengths.at_prefix),
    "verify_view_at_prefix": (ForwardMode.TARGET_VERIFY, lengths.at_prefix),
    "verify_view_short": (ForwardMode.TARGET_VERIFY, lengths.one_short),
    "verify_lens_stale": (ForwardMode.TARGET_VERIFY, lengths.short_prefix),
}
_DRAFT_LENGTHS = {
    "draft_step_lens_short": (ForwardMode.DECODE, lengths.one_short),
    "draft_step_lens_stale": (ForwardMode.DECODE, lengths.short_prefix),
    "draft_extend_view_at_prefix": (ForwardMode.DRAFT_EXTEND_V2, lengths.at_prefix),
    "draft_extend_lens_stale": (ForwardMode.DRAFT_EXTEND_V2, lengths.short_prefix),
}
PLANTERS: Mapping[str, Plant] = {
    **{
        name: vars(module)[name]
        for module in (publishing, lengths, results, carried, draws)
        for name in STEP_FAULTS
        if hasattr(module, name)
    },
    **{n: trees.in_tree(vars(trees)[n]) for n in STEP_FAULTS if hasattr(trees, n)},
    **{name: lengths.target_lens(*args) for name, args in _TARGET_LENGTHS.items()},
    **{name: lengths.draft_lens(*args) for name, args in _DRAFT_LENGTHS.items()},
    **{f"{of}_kv_further": stores.store_further(s) for of, s in _STORES.items()},
    **{f"{of}_kv_nowhere": stores.store_nowhere(s) for of, s in _STORES.items()},
}
