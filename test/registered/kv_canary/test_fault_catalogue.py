"""The catalogue of faults: each has its planter, and each planter its fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kv_canary.faults import catalogue
from kv_canary.faults.catalogue import CATALOGUE, by_host_name, planted_in
from kv_canary.faults.fault import FaultPlace, HostEngine, Planted, Serving, SlotGroup
from kv_canary.faults.incidents import INCIDENTS
from kv_canary.faults.sglang import planters as sglang_planters
from kv_canary.faults.vllm import load_planters, state_planters
from kv_canary.faults.vllm import planters as vllm_planters
from scripts.mutation.areas import AREAS
from sglang.faults.fault_points import FAULT_POINTS
from sglang.faults.pools.planters import PLANTERS as POOLS
from sglang.faults.settings import FULL, STATE, SWA, VARIABLES
from sglang.faults.steps.planters import PLANTERS as STEPS
from sglang.faults.tiers import PLANTERS as TIERS
from sglang.srt.environ import FAULTS_ROOM, Envs, EnvVar
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")


def test_every_fault_has_a_planter_and_every_planter_a_fault() -> None:
    assert set(POOLS[FULL]) == set(planted_in(Planted.POOL, Planted.DRAFT))
    assert set(POOLS[SWA]) == set(catalogue.WINDOW_FAULTS)
    assert set(POOLS[STATE]) == set(catalogue.STATE_FAULTS)
    assert set(STEPS) == set(planted_in(Planted.STEP))
    assert set(TIERS) == set(catalogue.TIER_FAULTS)
    assert set(FAULT_POINTS) == set(planted_in(Planted.START))
    assert set(sglang_planters.PLANTERS) == set(by_host_name(HostEngine.SGLANG))
    in_vllm = (vllm_planters.PLANTERS, load_planters.PLANTERS, state_planters.PLANTERS)
    assert Counter(name for planters in in_vllm for name in planters) == Counter(
        list(by_host_name(HostEngine.VLLM))
    )
    assert set(sglang_planters.IN_TREES) <= set(sglang_planters.PLANTERS)
    assert set(vllm_planters.IN_HYBRID) <= set(vllm_planters.PLANTERS)


def test_names_are_unique() -> None:
    names = Counter((fault.planted, fault.name) for fault in CATALOGUE)
    assert max(names.values()) == 1
    for engine in HostEngine:
        hosts = Counter(f.hosts[engine] for f in CATALOGUE if engine in f.hosts)
        assert max(hosts.values()) == 1


def test_every_fault_says_what_must_name_it() -> None:
    for fault in CATALOGUE:
        assert fault.what and fault.groups and fault.serving, fault
        assert fault.reasons or fault.names, fault
        assert (fault.planted is not Planted.PLUGIN) or fault.hosts, fault
    assert planted_in(Planted.DRAFT)["branch_offset"].groups is SlotGroup.DRAFT
    assert planted_in(Planted.STEP)["see_all"].serving is Serving.TREE


def test_variables_belong_to_faults_and_to_the_room() -> None:
    known = [v for v in vars(Envs).values() if isinstance(v, EnvVar)]
    chances = {v.name for v in known if v.name.endswith("_PROB")}
    assert {variable.name for variable in VARIABLES.values()} == chances
    assert {fault.variable for fault in CATALOGUE} == chances | {""}
    assert all(variable.room == FAULTS_ROOM for variable in VARIABLES.values())


def test_one_line_faults_have_the_same_places() -> None:
    assert {area.place for area in AREAS} == set(FaultPlace)


def test_incidents_are_planted() -> None:
    assert len({one.name for one in INCIDENTS}) == len(INCIDENTS) == 36
    # The cause of one is not public.
    assert sum(one.is_planted for one in INCIDENTS) == 35
    root = Path(__file__).parents[3]
    for incident in INCIDENTS:
        assert incident.mechanism, incident
        for name in incident.tests:
            assert (root / name).is_file(), name


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("planted", "disk"),
        ("reasons", "verify_all"),
        ("bound", "soon"),
        ("groups", "x"),
    ],
)
def test_an_unknown_value_is_refused(column: str, cell: str, tmp_path: Path) -> None:
    header, first = catalogue._TABLE.read_text(encoding="utf-8").splitlines()[:2]
    cells = dict(zip(header.split("\t"), first.split("\t"), strict=True))
    table = tmp_path / "table.tsv"
    row = "\t".join((cells | {column: cell}).values())
    table.write_text(f"{header}\n{row}\n", encoding="utf-8")
    with pytest.raises((KeyError, ValueError), match=cell.upper() + "|" + cell):
        catalogue._read(table)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
