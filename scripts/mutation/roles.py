"""Names in the engine that are easily confused."""

from __future__ import annotations

from collections.abc import Iterator

# Names within one function.
GROUPS = (
    ("starts", "ends"),
    ("start", "end", "stop"),
    ("begin", "end"),
    ("first", "last"),
    ("prefix_lens", "seq_lens", "extend_lens"),
    ("prefix", "seq", "fill"),
    ("src", "dst"),
    ("source", "target"),
    ("sources", "targets"),
    ("committed", "allocated"),
    ("before", "after"),
    ("indices", "positions"),
    ("rows", "slots", "pages"),
    ("row", "slot", "page"),
    ("node", "parent", "child"),
    ("low", "high"),
    ("layer", "level", "step"),
    ("shift_from", "shift"),
    ("touched", "fresh"),
    ("live", "kept"),
    ("withheld", "rebuilt"),
    ("early", "late"),
    ("again", "ended"),
    ("good", "bad"),
    ("found", "dropped"),
    ("due", "rest"),
    ("text", "matched"),
    ("facts", "found"),
    ("frequency", "presence", "repetition"),
    ("known", "output"),
    ("drawn", "probs"),
    ("logits", "probs"),
    ("last", "kept"),
)
# A shared last word also makes two names alike.
SUFFIXES = ("_lens", "_len", "_indices", "_pages", "_slots", "_loc", "_rows", "_ids")
MAX_SIBLINGS = 2


def find_siblings(name: str, names: frozenset[str]) -> Iterator[str]:
    """Yield names in `names` that a person could confuse with `name`."""
    found: list[str] = []
    for group in GROUPS:
        if name in group:
            found += [other for other in group if other != name and other in names]
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            found += [
                other
                for other in sorted(names)
                if other != name and other.endswith(suffix)
            ]
    yield from list(dict.fromkeys(found))[:MAX_SIBLINGS]


def are_alike(first: str, second: str) -> bool:
    """Whether two arguments are easily passed in the wrong order."""
    if not first or not second or first == second:
        return False
    both = frozenset((first, second))
    return both <= ROWS or second in find_siblings(first, both)


# Fields, each with its replacement.
ATTRIBUTES = {
    "committed_len": ("allocated_len", "cache_protected_len"),
    "allocated_len": ("committed_len",),
    "cache_protected_len": ("committed_len",),
    "seq_lens": ("prefix_lens",),
    "prefix_lens": ("seq_lens",),
    "seq_lens_cpu": ("_prefix_lens",),
    "_prefix_lens": ("seq_lens_cpu",),
    "_prefix_lens_device": ("seq_lens",),
    "extend_lens": ("seq_lens",),
    "prompt_len": ("output_len",),
    "output_len": ("prompt_len", "sent_tokens"),
    "starts": ("ends",),
    "ends": ("starts",),
    "move_src": ("move_dst",),
    "move_dst": ("move_src",),
    "num_steps": ("topk", "num_draft_tokens"),
    "num_draft_tokens": ("num_steps", "accept_width"),
    "accept_width": ("num_steps",),
    "topk": ("num_steps",),
    "accept_lens": ("seq_lens",),
    "req_pool_indices": ("seq_lens",),
    "next_token": ("next_sibling",),
    "next_sibling": ("next_token",),
    "parents": ("tokens",),
    "parent": ("children",),
    "serial": ("salt",),
    "salt": ("serial",),
    "num_free": ("num_pages",),
    "page_size": ("size",),
    "positions": ("tokens",),
    "shift_from": ("shift",),
    "max_tail": ("page_size",),
    "was_admitted": ("is_chunked",),
    "is_chunked": ("was_admitted",),
    "is_finished": ("is_chunked",),
    "decodes_on": ("is_finished",),
    "withheld": ("rebuilt",),
    "rebuilt": ("withheld",),
    "temperatures": ("top_ps",),
    "top_ps": ("min_ps",),
    "min_ps": ("top_ps",),
    "top_ks": ("seeds",),
    "seeds": ("prompt_lens",),
    "prompt_lens": ("min_new_tokens",),
    "has_greedy": ("is_all_greedy",),
    "is_all_greedy": ("has_greedy",),
    "needs_sort": ("needs_min_p",),
    "has_penalty": ("has_logit_bias",),
    "filter_rows": ("penalty_rows",),
    "penalty_rows": ("filter_rows",),
    "logit_bias": ("stop_tokens",),
    "completion_tokens": ("prompt_tokens",),
    "num_digested": ("tokens",),
    "output_ids": ("prompt_ids",),
    "is_stream": ("is_finished",),
    "facts": ("verdicts",),
    "nodes": ("pages",),
    "pages": ("nodes",),
    "live": ("lengths",),
    "grammar": ("grammar_failure",),
}

# Tensors and arrays with a row per request, node or token.
ROWS = {
    "accept_index",
    "accept_lens",
    "again",
    "allocated",
    "bonus_tokens",
    "columns",
    "committed",
    "hidden_states",
    "hidden",
    "identity",
    "ids",
    "indices",
    "input_ids",
    "last",
    "last_locs",
    "logits",
    "logits_rows",
    "mask",
    "masks",
    "needed",
    "node_rows",
    "node_slots",
    "out_cache_loc",
    "pages",
    "positions",
    "prefix_lens",
    "req_pool_indices",
    "req_pool_indices_cpu",
    "root_tokens",
    "rows",
    "sampled",
    "seeds",
    "seq_lens",
    "serials",
    "slots",
    "starts",
    "temperatures",
    "token_ids",
    "tokens",
    "top_ks",
    "top_ps",
    "vocab_mask",
    "words",
}
# Indices of rows.
ROW_INDICES = {"i", "index", "row", "node"}
# What a step passes from one part to the next, and the next step makes anew.
STEP_VALUES = ROWS | {
    "digest",
    "finish",
    "forward_batch",
    "history",
    "info",
    "launched",
    "num_forwards",
    "output",
    "result",
    "sampling_info",
    "sighting",
    "text",
    "tree",
    "verdicts",
}
# What may be None.
OPTIONAL = {
    "aux_hidden",
    "bias",
    "check",
    "digest",
    "filter_rows",
    "finish",
    "finish_reason",
    "grammar",
    "history",
    "logit_bias",
    "logprobs",
    "mask",
    "masks",
    "matched",
    "num_forwards",
    "penalty_rows",
    "sighting",
    "stop_matcher",
    "stop_tokens",
    "text",
    "vocab_mask",
}

KEYWORD_PAIRS = (
    ("src", "dst"),
    ("prefix_lens", "seq_lens"),
    ("prefix_lens", "extend_lens"),
    ("starts", "ends"),
    ("committed", "allocated"),
    ("probs", "ids"),
    ("next_token", "next_sibling"),
    ("positions", "input_ids"),
    ("seeds", "positions"),
    ("tokens", "next_token"),
    ("req_serial", "salt"),
)
NO_DROP = ("super", "super().__init__")
