"""Checks and resolves `--speculative-adaptive` and its configuration: the shapes of
drafts among which an engine chooses while it serves.

The file of `--speculative-adaptive-config` is one JSON object. Its text becomes the
flag's value, so that a replay on another machine needs no file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.draft_layout import TreeShape

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

FLAG = "--speculative-adaptive-config"
MAX_SHAPES = 6
"""Most shapes of a ladder: each has its own graphs."""
MAX_BYTES = 1 << 16
_KEYS = ("shapes", "candidate_steps", "table")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLadder:
    """The shapes among which each iteration has one.

    Fields:
        shapes: by ascending number of nodes. Plain decoding comes on top of them.
        table: (batch size, shape or None for plain decoding), ascending: from this
            size on the shape is fixed. None: it is chosen by what was measured.
    """

    shapes: tuple[TreeShape, ...]
    table: tuple[tuple[int, TreeShape | None], ...] | None = None


def handle_adaptive(args: ServerArgs) -> None:
    """Resolve the flags, or reject unsupported ones; steps, top-k and draft tokens are
    resolved.

    Raises:
        ValueError: names the flag and the fix.
    """
    given = args.speculative_adaptive_config
    if not args.speculative_adaptive:
        if given is not None:
            raise ValueError(
                f"{FLAG} {given} has no effect without --speculative-adaptive; add it, "
                "or remove the file"
            )
        return
    if args.speculative_algorithm is None:
        raise ValueError(
            "--speculative-adaptive has no effect without --speculative-algorithm; "
            "remove it"
        )
    assert args.attention_backend is not None
    if ATTENTION_BACKENDS[args.attention_backend].needs_cpu_seq_lens:
        raise ValueError(
            f"--speculative-adaptive does not go with --attention-backend "
            f"{args.attention_backend}, which plans on the host for one shape; use "
            "triton, or remove it"
        )
    if given is None:
        return
    args.speculative_adaptive_config = _text_of(given)
    draft_ladder(args)


def draft_ladder(args: ServerArgs) -> DraftLadder:
    """Return the shapes of a resolved configuration.

    Raises:
        ValueError: the configuration of an adaptive engine is wrong; names the key.
    """
    flags = args.tree_shape
    if not args.speculative_adaptive:
        return DraftLadder(shapes=(flags,))
    if args.speculative_adaptive_config is None:
        return DraftLadder(shapes=_default_shapes(flags, args.draft_kind.has_model))
    return _ladder(json.loads(args.speculative_adaptive_config), flags)


def _default_shapes(flags: TreeShape, has_model: bool) -> tuple[TreeShape, ...]:
    """Return the flags' shape and smaller ones: chains of 1 and 3 steps, or, where no
    model drafts, trees of 2 and 4 nodes."""
    if has_model:
        smaller = [TreeShape.chain(steps) for steps in (1, 3)]
    else:
        smaller = [
            TreeShape(topk=flags.topk, num_steps=nodes - 1, num_draft_tokens=nodes)
            for nodes in (2, 4)
        ]
    nodes = flags.num_draft_tokens
    return (*(s for s in smaller if s.num_draft_tokens < nodes), flags)


def _text_of(given: str) -> str:
    """Return the text of a configuration: of a file, or the text itself."""
    text = given
    if not given.lstrip().startswith("{"):
        path = Path(given)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"{FLAG} {given}: larger than {MAX_BYTES} bytes")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{FLAG} {given}: cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{FLAG} {given}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{FLAG} {given}: must be one JSON object")
    return json.dumps(found)


def _ladder(found: dict[str, Any], flags: TreeShape) -> DraftLadder:
    for key in found:
        if key not in _KEYS:
            raise ValueError(
                f'{FLAG}: the key "{key}" is not known; it may have {", ".join(_KEYS)}'
            )
    if "shapes" in found and "candidate_steps" in found:
        raise ValueError(f'{FLAG}: "shapes" and "candidate_steps" exclude each other')
    shapes = {flags}
    if "shapes" in found:
        shapes = {_shape(each) for each in _list(found, "shapes")}
    elif "candidate_steps" in found:
        steps = _list(found, "candidate_steps")
        shapes = {_shape([each, 1, _nodes_of_chain(each)]) for each in steps}
    if len(shapes) > MAX_SHAPES:
        raise ValueError(
            f"{FLAG}: {len(shapes)} shapes; each has its own graphs, so use at most "
            f"{MAX_SHAPES}"
        )
    ladder = tuple(sorted(shapes, key=_cost_order))
    table = None
    if "table" in found:
        table = _table(found["table"], ladder)
    _check_within(ladder, flags)
    return DraftLadder(shapes=ladder, table=table)


def _cost_order(shape: TreeShape) -> tuple[int, int, int]:
    return (shape.num_draft_tokens, shape.num_steps, shape.topk)


def _list(found: dict[str, Any], key: str) -> list[Any]:
    value = found[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f'{FLAG}: "{key}" must be a list that is not empty')
    return value


def _nodes_of_chain(steps: Any) -> Any:
    return steps + 1 if isinstance(steps, int) else steps


def _shape(value: Any) -> TreeShape:
    is_triple = isinstance(value, list) and len(value) == 3
    if not is_triple or not all(type(part) is int for part in value):
        raise ValueError(
            f"{FLAG}: the shape {value} must be [steps, top-k, draft tokens]"
        )
    steps, topk, nodes = value
    try:
        return TreeShape(topk=topk, num_steps=steps, num_draft_tokens=nodes)
    except ValueError as error:
        raise ValueError(f"{FLAG}: the shape {value} is none: {error}") from error


def _check_within(shapes: tuple[TreeShape, ...], flags: TreeShape) -> None:
    """Check that memory which the flags size has room for every shape."""
    for shape in shapes:
        if shape.topk > flags.topk:
            raise ValueError(
                f"{FLAG}: the shape {_written(shape)} has a larger top-k than "
                f"--speculative-eagle-topk {flags.topk} (NGRAM: "
                "--speculative-ngram-max-bfs-breadth); raise the flag"
            )


def _table(
    value: Any, shapes: tuple[TreeShape, ...]
) -> tuple[tuple[int, TreeShape | None], ...]:
    if not isinstance(value, dict) or "1" not in value:
        raise ValueError(
            f'{FLAG}: "table" must map batch sizes to shapes or null, beginning with '
            '"1"'
        )
    rows: list[tuple[int, TreeShape | None]] = []
    for size, given in value.items():
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f'{FLAG}: "table" has the batch size "{size}"')
        shape = None if given is None else _shape(given)
        if shape is not None and shape not in shapes:
            listed = ", ".join(map(_written, shapes))
            raise ValueError(
                f'{FLAG}: "table" has the shape {given}, for which there are no '
                f'graphs; use one of "shapes" ({listed}), or add it there'
            )
        rows.append((int(size), shape))
    return tuple(sorted(rows, key=lambda row: row[0]))


def _written(shape: TreeShape) -> str:
    return f"[{shape.num_steps}, {shape.topk}, {shape.num_draft_tokens}]"
