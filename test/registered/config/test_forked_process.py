"""A forked process is the one that `subprocess.Popen` would start, but for its imports;
where a fork could make a difference, it is that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forked_process import ForkedProcess

register_cpu_ci(est_time=4, suite="cpu")

Start = Callable[..., Any]
# Of a scheduler: only a process that was forked has imported it.
HAS_IMPORTS = (
    "import sys; print('sglang.srt.managers.scheduler.scheduler' in sys.modules)"
)


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """The suite's, where one forks."""
    if forked_process.start_process is not subprocess.Popen:
        yield forked_process.start_process
        return
    with forked_process.forking():
        yield forked_process.start_process


def told(start: Start, *command: str, **env: str) -> str:
    process = start(
        [sys.executable, *command],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text: str = process.stdout.read()
    assert process.wait(30) == 0, text
    return text.strip()


def test_imports_are_there(start: Start) -> None:
    assert told(start, "-c", HAS_IMPORTS) == "True"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "3"),
        ("OMP_WAIT_POLICY", "active"),
        ("SGLANG_NATIVE_KERNELS", "0"),
        ("SOME_LIBRARY_S", "setting"),
    ],
)
def test_a_variable_that_an_import_may_read_needs_a_new_process(
    start: Start, name: str, value: str
) -> None:
    assert told(start, "-c", HAS_IMPORTS, **{name: value}) == "False"


def test_an_interpreter_s_option_needs_a_new_process(start: Start) -> None:
    assert told(start, "-O", "-c", HAS_IMPORTS) == "False"


def test_the_product_s_own_variables_arrive(start: Start) -> None:
    program = (
        "from sglang.srt.environ import envs; print(envs.SGLANG_TEST_KV_CANARY.get())"
    )
    for value in ("1", "0"):
        assert told(start, "-c", program, SGLANG_TEST_KV_CANARY=value) == str(
            value == "1"
        )
    assert os.environ.get("SGLANG_TEST_KV_CANARY", "") in ("", "0", "1")


def test_arguments_and_folders(start: Start, tmp_path: Path) -> None:
    program = "import sys; print(__name__, sys.argv[1:])"
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(f"import beside; print(beside.NAME)\n{program}\n")
    assert told(start, "-c", program, "a", "b") == "__main__ ['a', 'b']"
    assert told(start, str(script), "c") == "beside\n__main__ ['c']"
    assert told(start, "-m", "this").startswith("The Zen of Python")


@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('a reason')", 1, "a reason\n"),
        ("import atexit; atexit.register(print, 'last')", 0, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(5)", 5, ""),
    ],
)
def test_ends(start: Start, program: str, code: int, text: str) -> None:
    done = forked_process.run([sys.executable, "-c", program], timeout=30)
    assert (done.returncode, done.stderr) == (code, text)
    assert done.stdout == ("last\n" if "atexit" in program else "")


def test_an_error_is_shown(start: Start) -> None:
    command = [sys.executable, "-c", "raise KeyError('lost')"]
    done = forked_process.run(command, timeout=30)
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'lost'\n")


def test_pipes_sessions_and_signals(start: Start) -> None:
    reader, writer = os.pipe()
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "os.write(int(sys.argv[1]), b'%d' % (os.getsid(0) == os.getpid()))\n"
        "print(sys.stdin.readline(), flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = start(
        [sys.executable, "-c", program, str(writer)],
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(writer,),
        start_new_session=True,
    )
    assert isinstance(process, ForkedProcess)
    os.close(writer)
    assert os.read(reader, 10) == b"1"
    os.close(reader)
    process.stdin.write(b"hello\n")
    assert process.stdout.readline() == b"hello\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.terminate()
    assert process.wait(30) == process.poll() == process.returncode == 7
    process.send_signal(signal.SIGTERM)  # Nothing to send it to.


def test_children_are_those_of_the_one_that_asked(start: Start) -> None:
    """A server's scheduler is forked for the server."""
    program = (
        "import os, subprocess, sys\n"
        "from sglang.srt.managers.front import scheduler_process\n"
        "child = scheduler_process.start_child(\n"
        "    [sys.executable, '-c', 'input()'], env=os.environ,\n"
        "    stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
        "child.stdin.close()\n"
        "sys.exit(child.wait(30))\n"
    )
    process = start(
        [sys.executable, "-c", program],
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(process.stdout.readline())
    assert process.children() == [pid]
    process.stdin.write(b"\n")
    assert process.wait(30) == 1, "the child read the end of its input"
    assert not Path(f"/proc/{pid}").exists()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
