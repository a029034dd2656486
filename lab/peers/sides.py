"""The sides of the comparison, each a worker on the cores of this process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison import Arena, Side

from sglang.bench_utils.worker import BenchWorker, worker_environment
from sglang.bench_utils.workloads import DEMO_DRAFTS, Workloads
from sglang.srt.environ import child_environment
from sglang.srt.utils.paths import bundled_demo_model_path

HERE = Path(__file__).resolve().parent
ENGINE_SLOTS = 32768
ENGINE_FLAGS: dict[str, Any] = {"max_total_tokens": ENGINE_SLOTS, "random_seed": 0}
OURS = "sglang-canary"
DRAFTING = f"{OURS}, drafting"
# One thread per core, for every side: two threads that share a core wait for each other
# at every barrier until the spinning one gives up.
BOUND_THREADS = {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}


@dataclass(kw_only=True)
class Setup:
    """State shared by all phases.

    Fields:
        stack: ends the sides that are kept until the end.
        arena: watches the workers and takes the measurements.
        threads: OpenMP threads of every side.
        llama_python: interpreter that may have llama_cpp.
    """

    stack: ExitStack
    arena: Arena
    workloads: Workloads
    model_path: str
    threads: int
    rounds: int
    llama_python: str
    _engine: Side | None = field(default=None)

    def engine(self) -> Side:
        """Return the engine with its defaults; started at the first call and kept."""
        if self._engine is None:
            self._engine = self.stack.enter_context(self.start_engine(OURS))
        return self._engine

    @contextmanager
    def start_engine(self, name: str, **flags: Any) -> Iterator[Side]:
        """Start the engine with these flags; each round begins with an empty cache."""
        with self._start(
            name, [sys.executable, str(HERE / "side_sglang.py")]
        ) as worker:
            worker.call("load", model_path=self.model_path, **ENGINE_FLAGS, **flags)
            yield Side(name=name, worker=worker, prepare=lambda: worker.call("flush"))

    @contextmanager
    def start_drafting(self) -> Iterator[list[Side]]:
        """Start the engine with `DEMO_DRAFTS`, or return None for a model without a
        head.
        """
        if Path(self.model_path) != bundled_demo_model_path():
            yield []
            return
        with self.start_engine(DRAFTING, **DEMO_DRAFTS) as side:
            yield [side]

    @contextmanager
    def start_forward(self) -> Iterator[BenchWorker]:
        """Start the bare model."""
        command = [sys.executable, "-m", "sglang.bench_utils.forward_worker"]
        with self._start("forward", command) as worker:
            worker.call("load", model_path=self.model_path, **ENGINE_FLAGS)
            yield worker

    @contextmanager
    def start_transformers(self) -> Iterator[list[Side]]:
        """Start every sensible variant of `transformers`, or none if not installed."""
        command = [sys.executable, str(HERE / "side_transformers.py")]
        if not _can_import(sys.executable, "transformers"):
            yield []
            return
        dtypes = ("float32", "bfloat16")
        with self._start("transformers", command) as worker:
            worker.call(
                "load", folder=self.model_path, dtypes=dtypes, threads=self.threads
            )
            yield [
                Side(
                    name=f"transformers {dtype}, {cache} cache, {groups} batch(es)",
                    worker=worker,
                    options={"dtype": dtype, "cache": cache, "groups": groups},
                )
                for dtype in dtypes
                for cache in ("dynamic", "static")
                for groups in (1, 2)
            ]

    @contextmanager
    def start_llama(self) -> Iterator[list[Side]]:
        """Start llama.cpp in each precision, or none if it is not installed."""
        if not _can_import(self.llama_python, "llama_cpp", "gguf"):
            yield []
            return
        command = [self.llama_python, str(HERE / "side_llama.py")]
        with (
            tempfile.TemporaryDirectory(prefix="sglang-gguf-") as folder,
            self._start("llama.cpp", command) as worker,
        ):
            precisions = worker.call(
                "load", folder=self.model_path, target=folder, threads=self.threads
            )
            yield [
                Side(
                    name=f"llama.cpp {precision}",
                    worker=worker,
                    options={"precision": precision},
                )
                for precision in precisions
            ]

    @contextmanager
    def _start(self, name: str, command: list[str]) -> Iterator[BenchWorker]:
        environment = worker_environment(
            child_environment(), threads=self.threads, **BOUND_THREADS
        )
        with BenchWorker(name, command, environment=environment) as worker:
            self.arena.enter(worker)
            try:
                yield worker
            finally:
                self.arena.leave(worker)


def _can_import(python: str, *packages: str) -> bool:
    """Whether that interpreter finds all `packages`, without importing them."""
    code = (
        "import importlib.util as u, sys; "
        "sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    )
    try:
        result = subprocess.run([python, "-c", code, *packages], check=False)
    except OSError as error:
        raise ValueError(f"--llama-python {python}: {error}") from error
    return result.returncode == 0
