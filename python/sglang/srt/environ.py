"""Environment variables: the only module that reads `os.environ`.

Each variable is typed, documented and can be overridden in tests:
`with envs.SGLANG_X.override(value): ...`. Command line flags are in `server_args`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off")


class EnvVar(Generic[T]):
    """One typed variable; read at every `get`, so that tests and children see
    changes."""

    def __init__(
        self, name: str, default: T, parse: Callable[[str], T], doc: str
    ) -> None:
        self.name = name
        self.default = default
        self.doc = doc
        self._parse = parse

    def get(self) -> T:
        """The parsed value, or the default where the variable is unset.

        Raises:
            ValueError: the text cannot be parsed; names the variable and the text.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self._parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from error

    def is_set(self) -> bool:
        return self.name in os.environ

    @contextmanager
    def override(self, value: T) -> Iterator[None]:
        """Set the variable for this process and its children, then restore it."""
        before = os.environ.get(self.name)
        os.environ[self.name] = str(int(value) if isinstance(value, bool) else value)
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


class Envs:
    """Every variable that the engine reads."""

    OMP_NUM_THREADS = EnvVar(
        "OMP_NUM_THREADS",
        0,
        int,
        "Threads of the CPU kernels. 0: cores - 1 in the server, all cores in the "
        "offline Engine.",
    )
    SGLANG_NATIVE_KERNELS = EnvVar(
        "SGLANG_NATIVE_KERNELS",
        True,
        _parse_bool,
        "Use the native CPU kernels where they are installed; 0 forces the torch "
        "reference.",
    )
    SGLANG_TEST_FULL = EnvVar(
        "SGLANG_TEST_FULL",
        False,
        _parse_bool,
        "Tests run their whole counts (make test-full) instead of the CI sample.",
    )
    SGLANG_CI = EnvVar("CI", False, _parse_bool, "Set by CI machines.")


envs = Envs()


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of this process's environment for a child, with `extra` on top."""
    return {**os.environ, **extra}
