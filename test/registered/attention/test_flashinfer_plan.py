"""Inputs of FlashInfer plans, and the refusal where the package is missing."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

from sglang.srt.forward.batch import CaptureHiddenMode, HostLens
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.attention.flashinfer_plan import (
    LayerShape,
    host_plan,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.input_buffers import GraphInputBuffers
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")


def batch_of(prefix_lens: list[int], extend_lens: list[int], *, rows: int):
    lens = HostLens(prefix_lens=prefix_lens, extend_lens=extend_lens)
    buffers = GraphInputBuffers(max_rows=8, device="cpu")
    return buffers.static_batch(rows, CaptureHiddenMode.NULL, lens_cpu=lens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_offsets_describe_every_element(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    prefix, new = rng.integers(0, 70, 8).tolist(), rng.integers(1, 9, 8).tolist()
    plan = host_plan(
        batch_of(prefix, new, rows=8), page_size=page_size, pin_memory=False
    )
    pages = plan.kv_indptr.diff()
    elements = (pages - 1) * page_size + plan.last_page_lens
    assert elements.tolist() == [a + b for a, b in zip(prefix, new, strict=True)]
    assert int(plan.last_page_lens.min()) >= 1
    assert int(plan.last_page_lens.max()) <= page_size
    assert plan.qo_indptr.diff().tolist() == new
    assert plan.new_tokens == sum(new)
    assert (plan.max_pages, plan.total_pages) == (int(pages.max()), int(pages.sum()))
    assert plan.has_prefix == any(prefix)
    for tensor in (plan.qo_indptr, plan.kv_indptr, plan.last_page_lens):
        assert tensor.dtype == torch.int32


def test_padded_rows_of_a_graph_read_one_element() -> None:
    plan = host_plan(batch_of([20], [1], rows=4), page_size=4, pin_memory=False)
    assert plan.kv_indptr.tolist() == [0, 6, 7, 8, 9]
    assert plan.last_page_lens.tolist() == [1, 1, 1, 1]
    assert plan.qo_indptr.tolist() == [0, 1, 2, 3, 4]


def test_a_batch_without_host_lengths_is_refused() -> None:
    buffers = GraphInputBuffers(max_rows=2, device="cpu")
    batch = buffers.static_batch(2, CaptureHiddenMode.NULL)
    with pytest.raises(RuntimeError, match="needs_cpu_seq_lens"):
        host_plan(batch, page_size=1, pin_memory=False)


def test_masks_of_trees_start_at_bytes() -> None:
    batch = batch_of([5, 0, 2], [3, 3, 3], rows=3)
    plain = host_plan(batch, page_size=4, pin_memory=False)
    assert (plain.max_mask_bytes, plain.total_mask_bytes) == (0, 0)
    trees = dataclasses.replace(batch, tree_mask=torch.zeros(3, 3, 3).bool())
    plan = host_plan(trees, page_size=4, pin_memory=False)
    # 3 x 8, 3 x 3 and 3 x 5 bits.
    assert plan.mask_indptr.tolist() == [0, 3, 5, 7]
    assert (plan.max_mask_bytes, plan.total_mask_bytes) == (3, 7)
    assert (plan.rows, plan.tokens_per_row) == (3, 3)


def test_a_window_counts_the_elements_before_the_own() -> None:
    shape = LayerShape(q_heads=8, kv_heads=2, head_dim=64, scaling=1.0, window=50)
    assert (shape.window_left, shape.uses_tensor_cores) == (49, True)
    shape = LayerShape(q_heads=4, kv_heads=2, head_dim=64, scaling=1.0, window=-1)
    assert (shape.window_left, shape.uses_tensor_cores) == (-1, False)


def test_the_workspace_grows_with_rows() -> None:
    shape = LayerShape(q_heads=32, kv_heads=8, head_dim=128, scaling=1.0, window=-1)
    assert shape.workspace_bytes(1) == 128 << 20
    # 1024 rows: 256 tiles of packed queries, and one more for each row.
    assert shape.workspace_bytes(1024) >= 32 * 1280 * 16 * 129 * 4
    # 48 trees of 64 nodes: 96 tiles of 128 packed queries, and one more for each row
    # but one.
    assert shape.extend_workspace_bytes(48, 64) >= 32 * 143 * 128 * 129 * 4
    assert shape.extend_workspace_bytes(1, 4) == 128 << 20


def test_a_missing_package_names_the_flag_and_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name in ("flashinfer_backend", "flashinfer_draft", "flashinfer_wrappers"):
        monkeypatch.delitem(
            sys.modules, f"sglang.srt.layers.attention.{name}", raising=False
        )
    rows = ReqToTokenPool(size=2, row_width=8, device="cpu", context_len=8)
    pool = MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.bfloat16,
        layer_num=1,
        head_num=1,
        head_dim=64,
        device="cpu",
    )
    with pytest.raises(ValueError, match=r"flashinfer.*sglang-canary\[flashinfer\]"):
        create_attention_backend("flashinfer", req_to_token_pool=rows, kv_pool=pool)


def test_padding_keeps_the_lengths_of_live_rows() -> None:
    lens = HostLens(prefix_lens=[9, 4], extend_lens=[1, 3])
    padded = lens.padded(4, prefix_len=0, extend_len=2)
    assert padded.prefix_lens == [9, 4, 0, 0]
    assert padded.extend_lens == [1, 3, 2, 2]
    assert lens.padded(2, prefix_len=0, extend_len=2) == lens


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
