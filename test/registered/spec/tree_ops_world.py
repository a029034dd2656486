"""Implementations of the tree and slot ops under one name, and random inputs."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_canary.op import Op, native_available
from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.tree import op as tree
from sglang.srt.draft_trees.ops.verify import op as verify
from sglang.srt.mem_cache.ops.branch_slots import op as branch_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE, TRITON = "native", "triton"
_MODULES = (tree, verify, branch_slots)


def kernels() -> list[Any]:
    """Parameters for the implementations that are compared with the references."""
    missing = DEVICE == "cuda" or not native_available()
    skipped = pytest.mark.skipif(missing, reason="no native CPU kernels here")
    return [pytest.param(NATIVE, marks=skipped), TRITON]


def _find(name: str) -> Op[..., None]:
    return next(getattr(m, name) for m in _MODULES if hasattr(m, name))


def op(name: str, implementation: str) -> Callable[..., None]:
    """The op `name` as `implementation` does it."""
    found = _find(name)
    if implementation == TRITON:
        pytest.importorskip("triton")
        return pkgutil.resolve_name(found.triton)
    return found


def reference(name: str) -> Callable[..., None]:
    """The torch reference of the op `name`."""
    return _find(name).reference


def assert_same(got: Any, wanted: Any, *names: str) -> None:
    """Every field of two buffers (or the named ones) is equal, NaN to NaN."""
    for name in names or [f.name for f in fields(wanted)]:
        left, right = getattr(got, name), getattr(wanted, name)
        assert left.dtype == right.dtype, name
        same = torch.equal(left, right)
        if left.is_floating_point():
            same = torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
        assert same, f"{name}:\n{left}\n{right}"


def garbage(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Memory that an op must overwrite: contents that are wrong everywhere."""
    if dtype is torch.bool:
        return torch.randint(0, 2, size, device=DEVICE).bool()
    return torch.full(size, -77, dtype=dtype, device=DEVICE)


def dirty(buffers: Any) -> Any:
    """Buffers as if used before."""
    parts = {
        f.name: garbage(*getattr(buffers, f.name).shape, dtype=x.dtype)
        for f in fields(buffers)
        for x in [getattr(buffers, f.name)]
    }
    return type(buffers)(**parts)


def new_levels(rows: int, shape: TreeShape) -> DraftLevels:
    return dirty(DraftLevels.allocate(rows, shape, device=DEVICE))


def new_tree(rows: int, shape: TreeShape) -> DraftTree:
    return dirty(DraftTree.allocate(rows, shape, device=DEVICE))


def new_result(rows: int, shape: TreeShape) -> VerifyResult:
    return dirty(VerifyResult.allocate(rows, shape, device=DEVICE))


def proposals(
    rows: int, shape: TreeShape, vocab: int, *, coarse: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per level (topk_p, topk_index) with falling probabilities; coarse ones tie."""
    for level in range(shape.num_steps):
        n = rows if level == 0 else rows * shape.topk
        p = torch.rand(n, shape.topk, device=DEVICE)
        if coarse:
            p = (p * 4).ceil() / 4
        ids = torch.rand(n, vocab, device=DEVICE).argsort(dim=-1)[:, : shape.topk]
        yield p.sort(dim=-1, descending=True).values, ids.contiguous()


def random_levels(
    rows: int, shape: TreeShape, *, vocab: int = 50, coarse: bool = False
) -> DraftLevels:
    """Levels filled by the reference."""
    levels = new_levels(rows, shape)
    for level, (p, ids) in enumerate(proposals(rows, shape, vocab, coarse=coarse)):
        tree.select_top_k_ref(
            level,
            shape=shape,
            topk_p=p,
            topk_index=ids,
            hot_token_id=None,
            levels=levels,
            input_ids=garbage(rows * shape.topk),
            hidden_rows=garbage(rows * shape.topk),
        )
    return levels


def random_tree(
    rows: int, shape: TreeShape, *, vocab: int = 50, coarse: bool = False
) -> DraftTree:
    """Trees built by the reference from random levels."""
    built = new_tree(rows, shape)
    tree.build_tree_ref(
        random_levels(rows, shape, vocab=vocab, coarse=coarse),
        shape=shape,
        root_tokens=torch.randint(0, vocab, (rows,), device=DEVICE),
        seq_lens=torch.randint(1, 100, (rows,), device=DEVICE),
        tree=built,
    )
    return built
