"""Names of adapters, and the requests that may still use them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.errors import BadRequest, NotFound
from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.managers.messages.io_struct import LoraRef

_SEPARATOR = ":"


class LoraRegistry:
    """The loaded adapters by name.

    Args:
        is_on: whether the server was started with --enable-lora.
        model_name: name of the base model.
    """

    def __init__(self, *, is_on: bool, model_name: str) -> None:
        self._is_on = is_on
        self._model_name = model_name
        self._loaded: dict[str, LoraRef] = {}
        # Accept no new requests.
        self._leaving: set[str] = set()

    @property
    def loaded(self) -> list[LoraRef]:
        """The adapters that accept requests."""
        return [r for name, r in self._loaded.items() if name not in self._leaving]

    def add(self, refs: Iterable[LoraRef]) -> None:
        self._loaded.update((ref.name, ref) for ref in refs)

    def remove(self, name: str) -> None:
        self._loaded.pop(name, None)

    def resolve(self, name: str | None) -> LoraRef | None:
        """Return an adapter that accepts requests, or None for no name.

        Raises:
            BadRequest: there is none of this name.
        """
        if not name:
            return None
        if not self._is_on:
            raise BadRequest(
                f"lora_path is {quoted(name)}, but this server has no adapters; it "
                "needs --enable-lora",
                param="lora_path",
            )
        ref = self._loaded.get(name)
        if ref is None or name in self._leaving:
            raise BadRequest(
                f"no adapter {quoted(name)} is loaded; /v1/models lists the adapters",
                param="lora_path",
            )
        return ref

    def of_model(self, model: str | None) -> str | None:
        """Return the adapter that a model's name asks for, or None for the base model
        and for other models' names: `base:adapter`, or the adapter's name alone.

        Raises:
            NotFound: the base model is this server's, and has no such adapter.
        """
        if model is None or model == self._model_name:
            return None
        if model in self._loaded:
            return model
        base, _, adapter = model.partition(_SEPARATOR)
        if model.startswith(f"{self._model_name}{_SEPARATOR}"):
            base = self._model_name
            adapter = model[len(base) + 1 :]
        if adapter in self._loaded:
            return adapter
        if base == self._model_name:
            raise NotFound(
                f"the model {quoted(base)} has no adapter {quoted(adapter)} here; "
                "/v1/models lists the adapters",
                param="model",
                code="model_not_found",
            )
        return None

    def asked(self, model: str | None, path: str | None) -> str | None:
        """Return the adapter that a request asks for by its model or its `lora_path`.

        Raises:
            ApiError: they contradict each other, or there is no such adapter.
        """
        named = self.of_model(model)
        if named and path and named != path:
            raise BadRequest(
                f"model asks for the adapter {quoted(named)} and lora_path for "
                f"{quoted(path)}; leave one of them out",
                param="lora_path",
            )
        return named or path or None

    @contextmanager
    def leaving(self, name: str) -> Iterator[LoraRef]:
        """Scope in which an adapter accepts no new requests; afterwards it does again,
        unless it was removed.

        Raises:
            BadRequest: it is not loaded, or already leaving.
        """
        ref = self.resolve(name)
        if ref is None:
            raise BadRequest("lora_name is missing", param="lora_name")
        self._leaving.add(name)
        try:
            yield ref
        finally:
            self._leaving.discard(name)
