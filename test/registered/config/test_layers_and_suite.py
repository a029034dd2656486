"""The layer check sees breaches; the suite runner refuses unregistered tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

REPO = Path(__file__).resolve().parents[3]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


check_layers = load(REPO / "scripts" / "check_layers.py")
run_suite = load(REPO / "test" / "run_suite.py")


def test_the_tree_respects_the_layers():
    result = subprocess.run(
        [sys.executable, REPO / "scripts" / "check_layers.py"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("kv_canary.launches", "kv_canary.engines.hooks"),
        ("kv_canary.launches", "sglang.srt.environ"),
        ("sglang.srt.environ", "sglang.srt.server_args"),
        ("sglang.srt.server_args", "sglang.srt.layers.ops.norm.op"),
        ("sglang.srt.mem_cache.allocator", "sglang.srt.layers.linear"),
        ("sglang.srt.models.llama", "sglang.srt.model_executor.model_runner"),
        (
            "sglang.srt.managers.worker.tp_worker",
            "sglang.srt.managers.scheduler.scheduler",
        ),
        ("sglang.srt.managers.scheduler.scheduler", "sglang.srt.entrypoints.engine"),
        ("sglang.bench_serving", "sglang.test.harness"),
    ],
)
def test_order_of_layers(lower, upper):
    assert check_layers.layer_of(lower) < check_layers.layer_of(upper)


@pytest.mark.parametrize(
    ("module", "other", "is_forbidden"),
    [
        ("kv_canary.launches", "sglang.srt.environ", True),
        ("kv_canary.launches", "kv_canary.op", False),
        ("sglang.srt.model_executor.model_runner", "kv_canary.view", True),
        ("sglang.srt.model_executor.model_runner", "sglang.srt.kv_canary.api", True),
        ("sglang.srt.mem_cache.memory_pool", "kv_canary.op", False),
        ("sglang.srt.managers.batch.req", "kv_canary.records", True),
        ("sglang.srt.managers.front.request_state", "kv_canary.records", False),
        ("sglang.srt.managers.worker.tp_worker", "sglang.srt.kv_canary.api", False),
    ],
)
def test_walls(module, other, is_forbidden):
    assert check_layers.goes_through_wall(module, other) is is_forbidden


def test_strangers_and_cycles_are_found():
    assert check_layers.is_stranger(
        "sglang.srt.kv_canary.api", "sglang.srt.models.llama"
    )
    assert check_layers.find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not check_layers.find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_type_only_imports_do_not_count(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "import known.one\n"
        "if TYPE_CHECKING:\n    import known.two\n"
        "def f():\n    from known import three\n"
    )
    known = {"known.one", "known.two", "known.three"}
    assert check_layers.imports_of(source, known) == {"known.one", "known.three"}


def test_registration_is_read_from_the_source(tmp_path):
    test = tmp_path / "test_x.py"
    test.write_text("register_cpu_ci(est_time=3, suite='cpu')\n")
    (found,) = run_suite.registrations(test, "cpu")
    assert (found.suite, found.est_time) == ("cpu", 3)
    assert run_suite.registrations(test, "cuda") == []
    test.write_text("register_cpu_ci(est_time=3, suite='typo')\n")
    with pytest.raises(SystemExit, match="typo"):
        run_suite.registrations(test, "cpu")
    test.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="not registered"):
        run_suite.registrations(test, "cpu")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
