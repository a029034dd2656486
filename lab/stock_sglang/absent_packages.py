"""Stand-ins for packages that a stock SGLang imports and a text model never calls.

SGLang imports packages that are large, compiled, or both. With this folder on
`PYTHONPATH` (`sitecustomize.py`), the ones that are not installed become modules whose
attributes are all uncallable classes. Installed packages are unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = frozenset(
    {
        "IPython",
        "anthropic",
        "compressed_tensors",
        "datasets",
        "deep_gemm",
        "flashinfer",
        "gguf",
        "llguidance",
        "mistral_common",
        "modelscope",
        "openai",
        "openai_harmony",
        "outlines",
        "sgl_kernel",
        "soundfile",
        "xgrammar",
    }
)
"""Top-level names. What SGLang itself can do without is not among them: it asks whether
that is there, and would believe that it is."""

WITHOUT = frozenset({"flashinfer.norm"})
"""Parts that a stand-in lacks: `sgl_kernel` has kernels of its own for them, which it
takes where these cannot be imported."""
SWITCHES = {
    "deep_gemm": ("SGLANG_ENABLE_JIT_DEEPGEMM", "false"),
    "flashinfer": ("SGLANG_IS_FLASHINFER_AVAILABLE", "false"),
}
"""Of packages that some modules import without a question and others ask for: what says
that they are not there."""
FUNCTIONS = {
    "flashinfer.sampling": {
        "top_k_renorm_probs": "renormed",
        "top_p_renorm_probs": "renormed",
    }
}
"""Functions that are called, and our modules that have them."""


class _Absent(type):
    """Metaclass of the classes that replace a package's contents."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_stands_in"):
            raise RuntimeError(
                f"{cls.__module__}.{cls.__qualname__}: this package is not installed"
            )
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _any_schema(source: Any, handler: Any) -> Any:
    """Return a schema for any value, because Pydantic models have fields of these
    types.
    """
    return importlib.import_module("pydantic_core.core_schema").any_schema()


def _absent(module: str, name: str) -> Any:
    body = {
        "__module__": module,
        "__get_pydantic_core_schema__": staticmethod(_any_schema),
        "_stands_in": True,
    }
    return _Absent(name, (), body)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = FUNCTIONS.get(self.__name__, {}).get(name)
        value = (
            _absent(self.__name__, name)
            if ours is None
            else getattr(importlib.import_module(ours), name)
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import finder of the stand-ins, asked last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES or fullname in WITHOUT:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not isinstance(parent, _Module):
            # A submodule that an installed package does not have.
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code to run."""


def _is_absent(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is None or isinstance(spec.loader, _Finder)


def stand_in() -> None:
    """Install the finder once."""
    for package, (variable, value) in SWITCHES.items():
        if _is_absent(package):
            os.environ.setdefault(variable, value)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
