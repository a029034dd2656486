"""FlashInfer's wrappers in torch, for machines without a GPU: the same arguments, the
same static buffers read when they run, plans that must be made first.

It tests which plans are made, and when; the kernels themselves run on a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.model_executor import model_runner
from sglang.srt.speculative import (
    eagle_draft_cuda_graph_runner,
    eagle_draft_extend_cuda_graph_runner,
)
from sglang.test.recording_backend import RecordingBackend

_PACKAGE = "sglang.srt.layers.attention"
_MODULES = ("flashinfer_backend", "flashinfer_draft", "flashinfer_wrappers")
_wrappers: dict[int, Any] = {}


@torch.library.custom_op("flashinfer_stand_in::run", mutates_args=("out",))
def _run(wrapper: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """One operator, so that a recorded graph holds the call and not its work."""
    _wrappers[wrapper].attend(q, k, v, out)


class _Wrapper:
    has_graph: bool
    indptr: Tensor
    indices: Tensor
    last: Tensor
    window: int

    def _keep(
        self,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert indptr.device.type == "cpu" and indptr.dtype is torch.int32
        self.page_size, self.scale = page_size, options["sm_scale"]
        self.window = options["window_left"]
        self.planned = indptr.clone()
        if not self.has_graph:
            self.indptr, self.indices, self.last = indptr.clone(), indices, last.clone()
            return
        assert len(last) == len(self.last) and len(indptr) == len(self.indptr)
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.indices[: len(indices)].copy_(indices)

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        """Nothing: it needs no memory."""

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        _wrappers[id(self)] = self
        _run(id(self), q, *pages, out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        # Blocks were laid out by the plan, whatever the device holds now.
        assert torch.equal(self.indptr, self.planned)
        begin = 0
        for row, count in enumerate(self.new_tokens()):
            first, end = self.indptr[row].item(), self.indptr[row + 1].item()
            length = (end - first - 1) * self.page_size + self.last[row].item()
            element = torch.arange(length)
            page = self.indices[first:end].long()[element // self.page_size]
            at = page, element % self.page_size
            allowed = self.allowed(row, count, length)
            rows = slice(begin, begin + count)
            out[rows] = _attention(q[rows], k[at], v[at], allowed, self.scale)
            begin += count
        assert begin == len(q)

    def new_tokens(self) -> list[int]:
        return [1] * len(self.last)

    def allowed(self, row: int, count: int, length: int) -> Tensor:
        """[count, length] bool: causal, in the window."""
        own = torch.arange(count)[:, None] + length - count
        element = torch.arange(length)
        inside = element <= own
        return inside & (element >= own - self.window) if self.window >= 0 else inside


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        **static: Tensor,
    ) -> None:
        self.has_graph = use_cuda_graph
        if use_cuda_graph:
            self.indptr = static["paged_kv_indptr_buffer"]
            self.indices = static["paged_kv_indices_buffer"]
            self.last = static["paged_kv_last_page_len_buffer"]

    def plan(self, *args: Any, **options: Any) -> None:
        self._keep(*args, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        **static: Tensor,
    ) -> None:
        self.has_graph = use_cuda_graph
        self.mask, self.mask_indptr = custom_mask_buf, mask_indptr_buf
        if use_cuda_graph:
            self.qo_indptr = static["qo_indptr_buf"]
            self.indptr = static["paged_kv_indptr_buf"]
            self.indices = static["paged_kv_indices_buf"]
            self.last = static["paged_kv_last_page_len_buf"]

    def plan(
        self,
        qo_indptr: Tensor,
        *args: Any,
        causal: bool,
        max_token_per_sequence: int | None = None,
        **options: Any,
    ) -> None:
        assert causal
        self._keep(*args, **options)
        if self.has_graph:
            self.qo_indptr.copy_(qo_indptr)
        else:
            self.qo_indptr = qo_indptr.clone()

    def new_tokens(self) -> list[int]:
        return [int(n) for n in self.qo_indptr.diff()]

    def allowed(self, row: int, count: int, length: int) -> Tensor:
        if self.mask is None or self.mask_indptr is None:
            return super().allowed(row, count, length)
        begin, end = self.mask_indptr[row].item(), self.mask_indptr[row + 1].item()
        packed = self.mask[begin:end].long()
        bits = (packed[:, None] >> torch.arange(8)) & 1
        return bits.flatten()[: count * length].view(count, length).bool()


class BatchPrefillWithRaggedKVCacheWrapper:
    """For Hopper alone, which the stand-in is not."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)


class _Event:
    """Nothing is copied after the call."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record(self) -> None:
        """Nothing to mark."""


def _module() -> ModuleType:
    module = ModuleType("flashinfer")
    for wrapper in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    ):
        setattr(module, wrapper.__name__, wrapper)
    return module


@contextmanager
def stand_in() -> Iterator[None]:
    """The FlashInfer backend on the CPU, its graphs recorded, while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", _module())
        for name in _MODULES:
            patch.delitem(sys.modules, f"{_PACKAGE}.{name}", raising=False)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        able = dataclasses.replace(
            ATTENTION_BACKENDS["flashinfer"], devices=frozenset({"cpu"})
        )
        patch.setitem(ATTENTION_BACKENDS, "flashinfer", able)
        for runners in (
            model_runner,
            eagle_draft_cuda_graph_runner,
            eagle_draft_extend_cuda_graph_runner,
        ):
            patch.setattr(runners, "cuda_graph_backend", RecordingBackend)
        yield
        for name in _MODULES:
            sys.modules.pop(f"{_PACKAGE}.{name}", None)
