"""How much of a test runs: the CI sample or the whole count of `make test-full`."""

from __future__ import annotations

from sglang.srt.environ import envs


def is_full() -> bool:
    return envs.SGLANG_TEST_FULL.get()


def count(*, ci: int, full: int) -> int:
    """`full` under `make test-full`, else `ci`. Scale changes counts, never
    assertions."""
    return full if is_full() else ci
