"""Every room has a line in the layer table, old import paths work, and the suite runner
refuses unregistered tests."""

from __future__ import annotations

import importlib
import importlib.util
import re
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


run_suite = load(REPO / "test" / "run_suite.py")

# Packages whose own packages are rooms.
HOUSES = ("managers", "replay")


def test_every_room_has_a_line_in_the_layer_table():
    srt = REPO / "python" / "sglang" / "srt"
    folders = [*srt.iterdir(), *(f for h in HOUSES for f in (srt / h).iterdir())]
    rooms = {
        ".".join(folder.relative_to(REPO / "python").parts)
        for folder in folders
        if (folder / "__init__.py").exists() and folder.name not in HOUSES
    }
    table = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    layers = table.partition('type = "layers"')[2].partition("ignore_imports")[0]
    listed = re.findall(r"sglang\.srt[\w.]*", layers)
    assert rooms <= set(listed)
    assert len(listed) == len(set(listed)), "a room has two lines"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("managers.schedule_batch", ["ScheduleBatch"]),
        ("managers.scheduler", ["Scheduler"]),
        ("managers.tokenizer_manager", ["TokenizerManager"]),
        ("managers.utils", ["GenerationBatchResult", "get_alloc_len_per_decode"]),
        (
            "model_executor.forward_batch_info",
            ["CaptureHiddenMode", "ForwardBatch", "ForwardMode"],
        ),
        (
            "speculative.eagle_info_v2",
            ["EagleDraftInput", "duplicate_prefix_tail_to_draft_branches"],
        ),
    ],
)
def test_paths_that_other_code_imports(module, names):
    found = importlib.import_module(f"sglang.srt.{module}")
    for name in names:
        assert getattr(found, name).__name__ == name


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
