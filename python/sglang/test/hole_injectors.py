"""Faults that changed tokens or drafts and were not seen once, by name.

Each belongs to a hole that was found by planting one-line faults (`scripts/mutation`):
A publishing, B lengths, C prompts, D trees, E rows, F results, H stores; and what
drafts hand on beside their KV.
"""

from __future__ import annotations

from collections.abc import Mapping

from kv_canary.checks import Reason
from sglang.srt.forward.batch import ForwardMode
from sglang.test.holes import (
    carried,
    lengths,
    publishing,
    results,
    stores,
    trees,
)
from sglang.test.holes.site import (
    Changes,
    FoundBy,
    HoleInjector,
    Where,
)

_INPUT = Reason.WRITE_TOKEN | Reason.WRITE_POSITION
_RECORD = (
    Reason.VERIFY_LINEAGE
    | Reason.VERIFY_POSITION
    | Reason.VERIFY_TOKEN
    | Reason.VERIFY_FREED
)

PUBLISHING: dict[str, HoleInjector] = {
    "publish_early": HoleInjector(
        plant=publishing.publish_early,
        where=Where.PLAIN,
        reasons=Reason.WRITE_TOKEN,
        found_by=FoundBy.NEXT,
    ),
    "publish_nothing": HoleInjector(
        plant=publishing.publish_nothing,
        where=Where.PLAIN,
        reasons=Reason.WRITE_TOKEN,
        found_by=FoundBy.NEXT,
    ),
    "publish_swapped": HoleInjector(
        plant=publishing.publish_swapped,
        where=Where.PLAIN,
        reasons=Reason.WRITE_TOKEN,
        found_by=FoundBy.NEXT,
    ),
    "accepted_early": HoleInjector(
        plant=publishing.accepted_early,
        where=Where.SPECULATION,
        reasons=Reason.WRITE_TOKEN,
    ),
    "accepted_reversed": HoleInjector(
        plant=publishing.accepted_reversed,
        where=Where.SPECULATION,
        reasons=Reason.WRITE_TOKEN,
    ),
    "accepted_nothing": HoleInjector(
        plant=publishing.accepted_nothing,
        where=Where.SPECULATION,
        reasons=Reason.WRITE_TOKEN,
    ),
    "accepted_swapped": HoleInjector(
        plant=publishing.accepted_swapped,
        where=Where.SPECULATION,
        reasons=Reason.WRITE_TOKEN,
    ),
    "relay_stale": HoleInjector(
        plant=publishing.relay_stale,
        where=Where.SPECULATION,
        reasons=_INPUT | _RECORD,
        found_by=FoundBy.NEXT,
    ),
    "relay_ahead": HoleInjector(
        plant=publishing.relay_ahead,
        where=Where.SPECULATION,
        reasons=_INPUT | _RECORD,
        found_by=FoundBy.NEXT,
    ),
}

# Attention of an extend takes its lengths from the batch's own prefix lengths: a view
# that is too short is reported and changes nothing on these backends.
LENGTHS: dict[str, HoleInjector] = {
    "decode_lens_short": HoleInjector(
        plant=lengths.target_lens(ForwardMode.DECODE, lengths.one_short),
        where=Where.PLAIN,
        reasons=Reason.READ_SET,
    ),
    "decode_lens_stale": HoleInjector(
        plant=lengths.target_lens(ForwardMode.DECODE, lengths.short_prefix),
        where=Where.PLAIN,
        reasons=_INPUT,
    ),
    "prefill_view_at_prefix": HoleInjector(
        plant=lengths.target_lens(ForwardMode.EXTEND, lengths.at_prefix),
        where=Where.ALL,
        reasons=Reason.READ_SET,
        changes=Changes.NOTHING,
    ),
    "verify_view_at_prefix": HoleInjector(
        plant=lengths.target_lens(ForwardMode.TARGET_VERIFY, lengths.at_prefix),
        where=Where.SPECULATION,
        reasons=Reason.READ_SET,
        changes=Changes.NOTHING,
    ),
    "verify_view_short": HoleInjector(
        plant=lengths.target_lens(ForwardMode.TARGET_VERIFY, lengths.one_short),
        where=Where.SPECULATION,
        reasons=Reason.READ_SET,
        changes=Changes.NOTHING,
    ),
    "verify_lens_stale": HoleInjector(
        plant=lengths.target_lens(ForwardMode.TARGET_VERIFY, lengths.short_prefix),
        where=Where.SPECULATION,
        reasons=_INPUT,
    ),
    "draft_step_lens_short": HoleInjector(
        plant=lengths.draft_lens(ForwardMode.DECODE, lengths.one_short),
        where=Where.SPECULATION,
        reasons=Reason.READ_SET,
        changes=Changes.DRAFTS,
    ),
    "draft_step_lens_stale": HoleInjector(
        plant=lengths.draft_lens(ForwardMode.DECODE, lengths.short_prefix),
        where=Where.SPECULATION,
        reasons=_INPUT,
        changes=Changes.DRAFTS,
    ),
    "draft_extend_view_at_prefix": HoleInjector(
        plant=lengths.draft_lens(ForwardMode.DRAFT_EXTEND_V2, lengths.at_prefix),
        where=Where.SPECULATION,
        reasons=Reason.READ_SET,
        changes=Changes.NOTHING,
    ),
    "draft_extend_lens_stale": HoleInjector(
        plant=lengths.draft_lens(ForwardMode.DRAFT_EXTEND_V2, lengths.short_prefix),
        where=Where.SPECULATION,
        reasons=_INPUT,
        changes=Changes.DRAFTS,
    ),
}

PROMPTS: dict[str, HoleInjector] = {
    "skip_last_token": HoleInjector(
        plant=lengths.skip_last_token,
        where=Where.ALL,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
    "skip_last_page": HoleInjector(
        plant=lengths.skip_last_page,
        where=Where.ALL,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
}

TREES: dict[str, HoleInjector] = {
    "lose_ancestor": HoleInjector(
        plant=trees.in_tree(trees.lose_ancestor),
        where=Where.TREE,
        reasons=Reason.TREE_SHAPE,
    ),
    "see_sibling": HoleInjector(
        plant=trees.in_tree(trees.see_sibling),
        where=Where.TREE,
        reasons=Reason.TREE_SHAPE,
    ),
    "see_all": HoleInjector(
        plant=trees.in_tree(trees.see_all),
        where=Where.TREE,
        reasons=Reason.TREE_SHAPE,
    ),
    "number_positions": HoleInjector(
        plant=trees.in_tree(trees.number_positions),
        where=Where.TREE,
        reasons=Reason.WRITE_POSITION,
    ),
    "advance_positions": HoleInjector(
        plant=trees.in_tree(trees.advance_positions),
        where=Where.SPECULATION,
        reasons=Reason.WRITE_POSITION,
    ),
    "borrow_parent": HoleInjector(
        plant=trees.in_tree(trees.borrow_parent),
        where=Where.TREE,
        reasons=Reason.TREE_SHAPE,
        changes=Changes.DRAFTS,
    ),
    "follow_later": HoleInjector(
        plant=trees.in_tree(trees.follow_later),
        where=Where.TREE,
        reasons=Reason.TREE_SHAPE,
        changes=Changes.DRAFTS,
    ),
}

ROWS: dict[str, HoleInjector] = {
    "swap_rows": HoleInjector(
        plant=results.swap_rows, where=Where.ALL, reasons=Reason.ROW_OWNER
    ),
    "swap_identity": HoleInjector(
        plant=results.swap_identity,
        where=Where.ALL,
        reasons=Reason.ROW_OWNER,
        changes=Changes.NOTHING,
    ),
}

RESULTS: dict[str, HoleInjector] = {
    "accept_foreign_node": HoleInjector(
        plant=results.accept_foreign_node,
        where=Where.SPECULATION,
        reasons=Reason.ACCEPT_PATH,
    ),
    "accept_rejected_node": HoleInjector(
        plant=results.accept_rejected_node,
        where=Where.SPECULATION,
        reasons=Reason.ACCEPT_PATH,
    ),
    "choose_rejected_token": HoleInjector(
        plant=results.choose_rejected_token,
        where=Where.SPECULATION,
        reasons=Reason.ACCEPT_PATH,
    ),
    "take_neighbours_tokens": HoleInjector(
        plant=results.take_neighbours_tokens,
        where=Where.ALL,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
    "take_one_more": HoleInjector(
        plant=results.take_one_more,
        where=Where.SPECULATION,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
    "take_one_less": HoleInjector(
        plant=results.take_one_less,
        where=Where.SPECULATION,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
    "drop_token": HoleInjector(
        plant=results.drop_token,
        where=Where.ALL,
        reasons=Reason.RESULT_TOKEN,
        found_by=FoundBy.HOST,
    ),
}

_STORES: Mapping[str, tuple[stores.StoreOf, Where]] = {
    "prefill": (stores.StoreOf(mode=ForwardMode.EXTEND), Where.ALL),
    "decode": (stores.StoreOf(mode=ForwardMode.DECODE), Where.PLAIN),
    "verify": (stores.StoreOf(mode=ForwardMode.TARGET_VERIFY), Where.SPECULATION),
    "draft_prefill": (
        stores.StoreOf(mode=ForwardMode.EXTEND, is_draft=True),
        Where.SPECULATION,
    ),
    "draft_step": (
        stores.StoreOf(mode=ForwardMode.DECODE, is_draft=True),
        Where.SPECULATION,
    ),
    "draft_extend": (
        stores.StoreOf(mode=ForwardMode.DRAFT_EXTEND_V2, is_draft=True),
        Where.SPECULATION,
    ),
}

STORES: dict[str, HoleInjector] = {
    f"{forward}_{name}": HoleInjector(
        plant=plant(store),
        where=where,
        reasons=Reason.WRITE_MISSING,
        changes=Changes.DRAFTS if store.is_draft else Changes.TOKENS,
        needs_all=True,
    )
    for forward, (store, where) in _STORES.items()
    for name, plant in (
        ("kv_further", stores.store_further),
        ("kv_nowhere", stores.store_nowhere),
    )
}

CARRIED: dict[str, HoleInjector] = {
    "stash_nothing": HoleInjector(
        plant=carried.stash_nothing,
        where=Where.SPECULATION,
        reasons=Reason.CARRIED_STATE,
        found_by=FoundBy.NEXT,
        changes=Changes.DRAFTS,
    ),
    "stash_swapped": HoleInjector(
        plant=carried.stash_swapped,
        where=Where.SPECULATION,
        reasons=Reason.CARRIED_STATE,
        found_by=FoundBy.NEXT,
        changes=Changes.DRAFTS,
    ),
    "gather_neighbours": HoleInjector(
        plant=carried.gather_neighbours,
        where=Where.SPECULATION,
        reasons=Reason.CARRIED_STATE,
        changes=Changes.DRAFTS,
    ),
    "take_other_nodes": HoleInjector(
        plant=carried.take_other_nodes,
        where=Where.SPECULATION,
        reasons=Reason.CARRIED_STATE,
        changes=Changes.DRAFTS,
    ),
}

HOLE_INJECTORS: Mapping[str, HoleInjector] = (
    PUBLISHING | LENGTHS | PROMPTS | TREES | ROWS | RESULTS | STORES | CARRIED
)
