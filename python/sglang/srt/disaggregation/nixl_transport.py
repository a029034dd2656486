"""Units over NIXL: the receiver reads them from the sender's memory.

A sender that wrote to landing memory could still do so after it was given up: UCX on
the loopback writes to memory whose registration is gone (docs/adr/0046). So the
receiver reads, and knows when its own reads have ended.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.tiers_hook import NIXL_MODULES
from sglang.srt.disaggregation.link import LinkLost

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.disaggregation.link import Link
    from sglang.srt.disaggregation.messages import Unit

_FLAG = "--disaggregation-transfer-backend nixl"
_POLL_SECONDS = 20e-6
# A unit that takes longer does not come.
_READ_SECONDS = 5.0


def _create_agent() -> Any:
    """Create an agent of this process.

    Raises:
        ValueError: NIXL is not installed or does not start; names the flag.
    """
    for name in NIXL_MODULES:
        try:
            nixl = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        config = nixl.nixl_agent_config(
            backends=["UCX"], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            return nixl.nixl_agent(uuid.uuid4().hex, config)
        except Exception as error:
            raise ValueError(f"{_FLAG}: NIXL does not start: {error}") from error
    raise ValueError(
        f"{_FLAG} needs NIXL: pip install 'sglang-canary[nixl]', or use "
        "--disaggregation-transfer-backend tcp"
    )


def _register(agent: Any, memory: Tensor) -> Any:
    return agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], "DRAM")


class NixlOutlet:
    """Lets receivers read `memories`."""

    waits_for_taken = True

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self._agent = _create_agent()
        self._memories = [
            (memory, _register(self._agent, memory)) for memory in memories
        ]
        self._description: bytes = self._agent.get_agent_metadata()

    def describe(self) -> bytes:
        return self._description

    def send(
        self, link: Link[Any], unit: Unit, data: Tensor, on_sent: Callable[[], None]
    ) -> None:
        unit.address = data.data_ptr()
        link.send(unit)


class NixlInlet:
    """Reads units to `memory`."""

    def __init__(self, memory: Tensor) -> None:
        self._agent = _create_agent()
        self._memory = memory, _register(self._agent, memory)

    def connect(self, description: bytes) -> NixlWire:
        try:
            return NixlWire(self._agent, self._agent.add_remote_agent(description))
        except Exception as error:
            raise ValueError(f"no agent of NIXL: {error}") from error


class NixlWire:
    """Reads from the memory of one sender."""

    def __init__(self, agent: Any, remote: str | bytes) -> None:
        self._agent = agent
        self._remote = remote.decode() if isinstance(remote, bytes) else remote
        # A read that did not end: what it reads to stays out of use.
        self._stuck: Any = None

    def fetch(self, link: Link[Any], unit: Unit, target: Tensor) -> None:
        agent = self._agent
        try:
            own = agent.get_xfer_descs([(target.data_ptr(), unit.size, 0)], "DRAM")
            there = agent.get_xfer_descs([(unit.address, unit.size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", own, there, self._remote)
            state = agent.transfer(handle)
        except Exception as error:
            raise LinkLost(f"{link.peer}: NIXL cannot read: {error}") from error
        until = time.monotonic() + _READ_SECONDS
        while state == "PROC" and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            state = self._state(handle)
        if state == "PROC":
            self._stuck = handle
        else:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise LinkLost(f"{link.peer}: NIXL's read ended as {state}")

    def skip(self, link: Link[Any], unit: Unit) -> None:
        """Do nothing: nothing is on its way."""

    def close(self) -> bool:
        if self._stuck is not None:
            # A handle that is released before its read has ended is still written
            # through: when a stopped sender goes on (docs/LOG.md).
            if self._state(self._stuck) == "PROC":
                return False
            self._agent.release_xfer_handle(self._stuck)
            self._stuck = None
        self._agent.remove_remote_agent(self._remote)
        return True

    def _state(self, handle: Any) -> str:
        """Return the state of a read; PROC until it has ended."""
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception as error:  # NIXL's errors have no common class.
            return f"ERR ({error})"
        return state
