"""The declarations of the checks, and what is generated from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kv_canary.checks import (
    CHECKS,
    EVERY_REASON,
    Blames,
    Check,
    Reason,
    Severity,
    Shows,
)
from kv_canary.diagnosis import always
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

REPO = Path(__file__).parents[3]
# What dashboards, alerts and incident files of version 0.1.0 rely on.
FIRST_LABELS = (
    *("verify_lineage", "verify_position", "verify_token", "verify_real_kv"),
    *("verify_torn", "verify_freed", "read_set", "read_scratch", "write_foreign"),
    *("write_alias", "write_scratch", "write_token", "write_position", "phase"),
    *("row_owner", "tree_shape", "accept_path", "result_token", "write_missing"),
    "carried_state",
)


def test_labels_and_bits_never_change() -> None:
    assert EVERY_REASON[: len(FIRST_LABELS)] == FIRST_LABELS
    assert [r.value for r in Reason] == [1 << i for i in range(len(Reason))]


def test_every_reason_has_one_check() -> None:
    assert sorted(check.reason for check in CHECKS) == sorted(Reason)
    assert all(check.meaning and check.found_by for check in CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.label)
def test_one_diagnosis_always_applies(check: Check) -> None:
    assert [kind.applies is always for kind in check.diagnoses].index(True) == (
        len(check.diagnoses) - 1
    )


def test_whom_a_healing_recomputes() -> None:
    """As ADR 14 has it."""
    blamed = {
        blames: {check.label for check in CHECKS if check.blames is blames}
        for blames in (Blames.HOLDER, Blames.FORWARD)
    }
    assert blamed == {
        Blames.HOLDER: {"write_foreign", "write_alias", "write_scratch"},
        Blames.FORWARD: {"write_missing", "phase"},
    }
    tokens = {c.label for c in CHECKS if c.severity is Severity.TOKENS}
    assert tokens == {
        *("carried_state", "logits_row", "logits_not_finite", "grammar_mask"),
        "sampled_token",
    }


def test_only_inputs_have_sources_of_their_own() -> None:
    default = next(c.sources for c in CHECKS if c.reason is Reason.WRITE_TOKEN)
    others = {c.label: c.shows for c in CHECKS if c.sources != default}
    inputs = ("accept_path", "result_token", "logits_not_finite", "sampled_token")
    assert others == dict.fromkeys(inputs, Shows.INPUT)


@pytest.mark.parametrize("name", ["generate_canary_header", "generate_canary_docs"])
def test_what_is_generated_is_up_to_date(name: str) -> None:
    script = REPO / "scripts" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, f"run {script.relative_to(REPO)}"


def test_incidents_are_explained_without_torch() -> None:
    code = "import sys, kv_canary.explain; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
