"""The faults that the operators find in a small source, and which of them are drawn."""

from __future__ import annotations

import pytest
import torch

from kv_canary.faults.fault import FaultPlace
from scripts.mutation.areas import AREAS
from scripts.mutation.choice import Fault, only, sample
from scripts.mutation.mutants import mutants
from scripts.mutation.sites import Mutant
from scripts.mutation.stale import earlier
from scripts.mutation.targets import REPO, TESTS, Area, Kind, module_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")

SOURCE = '''\
"""A module of the size of a page, with 1 thing in it."""


class Rows:
    """Rows, of which there are 2."""

    size = 3

    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        return f"{self.rows[0]}"

    def write(self, src, dst, seq_lens: int = 4):
        """Write them, 5 at a time."""
        if seq_lens < 0:
            raise ValueError(seq_lens - 1)
        assert seq_lens > 6
        logger.info("seven %d", seq_lens + 7)
        if not src or dst:
            self.rows[src] = dst
        for row in self.rows:
            move(src, dst)
        self.count += 1
        table(prefix_lens=seq_lens, seq_lens=src)
        return max(seq_lens - 1,
                   self.rows[: src], self.rows[-1])


def publish(table, indices):
    prepare(table)
    table.copy(indices)
    table.done = True
'''


@pytest.fixture(scope="module")
def found() -> list[Mutant]:
    return mutants("rows", SOURCE)


def edits(found: list[Mutant], operator: str) -> set[tuple[str, str]]:
    return {(m.before, m.after) for m in found if m.operator == operator}


def test_every_operator_makes_its_faults(found: list[Mutant]) -> None:
    assert edits(found, "constant") == {
        ("1", "0"),
        ("1", "2"),
        ("-1", "0"),
    }
    assert edits(found, "arithmetic") == {
        ("seq_lens - 1", "seq_lens + 1"),
        ("self.count += 1", "self.count -= 1"),
    }
    assert edits(found, "condition") == {("not src or dst", "not (not src or dst)")}
    assert edits(found, "connective") == {("not src or dst", "not src and dst")}
    assert edits(found, "extreme") == {("max", "min")}
    assert edits(found, "skip") == {("self.rows", "list(self.rows)[1:]")}
    assert ("move(src, dst)", "move(dst, src)") in edits(found, "swap")
    assert (
        "table(prefix_lens=seq_lens, seq_lens=src)",
        "table(prefix_lens=src, seq_lens=seq_lens)",
    ) in edits(found, "swap")
    assert {("src", "dst"), ("dst", "src")} <= edits(found, "sibling")
    assert ("seq_lens", "seq_lens.flip(0)") in edits(found, "permute")
    assert ("src", "src - 1") in edits(found, "slice")
    dropped = {before for before, _ in edits(found, "drop")}
    assert dropped == {
        "self.rows[src] = dst",
        "move(src, dst)",
        "self.count += 1",
        "table(prefix_lens=seq_lens, seq_lens=src)",
        "prepare(table)",
        "table.copy(indices)",
        "table.done = True",
    }
    assert edits(found, "return") == {("table.copy(indices)", "return")}


def test_code_that_only_refuses_or_tells_is_left_alone(found: list[Mutant]) -> None:
    lines = SOURCE.splitlines()
    touched = {lines[mutant.line - 1].strip() for mutant in found}
    for word in ("size = 3", "def ", "raise", "assert", "logger", '"""', "if seq_lens"):
        assert not any(word in line for line in touched), word


def test_each_fault_is_one_edit_that_compiles(found: list[Mutant]) -> None:
    before = SOURCE.splitlines()
    assert len({mutant.source for mutant in found}) == len(found)
    assert len({mutant.id for mutant in found}) == len(found)
    for mutant in found:
        compile(mutant.source, "rows.py", "exec")
        after = mutant.source.splitlines()
        assert len(after) == len(before)
        # Several lines only where a statement of several lines is left out.
        assert after[mutant.line - 1] != before[mutant.line - 1]


def test_rows_are_mistaken_for_others() -> None:
    source = (
        "def f(mask, tokens, row, n):\n"
        "    use(mask, tokens[row])\n"
        "    keep(tokens[row : n + 1])\n"
        "    more = mask.repeat_interleave(n, dim=0), tokens.repeat_interleave(n)\n"
        "    return more[0].repeat(n)\n"
    )
    found = mutants("m", source)
    assert ("mask", "mask.flip(0)") in edits(found, "permute")
    assert ("mask", "mask.roll(1, 0)") in edits(found, "roll")
    assert ("mask", "earlier mask") in edits(found, "stale")
    assert edits(found, "missing") == {("mask", "None")}
    assert edits(found, "neighbour") == {("row", "row - 1")}
    assert edits(found, "span") == {("row:n + 1", "row - 1:n + 1 - 1")}
    assert edits(found, "repeat") == {
        ("mask.repeat_interleave(n, dim=0)", "mask.repeat(n, 1)"),
        ("tokens.repeat_interleave(n)", "tokens.repeat(n)"),
        ("more[0].repeat(n)", "more[0].repeat_interleave(n)"),
    }
    for mutant in found:
        compile(mutant.source, "m.py", "exec")


def test_the_order_of_rows_that_are_counted_is_no_fault() -> None:
    found = mutants("m", "def f(mask):\n    return use(mask, len(mask))\n")
    moved = [m for m in found if m.operator in ("permute", "roll")]
    assert [m.source.count("len(mask)") for m in moved] == [1, 1]


def test_a_value_of_the_step_before_has_the_shape_of_this_one() -> None:
    first, second, longer = torch.zeros(2), torch.ones(2), torch.ones(3)
    assert earlier("place", first) is first
    assert torch.equal(earlier("place", second), torch.zeros(2))
    assert earlier("place", longer) is longer
    assert earlier("another", "a") == "a"
    assert earlier("another", "b") == "a"


def test_a_comparison_is_off_by_one() -> None:
    found = mutants("m", "def f(a, b):\n    return a <= b, a == b, a is b\n")
    assert edits(found, "comparison") == {("a <= b", "a < b"), ("a == b", "a != b")}


def test_a_name_is_not_taken_before_it_is_bound() -> None:
    source = "def f(src):\n    use(src)\n    dst = [0 for ends in src]\n    use(dst)\n"
    assert edits(mutants("m", source), "sibling") == {("dst", "src")}


def test_a_field_is_only_taken_where_the_module_knows_it() -> None:
    source = "def f(req):\n    return req.committed_len\n"
    assert not edits(mutants("m", source), "attribute")
    source += "\ndef g(req):\n    return req.allocated_len\n"
    assert ("req.committed_len", "req.allocated_len") in edits(
        mutants("m", source), "attribute"
    )


def test_a_sample_serves_all_areas_and_operators_alike(found: list[Mutant]) -> None:
    few, many = (
        Area(place=place, modules=(), worlds=Kind(0), tests=())
        for place in (FaultPlace.RELAY, FaultPlace.TREE)
    )
    faults = [Fault(area=many, mutant=m) for m in found]
    faults += [Fault(area=few, mutant=m) for m in found[:3]]
    chosen = sample(faults, count=20, seed=1)
    assert chosen == sample(faults, count=20, seed=1)
    assert chosen != sample(faults, count=20, seed=2)
    assert sum(fault.area is few for fault in chosen) == 3
    operators = [f.mutant.operator for f in chosen if f.area is many]
    assert set(operators) == {m.operator for m in found}
    assert len(sample(faults, count=10_000, seed=1)) == len(faults)


def test_faults_are_found_by_module_and_line(found: list[Mutant]) -> None:
    faults = [Fault(area=AREAS[0], mutant=mutant) for mutant in found]
    assert only(faults, "rows") == faults
    assert not only(faults, "ows")
    line = found[0].line
    assert {f.mutant.line for f in only(faults, f"rows:{line}")} == {line}


def test_every_target_and_its_tests_exist() -> None:
    for area in AREAS:
        assert all(module_path(name).is_file() for name in area.names)
        assert area.tests
        assert all((REPO / TESTS / name).is_file() for name in area.tests)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
