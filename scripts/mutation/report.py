"""Tables of the faults' outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.mutation.outcomes import (
    AFTER,
    BEFORE,
    DRAFTS_NAMED,
    DRAFTS_UNSEEN,
    ENDS,
    HANG,
    LOST,
    NEVER,
    OUTCOMES,
    STOPPED,
)

Row = dict[str, Any]
TEST_OUTCOMES = ("killed", "survived", "timeout")
MAX_WHY = 120
LISTED = (NEVER, AFTER, LOST, DRAFTS_UNSEEN, ENDS, HANG, "survived", "timeout")


def counts(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Return the numbers of a run for its last line."""
    of = Counter(row["outcome"] for row in rows)
    skipped = Counter(
        row["why"].partition(":")[0] for row in rows if row["outcome"] == "skipped"
    )
    found: dict[str, Any] = {"faults": len(rows), **of, "skipped": dict(skipped)}
    seconds = sum(row["seconds"] for row in rows)
    found["seconds_per_fault"] = round(seconds / max(len(rows), 1), 2)
    if command == "tests":
        decided = sum(of[name] for name in TEST_OUTCOMES)
        caught = of["killed"] + of["timeout"]
        return found | {"share_killed": _share(caught, decided)}
    tokens = of[NEVER] + of[AFTER] + of[BEFORE]
    drafts = of[DRAFTS_UNSEEN] + of[DRAFTS_NAMED]
    stopped = [row for row in rows if row["outcome"] == STOPPED]
    return found | {
        "change_tokens": tokens,
        "change_tokens_stopped": sum(row["changes"] == "tokens" for row in stopped),
        "share_named_before": _share(of[BEFORE], tokens),
        "share_named": _share(of[BEFORE] + of[AFTER], tokens),
        "change_drafts": drafts,
        "share_drafts_named": _share(of[DRAFTS_NAMED], drafts),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def table(rows: Sequence[Row], command: str) -> Iterator[str]:
    """Return outcomes by area, the shares, and the faults that were not seen in
    time.
    """
    used = {row["outcome"] for row in rows}
    order = TEST_OUTCOMES if command == "tests" else OUTCOMES
    columns = [name for name in (*order, "skipped") if name in used]
    areas = list(dict.fromkeys(row["area"] for row in rows))
    widths = [max(len(name), 5) for name in columns]
    yield _line("area", columns, widths)
    for area in [*areas, "all"]:
        of = Counter(row["outcome"] for row in rows if area in (row["area"], "all"))
        yield _line(area, [str(of[name]) for name in columns], widths)
    yield ""
    yield from _shares(counts(rows, command))
    for outcome in LISTED:
        listed = [row for row in rows if row["outcome"] == outcome]
        if listed:
            yield f"\n{outcome} ({len(listed)})"
        for row in listed:
            yield f"  {row['place']}  {row['function']}  [{row['operator']}]"
            yield f"      {row['before']}  ->  {row['after']}"
            why = row["why"].partition("\n")[0][:MAX_WHY]
            yield f"      {row.get('in', '')}  {why}".rstrip()


def _line(first: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return f"{first:12}" + "".join(f"  {cell:>{width}}" for cell, width in pairs)


def _shares(found: dict[str, Any]) -> Iterator[str]:
    if "share_killed" in found:
        yield f"killed, or ran into the limit: {_percent(found['share_killed'])}"
        return
    yield (
        f"of {found['change_tokens']} that change tokens: named before a wrong one "
        f"left {_percent(found['share_named_before'])}, named at all "
        f"{_percent(found['share_named'])}; {found['change_tokens_stopped']} more were "
        "stopped by something else first"
    )
    yield (
        f"of {found['change_drafts']} that change drafts only: named "
        f"{_percent(found['share_drafts_named'])}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
