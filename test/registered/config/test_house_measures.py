"""The measures of the tree's structure, on a tree small enough to count by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

LAYERS = """
NAMES = ("ops", "layers", "managers", "speculative")


def layer_of(module):
    return NAMES.index(module.split(".")[2])
"""
SPECULATIVE = """
from __future__ import annotations
from sglang.srt.layers.norm import Norm
from sglang.srt.managers.batch import Batch
from sglang.srt.ops.table import gather


class EAGLEWorkerV2:
    def __init__(self) -> None:
        self._norm = Norm()

    def verify(self, batch: Batch) -> None:
        self._norm.run(batch.size)
        gather(batch)
"""
NORM = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2


class Norm:
    \"\"\"Args:
        none.
    \"\"\"

    def run(self, size: int) -> None:
        from sglang.srt.managers import batch  # What is behind.
"""
BATCH = """
from sglang.srt.layers import norm, other


class Batch:
    \"\"\"What one iteration runs.\"\"\"

    size: int = 0


class Scheduler:
    limit = 1
"""
OTHER = "from sglang.srt.managers import more"
TABLE = """
from typing import Any
from sglang.srt.ops.op import Op


def _import_triton() -> Any:
    from sglang.srt.ops import kernels
    return kernels


def use_triton(tensor):
    return False


triton = _import_triton()


def gather_ref(batch):
    triton.narrow(batch)


gather = Op(reference=gather_ref)
"""
OP = """
class Op:
    def __call__(self, *args):
        return use_triton(args)
"""


def kernels() -> str:
    """A Triton function of 21 parameters and 20 lines, one of 20 and 101."""
    wide = ", ".join(f"a{i}" for i in range(21))
    narrow = ", ".join(f"a{i}" for i in range(20))
    return (
        f"import triton\n@triton.jit\ndef wide({wide}):\n" + "    a0 += 1\n" * 19 + "\n"
        f"@triton.jit(do_not_specialize=['a0'])\ndef narrow({narrow}):\n"
        + "    a0 += 1\n"
        * 100
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script as running it would: its siblings are found."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def root(tmp_path: Path) -> Path:
    srt = tmp_path / "python" / "sglang" / "srt"
    files = {
        "speculative/eagle_worker_v2.py": SPECULATIVE,
        "layers/norm.py": NORM,
        "layers/other.py": OTHER,
        "managers/batch.py": BATCH,
        "managers/more.py": "",
        "ops/table.py": TABLE,
        "ops/op.py": OP,
        "ops/kernels.py": kernels(),
        "server_args.py": "from sglang.srt.managers import more",
        "__init__.py": "",
    }
    for name, text in files.items():
        path = srt / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "check_layers.py").write_text(LAYERS)
    return tmp_path


@pytest.fixture
def found(load: Callable[[str], ModuleType], root: Path) -> dict[str, Any]:
    measures: dict[str, Any] = load("house_measures").measure(root)
    return measures


def test_back_running_imports_are_those_of_the_fewer_modules(
    found: dict[str, Any],
) -> None:
    # Two modules of layers import managers; one of managers imports two of layers.
    back = found["back_running"]
    assert (back["modules"], back["imports"], back["pairs"]) == (1, 2, 1)
    assert list(back["list"]) == ["managers -> layers"]


def test_type_only_imports_close_circles(found: dict[str, Any]) -> None:
    (circle,) = found["circles"]
    names = [name.rpartition(".")[2] for name in circle]
    assert names == ["norm", "batch", "eagle_worker_v2"]


def test_lengths_and_parameters(found: dict[str, Any]) -> None:
    assert list(found["long_triton"].values()) == [101] == [found["longest_triton"]]
    assert found["long_python"] == {} and found["longest_python"] == 3
    assert list(found["triton_many_parameters"].values()) == [21]
    assert found["scheduler_lines"] == 2


def test_choices_outside_of_the_dispatch_module(found: dict[str, Any]) -> None:
    in_ops = "python/sglang/srt/ops/"
    assert found["dispatch"] == {
        "import_triton": [in_ops + "table.py"],
        "callers": [in_ops + "op.py"],
    }


def test_walk_in_order_of_the_first_visit(found: dict[str, Any]) -> None:
    walk = found["verify_walk"]
    assert [file.rpartition(".")[2] for file in walk["files"]] == [
        "eagle_worker_v2",
        "batch",
        "norm",
        "op",
        "table",
        "kernels",
    ]
    assert (walk["stays"], walk["climbs"]) == (6, 0)


def test_a_step_to_a_higher_layer_is_a_climb(
    load: Callable[[str], ModuleType], root: Path
) -> None:
    turned = LAYERS.replace('"layers", "managers"', '"managers", "layers"')
    (root / "scripts" / "check_layers.py").write_text(turned)
    assert load("house_measures").measure(root)["verify_walk"]["climbs"] == 1


def test_words_count_in_docstrings_and_comments(found: dict[str, Any]) -> None:
    counted = {word: count for word, count in found["words"].items() if count}
    assert counted == {
        "what_opens_a_line": 2,
        "behind": 1,
        "class_opens_with_args": 1,
    }


def test_this_tree_has_no_more_circles() -> None:
    """Walls and circles fail; sizes and words are printed, for people to judge."""
    result = subprocess.run(
        [sys.executable, SCRIPTS / "house_measures.py"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["verify_walk"]["stays"] > 1
    back = found["back_running"]
    assert back["modules"] <= 7, back["list"]
    assert len(found["circles"]) <= 2, found["circles"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
