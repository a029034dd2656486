"""Compiled kernels have one name, whatever was imported and launched before."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import DependenciesFinder

from sglang.srt.utils.triton_keys import make_keys_stable
from sglang.test.ahead_of_time import compile_in_a_process
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

# Both have constants of the same names, and helpers of the kernel.
MODULES = ("kv_canary.kernels.triton.write", "kv_canary.kernels.triton.verify")
PROGRAM = """
import importlib, os, sys
os.environ.pop("TRITON_INTERPRET", None)
from sglang.srt.utils.triton_keys import make_keys_stable
make_keys_stable()
for name in sys.argv[1:]:
    importlib.import_module(name)
from kv_canary.kernels.triton.before import before_kernel
first = before_kernel.cache_key
before_kernel.hash = None  # its helpers are hashed now
print(first, before_kernel.cache_key)
"""


AFTER_A_LAUNCH = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from kv_canary.kernels.triton import verify
_ = verify._check_halves.cache_key
from sglang.srt.utils.triton_keys import make_keys_stable
make_keys_stable()
print(len(verify.verify_kernel.cache_key))
"""


def test_a_helper_may_have_been_hashed_before() -> None:
    """By the first launch of a process that starts an engine afterwards."""
    assert compile_in_a_process(["-c", AFTER_A_LAUNCH]).split() == ["64"]


def test_neither_imports_nor_launches_change_a_name() -> None:
    names: set[str] = set()
    for modules in (MODULES, MODULES[::-1]):
        names.update(compile_in_a_process(["-c", PROGRAM, *modules]).split())
    assert len(names) == 1


@pytest.mark.parametrize("missing", ["_update_hash", "record_reference"])
def test_another_triton_is_left_as_it_is(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"_update_hash", "record_reference"} - {missing}
    monkeypatch.delattr(DependenciesFinder, missing)
    before = {name: getattr(DependenciesFinder, name) for name in others}
    make_keys_stable.__wrapped__()
    assert {name: getattr(DependenciesFinder, name) for name in others} == before
    assert "a start may recompile kernels" in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
