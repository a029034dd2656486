"""A planted fault: where it acts, and who must name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_canary.checks import Reason


class Planted(Enum):
    """Where a fault acts, and therefore what plants it."""

    POOL = "pool"
    """In slots and tables, around a launch: `sglang.faults.pools`."""
    SAMPLING = "sampling"
    """In the sampled tokens: `sglang.faults.driver`."""
    WINDOW = "window"
    """In window slots only, like `POOL`."""
    STATE = "state"
    """In slots of recurrent state, their copies and their layers, like `POOL`."""
    DRAFT = "draft"
    """In draft steps and moves, like `POOL`."""
    STEP = "step"
    """In what one part of a step hands to the next: `sglang.faults.steps`."""
    TIER = "tier"
    """In units that move between tiers: `sglang.faults.tiers`."""
    START = "start"
    """In anything that an engine is built of: `sglang.faults.fault_points`."""
    IDENTITY = "identity"
    """In whose KV is taken for a request's: `sglang.faults.identity`."""
    PLUGIN = "plugin"
    """In stock engines only: `kv_canary.faults.vllm`, `kv_canary.faults.sglang`."""


class FaultPlace(Enum):
    """The part of an engine's work that goes wrong; one-line faults use the same
    places."""

    MEMORY = "memory"
    BATCH = "batch"
    SCHEDULER = "scheduler"
    RESULTS = "results"
    PUBLISHING = "publishing"
    RELAY = "relay"
    TREE = "tree"
    BRANCHES = "branches"
    ATTENTION = "attention"
    STATES = "states"
    LOGITS = "logits"
    SAMPLING = "sampling"
    GRAMMAR = "grammar"
    STREAMING = "streaming"
    TIERS = "tiers"
    HEALING = "healing"
    CORE = "core"


class SlotGroup(Flag):
    """Kinds of slots."""

    FULL = auto()
    WINDOW = auto()
    LATENT = auto()
    DRAFT = auto()
    STATE = auto()


class Serving(Flag):
    """Ways of decoding in which a fault can occur: plain, chains of drafts, trees."""

    PLAIN = auto()
    CHAIN = auto()
    TREE = auto()
    SPECULATION = CHAIN | TREE
    ALL = PLAIN | SPECULATION


class HostEngine(Enum):
    """Stock engines whose plugin plants a fault in its self-test."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Bound(Enum):
    """Who names a fault at the latest."""

    SAME = "that launch"
    NEXT = "the request's next launch"
    READ = "the first forward that reads it"
    HIT = "the first hit's forward"
    SWEEP = "the sweep pass that reaches it, or a hit before that"
    HOST = "the host, with the result"
    NEVER = "the host alone"


class Harm(Enum):
    """What clients would notice without the canary."""

    TOKENS = "tokens"
    DRAFTS = "drafts"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the catalogue.

    Fields:
        planted: where it acts.
        name: unique among the faults planted there.
        place: the part of the work that it breaks.
        groups: kinds of slots that it can damage.
        reasons: at least one of them must be reported about a harmed request.
        bound: who reports it at the latest.
        harm: what it changes if no canary looks.
        what: what it does, in one line.
        names: what a report must name, or how the fault is seen; empty for the request.
        variable: the environment variable that plants it by chance, or empty.
        upstream: its further numbers in SGLang.
        hosts: its name in the self-test of each plugin that plants it.
        needs_all: whether it is only seen if all bytes are fingerprinted.
    """

    planted: Planted
    name: str
    place: FaultPlace
    groups: SlotGroup
    serving: Serving
    reasons: Reason
    bound: Bound
    harm: Harm
    what: str
    names: str
    variable: str
    upstream: tuple[str, ...]
    hosts: Mapping[HostEngine, str]
    needs_all: bool
