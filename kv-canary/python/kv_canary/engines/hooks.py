"""Engine methods that a plugin wraps, after checking their names and signatures."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class Refusal(RuntimeError):
    """This engine, or its configuration, cannot be checked. The text names what was
    looked for and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A method to wrap, and the parameters that the wrapper relies on.

    Fields:
        owner: `module:Class`.
        method: its name; it may be a class method.
        parameters: names of the first parameters after `self` or `cls`; more may
            follow.
        purpose: text for `doctor`.
    """

    owner: str
    method: str
    parameters: tuple[str, ...]
    purpose: str

    @property
    def place(self) -> str:
        return f"{self.owner}.{self.method}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRecord:
    """A dataclass of the engine, and those of its fields that are read."""

    owner: str
    fields: tuple[str, ...]
    purpose: str

    @property
    def place(self) -> str:
        return self.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf:
    """Alternative methods; the first one that is as expected is wrapped."""

    hooks: tuple[Hook, ...]

    @property
    def place(self) -> str:
        return " or ".join(hook.place for hook in self.hooks)

    @property
    def purpose(self) -> str:
        return self.hooks[0].purpose

    def found(self) -> Hook:
        """Return the first method that is as expected.

        Raises:
            Refusal: there is none.
        """
        require((self,))
        return next(hook for hook in self.hooks if problem_with(hook) is None)


Expectation = Hook | HookRecord | AnyOf


def problem_with(expected: Expectation) -> str | None:
    """Return how the engine differs from an expectation, or None if it does not."""
    if isinstance(expected, AnyOf):
        problems = [problem_with(hook) for hook in expected.hooks]
        return None if None in problems else ", and ".join(map(str, problems))
    try:
        owner = load_owner(expected.owner)
    except Exception as error:
        # An engine's module may raise any of these if its device is missing.
        return f"looked for {expected.owner}, found: {error}"
    if isinstance(expected, HookRecord):
        return _problem_with_fields(expected, owner)
    method = inspect.getattr_static(owner, expected.method, None)
    if method is None:
        return f"looked for {expected.place}, found no such method"
    if isinstance(method, classmethod):
        method = method.__func__
    if not inspect.isfunction(method):
        return f"looked for the method {expected.place}, found a {type(method)}"
    found = tuple(inspect.signature(method).parameters)[1:]
    if found[: len(expected.parameters)] != expected.parameters:
        return (
            f"looked for {expected.place}({', '.join(expected.parameters)}, ...), "
            f"found ({', '.join(found)})"
        )
    return None


def import_failures(expected: Sequence[Expectation]) -> dict[str, str]:
    """Return the engine's modules that exist but do not import, with the error.

    Missing modules are not included: the engine has moved them.
    """
    failures = {}
    for module in dict.fromkeys(
        name for each in expected for name in expected_modules(each)
    ):
        error = import_failure(module)
        if error is not None:
            failures[module] = error
    return failures


def expected_modules(expected: Expectation) -> tuple[str, ...]:
    """Return the modules of the engine that an expectation looks into."""
    parts = expected.hooks if isinstance(expected, AnyOf) else (expected,)
    return tuple(part.owner.partition(":")[0] for part in parts)


@functools.cache
def import_failure(module: str) -> str | None:
    """Return why a module does not import, or None if it does or does not exist.

    Asked only once: Python forgets a package whose import failed, and the next import
    of its modules fails for another reason.
    """
    package = module.rpartition(".")[0]
    if package and import_failure(package) is not None:
        return import_failure(package)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module}.".startswith(f"{missing}."):
            return None
        return str(error)
    except Exception as error:
        # An engine's module may raise any of these if its device is missing.
        return f"{type(error).__name__}: {error}"
    return None


def _problem_with_fields(expected: HookRecord, owner: Any) -> str | None:
    if not dataclasses.is_dataclass(owner):
        return f"looked for the dataclass {expected.place}, found a {type(owner)}"
    names = {field.name for field in dataclasses.fields(owner)}
    missing = [name for name in expected.fields if name not in names]
    if missing:
        return (
            f"looked for {expected.place} with {', '.join(missing)}, found "
            f"{', '.join(sorted(names))}"
        )
    return None


def require(expected: Sequence[Expectation]) -> None:
    """Check that the engine is as expected.

    Raises:
        Refusal: something is not as expected. The message names all of it.
    """
    problems = [text for text in map(problem_with, expected) if text is not None]
    if problems:
        raise Refusal("; ".join(problems))


Wrapper = Callable[..., Any]
# Gets the method that it wraps, then its arguments.


def wrap(hook: Hook, around: Wrapper) -> Callable[[], None]:
    """Replace the method by `around(method, self, ...)`, or `around(method, cls, ...)`;
    return a function to undo it."""
    owner = load_owner(hook.owner)
    found = inspect.getattr_static(owner, hook.method)
    is_of_class = isinstance(found, classmethod)
    method = found.__func__ if is_of_class else found

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, hook.method, classmethod(wrapped) if is_of_class else wrapped)
    return lambda: setattr(owner, hook.method, found)


def wrap_of(owner: Any, name: str, around: Wrapper) -> Callable[[], None]:
    """Replace a method of one object by `around(method, ...)`, where `method` is bound;
    return a function to undo it."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapped)
    return lambda: setattr(owner, name, method)


def load_owner(place: str) -> Any:
    """Return the class at `module:Class`.

    Raises:
        ImportError, AttributeError: there is no such class.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
