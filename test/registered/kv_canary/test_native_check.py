"""Native kernels of another version are found before the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kv_canary import native_check
from kv_canary.kernels import native
from kv_canary.op import native_available
from kv_canary.version import __version__
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the kernels are switched off, by a check of its own."""
    found: list[str] = []
    monkeypatch.setattr(native_check, "switch_off_native", found.append)
    monkeypatch.setattr(native_check, "_problem", native_check._problem.__wrapped__)
    return found


def test_kernels_of_this_version_stay(reasons: list[str]) -> None:
    native_check.check_native_kernels()
    assert reasons == []


def _takes_less(state: Any) -> None: ...


def _checks_more(*_: Any) -> None:
    raise RuntimeError("canary_poison: the arena has 7 words, 9 are due\nat canary.cpp")


@pytest.mark.parametrize(
    ("older", "said"),
    [
        (None, "canary_poison"),
        (_takes_less, "takes 1 positional argument but 3 were given"),
        (_checks_more, "the arena has 7 words, 9 are due"),
        (lambda *_: None, "differs from the reference"),
    ],
    ids=["missing", "other arguments", "other words", "other result"],
)
def test_older_kernels_are_switched_off_by_name(
    older: Callable[..., None] | None,
    said: str,
    reasons: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if older is None:
        monkeypatch.delattr(native.ops, "canary_poison")
    else:
        monkeypatch.setattr(native.ops, "canary_poison", older)
    native_check.check_native_kernels()
    (reason,) = reasons
    assert reason.startswith("sglang-canary-kernels 0.1.0 does not fit kv-canary ")
    assert __version__ in reason and said in reason and "\n" not in reason
