"""Compiles the kernels of a piece of work in parallel before the work is done.

The work is run once without them: launches are skipped, those of missing kernels are
noted, and memory that they would have filled contains zeros. Meanwhile many processes
compile the noted kernels into Triton's disk cache, where the real run finds them. A
machine that has compiled a configuration stores a mark next to the kernels, and skips
this.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.utils.forks import Workers

logger = logging.getLogger(__name__)

PACKAGES = ("sglang", "kv_canary")
_aten = torch.ops.aten
_UNFILLED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class _Job(NamedTuple):
    """A variant of a kernel, as input for Triton's compiler."""

    kernel: Any
    source: type  # of its language
    target: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]


class _Zeroed(TorchDispatchMode):
    """Fills all new memory with zeros, so that an index that no kernel wrote is
    valid.
    """


def _run_zeroed(
    self: _Zeroed, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    result = func(*args, **(kwargs or {}))
    return result.zero_() if func in _UNFILLED else result


# Not in the class: PyTorch would hide the class's own method from its compiler, which
# imports the compiler and takes seconds.
_Zeroed.__torch_dispatch__ = _run_zeroed  # type: ignore[assignment, method-assign]


class _LeftOut:
    """A kernel that is already noted or loaded; its launches do nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


class _Variant(NamedTuple):
    """A loaded variant of a kernel, and where Triton finds it."""

    kernels: dict[Any, Any]
    key: Any
    loaded: Any


def _loaded_variants() -> list[_Variant]:
    """Return what earlier work of this process, such as another engine, has loaded."""
    from triton.runtime.jit import JITFunction

    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        for kernel in list(vars(module).values()):
            if isinstance(kernel, JITFunction):
                for kernels, *_ in kernel.device_caches.values():
                    found += [_Variant(kernels, *item) for item in kernels.items()]
    return found


class _Pickler(pickle.Pickler):
    """Writes kernels, which have no bytes of their own, as their names."""

    def reducer_override(self, value: Any) -> Any:
        # Also of functions that are constants of a kernel.
        if isinstance(getattr(value, "fn", None), FunctionType):
            return _find_kernel, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _find_kernel(module: str, name: str) -> Any:
    return attrgetter(name)(import_module(module))


def _packed(job: _Job) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(tuple(job))
    return out.getvalue()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Scope of work whose results are unused; its kernels are compiled when it ends.

    Loaded kernels are left out too: where others are missing, they would read zeros as
    lengths and write indices that are not valid.
    """
    import triton

    runtime = triton.knobs.runtime
    compilers = Workers(_compile)
    noted: list[tuple[dict[Any, Any], Any]] = []
    before = runtime.jit_cache_hook

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **about: Any) -> bool:
        compilers.give(_packed(_make_job(fn.jit_function, compile)))
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = _LeftOut()  # for the next launches; the hook is slow
        noted.append((kernels, key))
        return True  # which skips the launch

    variants = _loaded_variants()
    for kernels, key, _ in variants:
        kernels[key] = _LeftOut()
    runtime.jit_cache_hook = note
    began = time.perf_counter()
    try:
        with _Zeroed():  # type: ignore[no-untyped-call]
            yield
    except BaseException:
        compilers.cancel()
        raise
    finally:
        runtime.jit_cache_hook = before
        for kernels, key in noted:
            del kernels[key]
        for kernels, key, loaded in variants:
            kernels[key] = loaded
    rehearsed = time.perf_counter() - began
    compilers.finish()
    logger.info(
        "Compiled %d kernels in %.1f s, of which the rehearsal took %.1f",
        len(noted),
        time.perf_counter() - began,
        rehearsed,
    )


def _make_job(kernel: Any, about: dict[str, Any]) -> _Job:
    from triton.runtime import driver

    options = json.loads(about["specialization_data"])["options"]
    return _Job(
        kernel=kernel,
        source=kernel.ASTSource,
        # A fork cannot ask the driver.
        target=driver.active.get_current_target(),
        signature=about["signature"],
        constants=about["constants"],
        attributes=about["configs"][0],
        options={
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
        },
    )


def _compile(packed: bytes) -> None:
    from triton.compiler import compile
    from triton.runtime import driver

    job = _Job(*pickle.loads(packed))
    source = job.source(job.kernel, job.signature, job.constants, job.attributes)
    made = compile(source, target=job.target, options=job.options)
    # Up to Triton 3.6 a C compiler builds the argument launcher.
    driver.active.launcher_cls(made.src, made.metadata)


def digest_code(packages: Sequence[str]) -> str:
    """Return a digest of the Python code of `packages`."""
    digest = hashlib.sha256()
    for name in packages:
        found = find_spec(name)
        folders = found.submodule_search_locations if found is not None else None
        for folder in folders or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


class CompiledMark:
    """Marks, next to the compiled kernels, that a configuration's kernels are there.

    Args:
        configuration: JSON value of everything that decides which kernels are used.
        packages: packages whose code contains the kernels and chooses among them.
    """

    def __init__(
        self, configuration: dict[str, Any], packages: Sequence[str] = PACKAGES
    ) -> None:
        import triton

        device = torch.cuda.get_device_name()
        versions = [triton.__version__, torch.__version__, digest_code(packages)]
        about = [configuration, device, *versions]
        text = json.dumps(about, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._path = Path(triton.knobs.cache.dir) / f"sglang-compiled-{digest}"

    def is_set(self) -> bool:
        return self._path.exists()

    def set(self) -> None:
        """Set the mark; does nothing if the folder cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)
