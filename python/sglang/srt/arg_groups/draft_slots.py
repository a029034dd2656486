"""The KV slots and row columns of one decode iteration, determined by the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.draft_layout import CATCH_UP_TOKENS, alloc_len_per_decode

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


SPARE_SLOTS = 16
"""Slots that a request takes at once on a CPU, where taking one in every iteration
costs a small model up to 5 % of a plain step."""


def get_alloc_len_per_decode(server_args: ServerArgs) -> int:
    """Return the number of KV slots that one decode iteration of a request may write.

    1 without speculation. Reserve sizes and row widths follow from it.
    """
    if server_args.speculative_algorithm is None:
        return 1
    page_size, has_model = server_args.page_size, server_args.draft_kind.has_model
    assert page_size is not None
    lens = [
        alloc_len_per_decode(
            page_size=page_size,
            topk=shape.topk,
            num_steps=shape.num_steps,
            num_draft_tokens=shape.num_draft_tokens,
            draft_lead=server_args.draft_lead,
            has_branches=has_model and not has_draft_region(server_args),
        )
        for shape in server_args.tree_shapes
    ]
    if server_args.speculative_adaptive and has_model:
        lens.append(server_args.draft_lead + CATCH_UP_TOKENS)
    return max(lens)


def region_columns(server_args: ServerArgs) -> int:
    """Return the columns of a row's draft region, or 0 if there is none."""
    if not has_draft_region(server_args):
        return 0
    return max(shape.topk * shape.num_steps for shape in server_args.tree_shapes)


def decode_reserve(server_args: ServerArgs) -> int:
    """Return the KV slots that a request keeps beyond the slots known to be written.

    This covers one iteration's writes after the tokens that the iteration in flight may
    gain, whose number the host does not know yet, and the spare ones. 0 without
    speculation, because slots are taken as they are written.
    """
    if server_args.speculative_algorithm is None:
        return 0
    gained = max(shape.accept_width for shape in server_args.tree_shapes)
    each = get_alloc_len_per_decode(server_args)
    return gained + each + decode_spare(server_args)


def decode_spare(server_args: ServerArgs) -> int:
    """Return how many slots of the reserve an iteration does not need: new ones are
    taken when these are used up."""
    args = server_args
    is_plain_often = args.speculative_adaptive and args.device == "cpu"
    assert args.page_size is not None
    return SPARE_SLOTS if is_plain_often and args.page_size < SPARE_SLOTS else 0


def has_draft_region(server_args: ServerArgs) -> bool:
    """Return whether draft branches have slots of their own. Without branches they need
    none, and the flags can put them after the prefix.
    """
    args = server_args
    if args.speculative_algorithm is None or args.tree_shape.topk == 1:
        return False
    return args.draft_kind.has_model and args.speculative_draft_layout != "paged"
