"""A connector for self-tests: full blocks in this process's memory, found by their
hash. vLLM imports this module by the configuration of `host.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_BASE: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.base"
)

Copy = tuple[Any, int]
"""(hash, block)."""


@dataclass
class _Message(_BASE.KVConnectorMetadata):  # type: ignore[misc]
    """Fields: stores, loads: of this step. waiting: requests whose loads these are, if
    they only run when it has ended."""

    stores: list[Copy] = field(default_factory=list)
    loads: list[Copy] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)


BLOCKS: dict[Any, list[Tensor]] = {}
"""What is stored: by hash, a block of each layer."""


class BlockStore(_BASE.KVConnectorBase_V1):  # type: ignore[misc]
    """`kv_connector_extra_config` may have `ahead`: whether requests wait until their
    loads have ended, as vLLM calls asynchronous."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = int(vllm_config.cache_config.block_size)
        self._num_blocks = int(kv_cache_config.num_blocks)
        transfer = vllm_config.kv_transfer_config
        self._is_ahead = bool(transfer.get_from_extra_config("ahead", False))
        self._next = _Message()
        self._begins: dict[str, int] = {}
        self._layers: list[Tensor] = []
        self._ended: set[str] = set()

    # -- scheduler -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        # vLLM computes the last token again after a load that ended ahead.
        most = (request.num_tokens - (not self._is_ahead)) // self._size
        begin = end = num_computed_tokens // self._size
        self._begins[request.request_id] = begin
        while end < most and request.block_hashes[end] in BLOCKS:
            end += 1
        return (end - begin) * self._size, self._is_ahead and end > begin

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        count = num_external_tokens // self._size
        if not count:
            return
        (numbers, *_) = blocks.get_block_ids()
        begin = self._begins[request.request_id]
        hashes = request.block_hashes[begin : begin + count]
        self._next.loads += zip(hashes, numbers[begin : begin + count], strict=True)
        if self._is_ahead:
            self._next.waiting.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> _Message:
        message, self._next = self._next, _Message()
        return message

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._begins.pop(request.request_id, None)
        full = min(request.num_computed_tokens // self._size, len(block_ids))
        pairs = zip(request.block_hashes[:full], block_ids, strict=False)
        self._next.stores += [pair for pair in pairs if pair[0] not in BLOCKS]
        return False, None

    # -- worker --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._layers = list(kv_caches.values())

    def bind_connector_metadata(self, connector_metadata: _Message) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Blocks that were freed in the last step may be written by this step's forward,
        # and `start_load_kv` may come after it.
        for key, block in connector_metadata.stores:
            BLOCKS[key] = [
                self._block(layer, block).clone(memory_format=torch.contiguous_format)
                for layer in self._layers
            ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        message = self._get_connector_metadata()
        for key, block in message.loads:
            for layer, stored in zip(self._layers, BLOCKS[key], strict=False):
                self._block(layer, block).copy_(stored)
        self._ended |= message.waiting

    def _block(self, layer: Tensor, block: int) -> Tensor:
        axis = next(i for i, size in enumerate(layer.shape) if size == self._num_blocks)
        return layer.select(axis, block)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        ended, self._ended = self._ended, set()
        return None, ended

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return
