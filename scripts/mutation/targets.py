"""What an area is, and how a module of it is found and run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from importlib.util import find_spec
from pathlib import Path

from kv_canary.faults.fault import FaultPlace

REPO = Path(__file__).resolve().parents[2]
TESTS = "test/registered/"


class Kind(Flag):
    """What an engine of the promise run does; an area names the kinds that run it."""

    PLAIN = auto()
    """Greedy requests, without speculation."""
    SPEC = auto()
    """Greedy requests that speculate."""
    LAYOUT = auto()
    """Other pools and caches: windows, latents, a cache of chunks, KV events."""
    STATE = auto()
    """Recurrent states, plain and with drafts."""
    TIERS = auto()
    """Cached prefixes in host memory, because the device is too small for them."""
    SAMPLING = auto()
    """Requests with all sampling parameters."""
    GRAMMAR = auto()
    """Requests with grammars."""
    FRONT = auto()
    """Several outputs per prompt, with text, through the front."""
    HEAL = auto()
    """A damage every few steps, which the engine heals."""
    RANKS = auto()
    """Two ranks of tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Modules that do one part of the work, to plant one-line faults in.

    Fields:
        place: name of the part in the catalogue of faults.
        modules: names below `prefix`.
        worlds: kinds of engines that run them; if none, no engine is run for a fault.
        tests: files below `TESTS`, each taking at most about 20 s.
    """

    place: FaultPlace
    modules: tuple[str, ...]
    worlds: Kind
    tests: tuple[str, ...]
    prefix: str = "sglang.srt."

    @property
    def name(self) -> str:
        return self.place.value

    @property
    def names(self) -> list[str]:
        return [self.prefix + module for module in self.modules]


# Files of the canary's torch references, which import each other.
REFERENCES = (
    *("accepted", "before", "carried", "ends", "hash", "notes", "records", "report"),
    *("rows", "verify", "write"),
)
CANARY_REFERENCES = tuple(f"kv_canary.kernels.reference.{name}" for name in REFERENCES)
# If a native kernel does the work, a fault only acts in the torch reference.
WITH_REFERENCES = {
    "sglang.srt.mem_cache.ops.branch_slots.op",
    "sglang.srt.draft_trees.ops.tree.op",
    "sglang.srt.draft_trees.ops.verify.op",
}
# The ops that call into a module, which may be in other modules.
CALLERS = dict.fromkeys(CANARY_REFERENCES, CANARY_REFERENCES) | {
    "sglang.srt.configs.draft_layout": ("sglang.srt.mem_cache.ops.branch_slots.op",),
}


def find_references(module: str) -> tuple[str, ...]:
    """Return the modules whose ops must run their references for a fault in
    `module`.
    """
    own = (module,) if module in WITH_REFERENCES else ()
    return own + CALLERS.get(module, ())


def module_path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin)


def short_path(module: str) -> str:
    """Return the module's file relative to the repository's root."""
    return module_path(module).relative_to(REPO).as_posix()
