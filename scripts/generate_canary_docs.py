"""Write the tables of checks in `docs/kv_canary_reasons.md` from `kv_canary.checks`.

A table lies between `<!-- NAME: generated ... -->` and `<!-- end -->`. `--check` writes
nothing and exits 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "kv-canary" / "python"))

from kv_canary.checks import CHECKS, DIAGNOSES, Check, Severity  # noqa: E402

PAGE = REPO / "docs" / "kv_canary_reasons.md"
REASONS_HEAD = """\
| reason | what was found | by launch | a healing also recomputes | since |
|---|---|---|---|---|
"""
DIAGNOSES_HEAD = """\
| diagnosis | when | look at |
|---|---|---|
"""
# Names of code in a diagnosis, whose text also goes to logs without backticks.
CODE = re.compile(r"\b(req_to_token|out_cache_loc|accept_index|tree_mask)\b")


def reasons_table() -> str:
    """Return the table of the reasons."""
    return REASONS_HEAD + "".join(map(_reason_row, CHECKS))


def diagnoses_table() -> str:
    """Return the table of the diagnoses, in the order in which they are tried."""
    return DIAGNOSES_HEAD + "".join(_diagnosis_row(kind.name) for kind in DIAGNOSES)


TABLES = {"reasons": reasons_table, "diagnoses": diagnoses_table}


def _reason_row(check: Check) -> str:
    of_state = check.of_state and f"of a recurrent state: {check.of_state}"
    found = "; ".join(filter(None, (check.meaning, check.detail, of_state)))
    launches = ", ".join(f"`{launch.name.lower()}`" for launch in check.found_by)
    blamed = check.blames.value
    if check.severity is Severity.TOKENS:
        blamed = "; ".join(filter(None, (blamed, "tokens, whichever pool is damaged")))
    cells = (f"`{check.label}`", found, launches, blamed, check.since)
    return f"| {' | '.join(cells)} |\n"


def _diagnosis_row(name: str) -> str:
    """Return the row of a diagnosis, with what each of its checks says about it."""
    cases: dict[str, list[str]] = {}
    for check in CHECKS:
        for kind in check.diagnoses:
            if kind.name == name:
                cases.setdefault(_code(kind.when), []).append(f"`{check.label}`")
                look_at = kind.look_at
    when = "; ".join(
        f"{', '.join(labels)}: {text}" if text else ", ".join(labels)
        for text, labels in cases.items()
    )
    return f"| `{name.format(writer='X')}` | {when} | {_code(look_at)} |\n"


def _code(text: str) -> str:
    return CODE.sub(r"`\1`", text)


def render(page: str) -> str:
    """Return the page with fresh tables.

    Raises:
        ValueError: the page lacks a table.
    """
    for name, table in TABLES.items():
        begin = re.search(rf"<!-- {name}: [^\n]*-->\n", page)
        end = page.find("<!-- end -->", begin.end()) if begin else -1
        if begin is None or end < 0:
            raise ValueError(f"{PAGE.name}: the table {name} is missing")
        page = page[: begin.end()] + table() + page[end:]
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if it is stale")
    text = PAGE.read_text(encoding="utf-8")
    fresh = render(text)
    if parser.parse_args().check:
        return 0 if fresh == text else 1
    PAGE.write_text(fresh, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
