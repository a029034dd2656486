"""Who may read incidents from a host's own port."""

from __future__ import annotations

import pytest

from kv_canary.engines.readers import Readers
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


def status(readers: Readers, peer: str | None, host: str, key: str = "") -> int:
    found = readers.denial(peer=peer, host=host, authorization=key)
    return 200 if found is None else found.status


@pytest.mark.parametrize(
    ("peer", "host", "due"),
    [
        ("127.0.0.1", "localhost:8000", 200),
        ("127.0.0.9", "127.0.0.1", 200),
        ("::1", "[::1]:8000", 200),
        ("::ffff:127.0.0.1", "LOCALHOST", 200),
        (None, "", 200),
        ("10.0.0.7", "localhost", 403),
        ("10.0.0.7", "127.0.0.1:8000", 403),
        # A page of another site, whose name points here, in a browser of this machine.
        ("127.0.0.1", "evil.example:8000", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "10.0.0.7", 403),
        ("testclient", "localhost", 403),
    ],
)
def test_without_keys_only_this_machine_reads(
    peer: str | None, host: str, due: int
) -> None:
    assert status(Readers(["", ""]), peer, host) == due
    assert status(Readers([]), peer, host, "Bearer anything") == due


@pytest.mark.parametrize(
    ("key", "due"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer  two ", 200),
        ("Bearer three", 401),
        ("Bearer", 401),
        ("Basic one", 401),
        ("one", 401),
        ("", 401),
    ],
)
def test_with_keys_whoever_has_one_reads_from_anywhere(key: str, due: int) -> None:
    readers = Readers(["one", "two"])
    assert status(readers, "10.0.0.7", "models.example", key) == due
    assert status(readers, "127.0.0.1", "localhost", key) == due
