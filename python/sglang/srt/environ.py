"""Environment variables: the only module that reads `os.environ`.

Each variable is typed, documented and can be overridden in tests:
`with envs.SGLANG_X.override(value): ...`. Command line flags are in `server_args`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

# The room that plants faults.
FAULTS_ROOM = "sglang.srt.kv_canary.perturb"

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
    """A typed variable, read at every `get` so that tests and children see changes.

    `room` is the module above the engine that acts on it (`arg_groups/rooms.py`); empty
    if the engine itself does.
    """

    def __init__(
        self,
        name: str,
        default: T,
        parse: Callable[[str], T],
        doc: str,
        *,
        room: str = "",
    ) -> None:
        self.name = name
        self.default = default
        self.doc = doc
        self.room = room
        self._parse = parse

    def get(self) -> T:
        """Return the parsed value, or the default if the variable is unset.

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
        """Set the variable for this process and its children; restore it on exit."""
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
        "offline Engine. An engine on a GPU loads with them, and serves with one.",
    )
    OMP_WAIT_POLICY = EnvVar(
        "OMP_WAIT_POLICY",
        "passive",
        str,
        "How OpenMP threads wait for each other when the model runs on the CPU; the "
        "default applies unless GOMP_SPINCOUNT is set. Spinning threads stall next to "
        "a busy process. The native kernels have their own threads.",
    )
    GOMP_SPINCOUNT = EnvVar(
        "GOMP_SPINCOUNT",
        "",
        str,
        "Replaces OMP_WAIT_POLICY for GNU OpenMP: how often its threads spin before "
        "they sleep.",
    )
    SGLANG_NATIVE_KERNELS = EnvVar(
        "SGLANG_NATIVE_KERNELS",
        True,
        _parse_bool,
        "Use the native CPU kernels if they are installed; 0 forces the torch "
        "reference.",
    )
    SGLANG_TEST_FULL = EnvVar(
        "SGLANG_TEST_FULL",
        False,
        _parse_bool,
        "Tests run their whole counts (make test-full) instead of the CI sample.",
    )
    SGLANG_TEST_KV_CANARY = EnvVar(
        "SGLANG_TEST_KV_CANARY",
        False,
        _parse_bool,
        "The test harnesses start every engine with --kv-canary raise and all bytes "
        "fingerprinted (run_suite.py --canary).",
    )
    # KV canary; read by `kv_canary.config` alone.
    SGLANG_KV_CANARY_RING_CAPACITY = EnvVar(
        "SGLANG_KV_CANARY_RING_CAPACITY",
        1024,
        int,
        "Number of violations that the device keeps between two results; further ones "
        "are only counted.",
    )
    SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS = EnvVar(
        "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS",
        100,
        int,
        "Forwards between two stats lines of the KV canary; 0: none. If it is not set, "
        "a minute must have passed, too.",
    )
    SGLANG_KV_CANARY_MAX_REPORT_FILES = EnvVar(
        "SGLANG_KV_CANARY_MAX_REPORT_FILES",
        1000,
        int,
        "Maximum number of incident files that one process writes to "
        "--kv-canary-report-dir; 0: no limit.",
    )
    SGLANG_KV_CANARY_SWEEP_BUDGET = EnvVar(
        "SGLANG_KV_CANARY_SWEEP_BUDGET",
        16384,
        int,
        "Maximum number of cached slots verified by one sweep pass.",
    )
    SGLANG_KV_CANARY_ROTATION_STEPS = EnvVar(
        "SGLANG_KV_CANARY_ROTATION_STEPS",
        128,
        int,
        "Number of forwards in which --kv-canary-real-data rotate re-hashes every slot "
        "it reads, unless it goes layer by layer.",
    )
    SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT = EnvVar(
        "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT",
        False,
        _parse_bool,
        "Compare the tokens and positions of decode forwards with the token oracle.",
    )
    SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT = EnvVar(
        "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT",
        False,
        _parse_bool,
        "Compare the token of every record that is read with the request's token "
        "table.",
    )
    SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE = EnvVar(
        "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE",
        False,
        _parse_bool,
        "Sample the tokens of the token oracle instead of the logits (tests).",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL = EnvVar(
        "SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL",
        0,
        int,
        "Launches between two lines kv_canary_swa_divergence={json}, which show that "
        "sliding windows are active; 0: none. Each waits for the device.",
    )
    SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB",
        0.0,
        float,
        "Fault injection: chance per forward that an entry of a live row is changed.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB",
        0.0,
        float,
        "Fault injection: chance per forward that KV bytes of a live slot are flipped.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB",
        0.0,
        float,
        "Fault injection: chance per forward that KV bytes of a slot that only the "
        "prefix cache holds are flipped.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB",
        0.0,
        float,
        "Fault injection: chance per forward that KV bytes are flipped after the "
        "write; the next read reports it.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB",
        0.0,
        float,
        "Fault injection: chance per forward that two requests get each other's token.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_TARGET_GROUP = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP",
        "full",
        str,
        "Group of slots to damage: full, or swa in a model with window slots.",
        room=FAULTS_ROOM,
    )
    SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS = EnvVar(
        "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS",
        50,
        int,
        "Forwards before the first injected fault.",
        room=FAULTS_ROOM,
    )
    SGLANG_DEBUG_REVERT_PR = EnvVar(
        "SGLANG_DEBUG_REVERT_PR",
        "",
        str,
        "Re-open a historical fault at its fault point (tests of the canary); refused "
        "if it cannot fire: see docs/kv_canary.md.",
        room=FAULTS_ROOM,
    )
    SGLANG_DISAGGREGATION_WAITING_TIMEOUT = EnvVar(
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        60.0,
        float,
        "Prefill and decode on different engines: seconds that a request waits for "
        "more of its KV before the decode engine computes it.",
    )
    SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL = EnvVar(
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
        1.0,
        float,
        "Prefill and decode on different engines: seconds between two signs of life. "
        "An engine that is silent for five of them is given up.",
    )
    SGLANG_SIMULATE_ACC_LEN = EnvVar(
        "SGLANG_SIMULATE_ACC_LEN",
        0.0,
        float,
        "Benchmarks of speculative decoding with --load-format dummy: accept this many "
        "tokens per verification on average, whatever the target predicts, with the KV "
        "canary off; 0: off.",
        room="sglang.faults.simulated_acceptance",
    )
    SGLANG_SIMULATE_ACC_RATE = EnvVar(
        "SGLANG_SIMULATE_ACC_RATE",
        0.0,
        float,
        "As SGLANG_SIMULATE_ACC_LEN, but for drafts of any shape: the probability that "
        "a chain's next token is accepted; trees are accepted more often; 0: off.",
        room="sglang.faults.simulated_acceptance",
    )


envs = Envs()


def set_variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the text of every set variable of `Envs` whose name has a given prefix."""
    known = (v for v in vars(Envs).values() if isinstance(v, EnvVar))
    return {
        v.name: os.environ[v.name]
        for v in known
        if v.name.startswith(prefixes) and v.is_set()
    }


@contextmanager
def only_variables(
    prefixes: tuple[str, ...], values: Mapping[str, str]
) -> Iterator[None]:
    """Scope in which exactly `values` are set among the variables of `Envs` with these
    prefixes.

    Raises:
        ValueError: `Envs` has no such variable, or its name has none of the prefixes.
    """
    known = {v.name for v in vars(Envs).values() if isinstance(v, EnvVar)}
    for name in values:
        if name not in known or not name.startswith(prefixes):
            raise ValueError(f"{name} is no variable of this version")
    before = set_variables(prefixes)
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def rooms_of_set_variables() -> list[str]:
    """Return the rooms of all set variables, in alphabetical order."""
    known = (v for v in vars(Envs).values() if isinstance(v, EnvVar))
    return sorted({v.room for v in known if v.room and v.is_set()})


def child_environment(**extra: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, updated by `extra`."""
    return {**os.environ, **extra}
