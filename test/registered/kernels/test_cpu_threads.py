"""Threads of the CPU kernels: they help, and nobody waits for one that does not run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.layers.ops.linear import op as linear
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
THREAD_NAME = "sglang-kernels"
CALLS = 150
ROUNDS = 8
STALLED = 4.0
"""Times the duration with one thread. A team that meets at barriers takes 8 to 100
times as long beside a busy process."""

BOUND = """
import os, torch
from pathlib import Path
from sglang_kernels import ops
torch.set_num_threads(2)
x, weight = torch.ones(64, 512), torch.ones(16, 512, 32)
ops.packed_linear(x, weight, 512, None, torch.empty(64, 512))
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().strip() == "sglang-kernels":
        print(*os.sched_getaffinity(int(task.name)))
"""


class Product:
    """A product that is worth several threads, and its result with one."""

    def __init__(self, rows: int = 16) -> None:
        self.x = torch.randn(rows, 384)
        self.weight = linear.pack_weight(torch.randn(1536, 384).bfloat16())
        torch.set_num_threads(1)
        self.expected = self()

    def __call__(self) -> Tensor:
        return linear.linear(self.x, self.weight)

    def seconds(self, threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        for _ in range(CALLS):
            self()
        return time.perf_counter() - began


@contextmanager
def two_cores() -> Iterator[list[int]]:
    """This thread on two cores; the helpers keep what they have."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    cores = sorted(allowed)[:2]
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, allowed)


def helpers() -> list[int]:
    """Thread ids of the pool."""
    tasks = Path("/proc/self/task").iterdir()
    return [
        int(task.name)
        for task in tasks
        if (task / "comm").read_text().strip() == THREAD_NAME
    ]


def test_a_busy_process_does_not_stall_the_kernels() -> None:
    product = Product()
    product.seconds(2)
    with two_cores() as cores:
        command = [sys.executable, "-c", "while True: pass"]
        busy = [
            subprocess.Popen(
                command, preexec_fn=lambda core=core: os.sched_setaffinity(0, [core])
            )
            for core in cores[1:]
        ]
        try:
            time.sleep(0.2)
            times = [[product.seconds(n) for n in (1, 2)] for _ in range(ROUNDS)]
        finally:
            for process in busy:
                process.kill()
                process.wait()
    one, two = map(sum, zip(*times, strict=True))
    assert two < STALLED * one, times


def test_callers_at_the_same_time() -> None:
    """The helpers serve one caller; the others do their parts alone, equally."""
    products = [Product(rows) for rows in (5, 16, 33, 64)]
    torch.set_num_threads(3)

    def call(product: Product) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(product(), product.expected) for _ in range(40))

    with ThreadPoolExecutor(len(products)) as pool:
        assert all(pool.map(call, products * 2))


def test_helpers_are_started_once_and_sleep() -> None:
    product = Product(64)
    for threads in (2, 4, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(product(), product.expected)
    assert len(helpers()) >= 3
    before = helpers()
    product()
    assert helpers() == before
    time.sleep(0.1)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.1


def test_a_forked_child_gets_helpers_of_its_own() -> None:
    product = Product()
    torch.set_num_threads(2)
    product()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(), product.expected) and helpers() else 1)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


def test_helpers_are_bound_as_openmp_is_told() -> None:
    """A caller that OpenMP binds to the first core would bequeath that core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    environment = os.environ | {
        "OMP_NUM_THREADS": "2",
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": f"{{{cores[0]}}},{{{cores[1]}}}",
    }
    result = subprocess.run(
        [sys.executable, "-c", BOUND],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == [str(cores[1])]
