"""Loads and unloads adapters at run time, on all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang.srt.managers.messages.io_struct import LoadLoraReq, LoraRef, LoraRsp
from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.lora.adapters import Adapters
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import GenerateReq, UnloadLoraReq

NO_LORA = "adapters need a server started with --enable-lora"


class _Outcome(msgspec.Struct):
    """What loading an adapter led to on one rank."""

    revision: str = ""
    error: str = ""


class LoraControl:
    """Answers the questions about adapters.

    Args:
        adapters: this rank's, or None without --enable-lora.
        requests: the unfinished requests.
        send: sends the answers.
    """

    def __init__(
        self,
        adapters: Adapters | None,
        *,
        requests: Callable[[], Iterable[Req]],
        group: TensorParallelGroup,
        send: Callable[[LoraRsp], None],
    ) -> None:
        self._adapters = adapters
        self._requests = requests
        self._group = group
        self._send = send

    @property
    def loaded(self) -> list[LoraRef]:
        return [] if self._adapters is None else self._adapters.loaded

    def check(self, request: GenerateReq) -> None:
        """
        Raises:
            ValueError: the request's adapter is not loaded.
        """
        if request.lora is None:
            return
        if self._adapters is None:
            raise ValueError(NO_LORA)
        self._adapters.check(request.lora)

    def handle(self, message: LoadLoraReq | UnloadLoraReq) -> None:
        """Load or unload as `message` asks, and answer."""
        answer = LoraRsp(call_id=message.call_id)
        try:
            if self._adapters is None:
                raise ValueError(NO_LORA)
            if isinstance(message, LoadLoraReq):
                answer.lora = self._load(self._adapters, message)
            else:
                self._unload(self._adapters, message.name)
        except ValueError as error:
            answer.error = str(error)
        self._send(answer)

    def _load(self, adapters: Adapters, message: LoadLoraReq) -> LoraRef:
        """Load an adapter on all ranks or on none, because another rank may not be able
        to read the file, or may read another one."""
        ref: LoraRef | None = None
        own = _Outcome()
        try:
            ref = adapters.load(message.name, message.path)
            own.revision = ref.revision
        except ValueError as error:
            own.error = str(error)
        every = [
            msgspec.msgpack.decode(outcome, type=_Outcome)
            for outcome in self._group.all_gather_bytes(msgspec.msgpack.encode(own))
        ]
        errors = [outcome.error for outcome in every if outcome.error]
        is_same = len({outcome.revision for outcome in every}) == 1
        if ref is not None and not errors and is_same:
            return ref
        if ref is not None:
            adapters.unload(message.name)
        raise ValueError(
            errors[0] if errors else f"{message.path} changed while it was read"
        )

    def _unload(self, adapters: Adapters, name: str) -> None:
        revisions = {ref.revision for ref in adapters.loaded if ref.name == name}
        users = sum(req.adapter in revisions for req in self._requests())
        if users:
            raise ValueError(
                f"{users} request(s) use the adapter {quoted(name)}; wait for them"
            )
        adapters.unload(name)
