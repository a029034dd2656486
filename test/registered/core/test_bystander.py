"""The bystander of an attack: wrong and missing answers, and what is left behind."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from sglang.test.bystander import Bystander, Resources
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


class Replies:
    """Answers with `right`, but for those of some calls."""

    def __init__(self, **others: Any) -> None:
        self.calls = 0
        self._others = others

    def __call__(self) -> Any:
        self.calls += 1
        other = self._others.get(f"call{self.calls}", "right")
        if isinstance(other, Exception):
            raise other
        return other


def watch(replies: Replies) -> list[str]:
    with pytest.raises(AssertionError), Bystander({"q": replies}, pause=0) as bystander:
        bystander.wait(3)
    return bystander.wrong


def test_a_bystander_sees_what_is_wrong() -> None:
    assert watch(Replies(call2="wrong")) == ["q: 'wrong'"]
    assert watch(Replies(call3=OSError("gone"))) == ["q: OSError('gone')"]


def test_a_bystander_endures_until_it_has_its_answers() -> None:
    replies, started = Replies(), []
    with Bystander({"q": replies}, pause=0) as bystander:
        attacks = bystander.endure(lambda: started.append(replies.calls), rounds=3)
    assert len(started) == attacks >= 1
    assert replies.calls - started[0] >= 3


def test_a_bystander_that_waits_for_the_end_of_attacks_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = threading.Lock()

    def ask() -> None:
        with turn:
            pass

    def attack(*, is_exclusive: bool) -> None:
        with turn if is_exclusive else nullcontext():
            time.sleep(0.02)

    with Bystander({"q": ask}, pause=0.001) as bystander:
        bystander.endure(partial(attack, is_exclusive=False), is_long=True)
        monkeypatch.setattr("sglang.test.bystander.PATIENCE_SECONDS", 0.3)
        with pytest.raises(AssertionError, match="lacks"):
            bystander.endure(
                partial(attack, is_exclusive=True), rounds=100, is_long=True
            )


def test_what_a_server_holds_is_compared() -> None:
    def held(descriptors: int, mib: float, peak: float) -> Resources:
        return Resources(
            processes=2,
            threads=9,
            descriptors=descriptors,
            own={"front": mib - 10},
            resident={"front": mib},
            peak={"front": peak},
        )

    before = held(20, 100.0, 100.0)
    assert not held(20, 105.0, 150.0).excess(before, mib=6)
    assert held(21, 105.0, 150.0).excess(before, mib=6) == ["descriptors: 20 -> 21"]
    assert held(9, 107.0, 150.0).excess(before, mib=6) == ["MiB of front: 90 -> 97"]
    assert held(9, 107.0, 150.0).rise(before, mib=40) == ["MiB of front: 100 -> 150"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
