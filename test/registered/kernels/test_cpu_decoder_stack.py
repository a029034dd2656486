"""A whole stack as one operator equals its ops called one by one, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.attention import op as attention
from sglang.srt.layers.ops.decoder_stack import (
    StackLayer,
    StackPlan,
    StackRun,
    StackSizes,
    run_stack,
)
from sglang.srt.layers.ops.linear.op import linear, pack_weight
from sglang.srt.layers.ops.norm import op as norm
from sglang.srt.layers.ops.rope import op as rope
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
LAYERS, SLOTS, POSITIONS, EPS = 3, 96, 400, 1e-5


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    hidden: int = 100
    inner: int = 37
    exact: bool = True
    bias: bool = False
    qk_norm: bool = False
    rotary_dim: int | None = 64
    activation: str = "silu"
    # A draft head's: what its first layer is given, and whether it ends with a norm.
    first: int = 0
    final_norm: bool = True


SHAPES = {
    "plain": Shape(),
    "float32 weights": Shape(exact=False, heads=(5, 1), hidden=33),
    "biases": Shape(bias=True, heads=(4, 4), inner=64),
    "head norms": Shape(qk_norm=True, head_dim=128, heads=(6, 2), rotary_dim=128),
    "part of a head turns": Shape(rotary_dim=24, activation="gelu_pytorch_tanh"),
    "nothing turns": Shape(rotary_dim=None, head_dim=8, heads=(2, 1), inner=1),
    "a head that reads a pair": Shape(first=200),
    "a head without norms": Shape(first=100, final_norm=False),
}


class Stack:
    """Random weights, the ops over them, and the operator."""

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        self.shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        turned = shape.rotary_dim
        self._cos_sin = None if turned is None else self.random(POSITIONS, turned)
        self.layers = [self._layer(shape.first)]
        self.layers += [self._layer() for _ in range(LAYERS - 1)]
        self.final_norm = self.random(shape.hidden) if shape.final_norm else None
        self.sizes = StackSizes(
            num_heads=shape.heads[0],
            num_kv_heads=shape.heads[1],
            head_dim=shape.head_dim,
            hidden=shape.hidden,
            inner=shape.inner,
            activation=shape.activation,
            eps=EPS,
            scale=shape.head_dim**-0.5,
            first=shape.first,
        )
        self.plan = StackPlan(self.layers, self.final_norm, self.sizes)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)

    def _product(self, n: int, k: int) -> Any:
        weight = self.random(n, k) / k**0.5
        return pack_weight(weight.bfloat16().float() if self.shape.exact else weight)

    def _layer(self, first: int = 0) -> StackLayer:
        s = self.shape
        q, kv = (count * s.head_dim for count in s.heads)

        def bias(n: int) -> Tensor | None:
            return self.random(n) if s.bias else None

        def head_norm() -> Tensor | None:
            return self.random(s.head_dim) if s.qk_norm else None

        return StackLayer(
            input_norm=None if first else self.random(s.hidden),
            qkv=self._product(q + 2 * kv, first or s.hidden),
            qkv_bias=bias(q + 2 * kv),
            cos_sin_cache=self._cos_sin,
            q_norm=head_norm(),
            k_norm=head_norm(),
            o=self._product(s.hidden, q),
            o_bias=bias(s.hidden),
            post_norm=self.random(s.hidden),
            gate_up=self._product(2 * s.inner, s.hidden),
            gate_up_bias=bias(2 * s.inner),
            down=self._product(s.hidden, s.inner),
            down_bias=bias(s.hidden),
        )

    def pool(self, slots: int = SLOTS) -> list[Tensor]:
        """K or V of each layer, filled."""
        shape = (slots, self.shape.heads[1], self.shape.head_dim)
        return [self.random(*shape) for _ in range(LAYERS)]

    def first(self, x: Tensor) -> Tensor | None:
        """Input of the first layer beside x [T, H]; None: the normalised stream."""
        pairs = torch.cat((x, self.random(*x.shape)), dim=-1)
        return pairs[:, : self.shape.first].contiguous() if self.shape.first else None

    def by_ops(self, x: Tensor, call: dict[str, Any]) -> StackRun:
        """The reference: every op of every layer by itself."""
        residual, streams = x, []
        for i, layer in enumerate(self.layers):
            if i > 0:
                assert layer.input_norm is not None
                norm.fused_add_rmsnorm(x, residual, layer.input_norm, EPS)
            elif layer.input_norm is None:
                x = call["first"]
            else:
                x = norm.rmsnorm(x, layer.input_norm, EPS)
            streams.append(residual.clone())
            heads = self._attention(i, linear(x, layer.qkv, layer.qkv_bias), call)
            x = linear(heads, layer.o, layer.o_bias)
            norm.fused_add_rmsnorm(x, residual, layer.post_norm, EPS)
            both = linear(x, layer.gate_up, layer.gate_up_bias)
            inner = GATED[self.shape.activation](both)
            x = linear(inner, layer.down, layer.down_bias)
        if self.final_norm is None:
            x = residual.add_(x).clone()
        else:
            norm.fused_add_rmsnorm(x, residual, self.final_norm, EPS)
        streams.append(residual.clone())
        beside = [streams[i] for i in call["captured"]]
        return StackRun(x, [torch.cat(beside, dim=-1)] if beside else [])

    def _attention(self, i: int, qkv: Tensor, call: dict[str, Any]) -> Tensor:
        s, layer = self.shape, self.layers[i]
        q_heads, kv_heads = s.heads
        parts = qkv.view(len(qkv), -1, s.head_dim)
        q, k, v = parts.split([q_heads, kv_heads, kv_heads], dim=1)
        k_cache, v_cache = call["k_caches"][i], call["v_caches"][i]
        rope.rope_store_kv(
            q,
            k,
            v,
            positions=call["positions"],
            cos_sin_cache=layer.cos_sin_cache,
            k_cache=k_cache,
            v_cache=v_cache,
            out_cache_loc=call["out_cache_loc"],
            q_norm_weight=layer.q_norm,
            k_norm_weight=layer.k_norm,
            eps=EPS,
        )
        out = torch.empty(len(qkv), q_heads, s.head_dim)
        common = {name: call[name] for name in ("page_table", "row_index", "page_size")}
        common |= {"sm_scale": self.sizes.scale, "out": out}
        if call["read_lens"] is not None:
            read = call["read_lens"]
            attention.decode_attention(q, k_cache, v_cache, read_lens=read, **common)
        else:
            names = ("qo_indptr", "prefix_lens", "tree_mask")
            extend = {name: call[name] for name in names}
            attention.extend_attention(q, k_cache, v_cache, **extend, **common)
        return out.view(len(qkv), -1)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a batch with their prefixes and new tokens, in shuffled pages."""

    prefix_lens: list[int]
    new: list[int]
    page_size: int = 1
    is_decode: bool = False
    tree_mask: Tensor | None = None
    seed: int = field(default=1)

    def call(self, stack: Stack) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        totals = [a + b for a, b in zip(self.prefix_lens, self.new, strict=True)]
        pages = -(-max(totals) // self.page_size)
        count = len(totals) * pages
        order = torch.randperm(count, generator=generator) * self.page_size
        table = order.view(len(totals), pages).int()
        row_index = torch.randperm(len(totals), generator=generator)
        positions, slots = [], []
        for row, (prefix, total) in enumerate(
            zip(self.prefix_lens, totals, strict=True)
        ):
            element = torch.arange(prefix, total)
            first = table[row_index[row], element // self.page_size].long()
            slots.append(first + element % self.page_size)
            positions.append(element)
        offsets = torch.tensor([0, *self.new]).cumsum(0)
        prefix_lens = torch.tensor(self.prefix_lens)
        return {
            "k_caches": stack.pool(count * self.page_size),
            "v_caches": stack.pool(count * self.page_size),
            "positions": torch.cat(positions),
            "out_cache_loc": torch.cat(slots),
            "page_table": table,
            "row_index": row_index,
            "read_lens": torch.tensor(totals) if self.is_decode else None,
            "prefix_lens": None if self.is_decode else prefix_lens,
            "qo_indptr": None if self.is_decode else offsets,
            "tree_mask": self.tree_mask,
            "page_size": self.page_size,
        }


TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
BATCHES = {
    "decode of one": Rows(prefix_lens=[300], new=[1], is_decode=True),
    "decode": Rows(prefix_lens=[0, 7, 30], new=[1] * 3, page_size=4, is_decode=True),
    "extend": Rows(prefix_lens=[0, 20, 3], new=[5, 1, 17], page_size=16),
    "tree": Rows(prefix_lens=[9, 2], new=[3, 3], tree_mask=TREE.repeat(2, 1, 1)),
}


def copied(call: dict[str, Any]) -> dict[str, Any]:
    caches = ("k_caches", "v_caches")
    return call | {name: [t.clone() for t in call[name]] for name in caches}


def assert_equal_by_ops(
    stack: Stack, rows: Rows, captured: tuple[int, ...] = (0, 2, 3)
) -> None:
    call = rows.call(stack)
    x = stack.random(len(call["positions"]), stack.shape.hidden)
    call |= {"first": stack.first(x), "captured": captured}
    expected_call, expected_x = copied(call), x.clone()
    actual = run_stack(stack.plan, x, **call)
    expected = stack.by_ops(expected_x, expected_call)
    assert bool(expected.hidden.isfinite().all())
    assert torch.equal(actual.hidden, expected.hidden)
    assert torch.equal(x, expected_x)
    assert len(actual.captured) == len(expected.captured)
    for ours, theirs in zip(actual.captured, expected.captured, strict=True):
        assert torch.equal(ours, theirs)
    for name in ("k_caches", "v_caches"):
        for ours, theirs in zip(call[name], expected_call[name], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_equals_its_ops(shape: str, batch: str) -> None:
    assert_equal_by_ops(Stack(SHAPES[shape]), BATCHES[batch])


@pytest.mark.parametrize("captured", [(), (0,), (1, 2), (LAYERS,), (0, 1, 2, 3)])
def test_inputs_of_layers(captured: tuple[int, ...]) -> None:
    assert_equal_by_ops(Stack(SHAPES["plain"]), BATCHES["extend"], captured)


def test_a_first_layer_that_is_given_the_stream_itself() -> None:
    stack = Stack(SHAPES["a head without norms"])
    call = BATCHES["tree"].call(stack)
    x = stack.random(len(call["positions"]), 100)
    apart = run_stack(stack.plan, x.clone(), **copied(call), first=x.clone())
    assert torch.equal(run_stack(stack.plan, x, **call, first=x).hidden, apart.hidden)
    assert torch.equal(x, apart.hidden)


@pytest.mark.parametrize("batch", BATCHES)
def test_every_simd_level(level: str, batch: str) -> None:
    assert_equal_by_ops(Stack(SHAPES["plain"]), BATCHES[batch])


def test_the_number_of_threads_does_not_show() -> None:
    stack, rows = Stack(replace(SHAPES["plain"], hidden=384)), BATCHES["extend"]
    call = rows.call(stack)
    x = stack.random(len(call["positions"]), 384)
    alone = run_stack(stack.plan, x.clone(), **copied(call)).hidden
    torch.set_num_threads(3)
    assert torch.equal(run_stack(stack.plan, x.clone(), **copied(call)).hidden, alone)


def test_a_batch_without_tokens() -> None:
    stack = Stack(SHAPES["plain"])
    call = BATCHES["extend"].call(stack)
    none = torch.empty(0, dtype=torch.int64)
    call |= {"positions": none, "out_cache_loc": none, "prefix_lens": none}
    call |= {"qo_indptr": torch.zeros(1, dtype=torch.int64), "row_index": none}
    run = run_stack(stack.plan, torch.empty(0, 100), **call, captured=(0, 3))
    assert [t.shape for t in (run.hidden, *run.captured)] == [(0, 100), (0, 200)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([POSITIONS])}, r"positions\[0\] is 400"),
        ({"out_cache_loc": torch.tensor([-1])}, r"out_cache_loc\[0\] is -1"),
        ({"out_cache_loc": torch.tensor([1, 2])}, "out_cache_loc is"),
        ({"read_lens": torch.tensor([302])}, "302 KV elements"),
        ({"row_index": torch.tensor([1])}, "names row 1 of the page table"),
        ({"page_table": torch.full((1, 301), 301).int()}, "slot 301, the pool has"),
        ({"k_caches": []}, "got 0 K or V caches"),
        ({"v_caches": [torch.zeros(301, 2, 64)] * LAYERS}, "v_cache is"),
        ({"page_size": 0}, "page_size is 0"),
        ({"tree_mask": TREE[None]}, "tree_mask is"),
        ({"first": torch.zeros(1, 100)}, "first is given, but the first layer"),
        ({"captured": (1, 1)}, "captured_layers has 1, expected ascending"),
        ({"captured": (0, LAYERS + 1)}, "captured_layers has 4, .* up to 3"),
    ],
)
def test_bad_arguments_raise(change: dict[str, Any], message: str) -> None:
    stack = Stack(SHAPES["plain"])
    call = BATCHES["decode of one"].call(stack) | change
    with pytest.raises(RuntimeError, match=message):
        run_stack(stack.plan, stack.random(1, 100), **call)


def test_a_stream_of_another_width_raises() -> None:
    stack = Stack(SHAPES["plain"])
    call = BATCHES["decode of one"].call(stack)
    with pytest.raises(RuntimeError, match="x is float32|x is Float"):
        run_stack(stack.plan, stack.random(1, 101), **call)


@pytest.mark.parametrize(
    ("first", "message"),
    [(None, "first is absent"), (torch.zeros(1, 100), "first is Float")],
)
def test_a_head_without_its_input_raises(first: Tensor | None, message: str) -> None:
    stack = Stack(SHAPES["a head that reads a pair"])
    call = BATCHES["decode of one"].call(stack)
    with pytest.raises(RuntimeError, match=message):
        run_stack(stack.plan, stack.random(1, 100), **call, first=first)


def test_a_later_layer_without_a_norm_raises() -> None:
    stack = Stack(SHAPES["plain"])
    layers = [*stack.layers[:2], replace(stack.layers[2], input_norm=None)]
    with pytest.raises(RuntimeError, match="input_norm of a layer is absent"):
        StackPlan(layers, stack.final_norm, stack.sizes)


def test_a_plan_of_contradicting_weights_raises() -> None:
    stack = Stack(SHAPES["plain"])
    sizes = replace(stack.sizes, inner=96)
    with pytest.raises(RuntimeError, match="gate_up is"):
        StackPlan(stack.layers, stack.final_norm, sizes)


def test_words_that_are_no_plan_raise() -> None:
    stack = Stack(SHAPES["plain"])
    stack.plan.words.zero_()
    call = BATCHES["decode of one"].call(stack)
    with pytest.raises(RuntimeError, match="not filled by decoder_plan"):
        run_stack(stack.plan, stack.random(1, 100), **call)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
