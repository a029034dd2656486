"""Extend attention over expanded latents: the kernel, the choice, whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention_problem import DEVICE, NAN, ON_GPU, Problem, make_problem

from kv_canary.op import force_reference
from sglang.srt.configs import latent_form
from sglang.srt.configs.latent_config import LatentConfig
from sglang.srt.configs.latent_form import pays_to_expand
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.ops.attention.latent_expanded import (
    table as latent_expanded_table,
)
from sglang.srt.layers.ops.attention.latent_expanded.launch import (
    Expansion,
    expanded_extend_attention,
    prefix_blocks,
)
from sglang.srt.layers.ops.attention.latent_expanded.table import TileChoice
from sglang.srt.layers.ops.attention.op import (
    decode_attention_ref,
    extend_attention_ref,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=10, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

Sizes = tuple[int, int, int, int, int]
# Heads, channels: of the latent, of a key, rotated, of a value. Tiny V2 and V3.
TINY: list[Sizes] = [(2, 32, 24, 8, 20), (3, 40, 16, 16, 24)]
LITE: Sizes = (1 + 15 * ON_GPU, 512, 128, 64, 128)
TILES = [TileChoice(16, 16, 4, 2, is_late) for is_late in (False, True)]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}


def expected_of(problem: Problem, weight: Tensor, sizes: Sizes) -> Tensor:
    """Results in float32, row by row: [T, heads, value]."""
    heads, rank, nope, _, value = sizes
    weight = weight.float().view(heads, nope + value, rank)
    outputs, begin = [], 0
    for row, new in enumerate(problem.new_lens.tolist()):
        prefix = int(problem.prefix_lens[row])
        slots = [problem.slot(row, e) for e in range(prefix + new)]
        latents = problem.k_cache[slots, 0].float()
        kv = torch.einsum("nr,hcr->nhc", latents[:, :rank], weight)
        rotated = latents[:, None, rank:].expand(-1, heads, -1)
        k = torch.cat((kv[..., :nope], rotated), dim=2)
        q = problem.q[begin : begin + new].float()
        score = torch.einsum("qhc,nhc->hqn", q, k) * problem.sm_scale
        own = prefix + torch.arange(new, device=DEVICE)[:, None]
        is_later = torch.arange(prefix + new, device=DEVICE)[None] > own
        # Values that are masked must not count, whatever they are.
        share = score.masked_fill(is_later, -torch.inf).softmax(2)
        each = share[..., None] * kv[..., nope:].transpose(0, 1)[:, None]
        each = each.masked_fill(is_later[None, ..., None], 0.0)
        outputs.append(each.sum(2).transpose(0, 1))
        begin += new
    return torch.cat(outputs)


def run(problem: Problem, weight: Tensor, sizes: Sizes, **options: Any) -> Tensor:
    heads, rank, _, _, value = sizes
    lens = problem.prefix_lens.tolist()
    rows = {
        "row_index": problem.row_index,
        "prefix_lens": problem.prefix_lens,
        "page_size": problem.page_size,
    }
    new_slots = [
        problem.slot(row, prefix + i)
        for row, (prefix, new) in enumerate(
            zip(lens, problem.new_lens.tolist(), strict=True)
        )
        for i in range(new)
    ]
    out = problem.q.new_full((len(new_slots), heads, value), 7.0)
    expanded_extend_attention(
        problem.q[: len(new_slots)],
        problem.k_cache,
        problem.k_cache[..., :rank],
        page_table=problem.page_table,
        qo_indptr=problem.qo_indptr,
        sm_scale=problem.sm_scale,
        out=out,
        expansion=Expansion(
            weight=weight,
            new_slots=torch.tensor(new_slots, device=DEVICE),
            prefix=prefix_blocks(
                problem.page_table, lens=lens, most=latent_form.PREFIX_BLOCK, **rows
            ),
        ),
        **rows,
        **options,
    )
    return out


def make(
    sizes: Sizes, prefix: list[int], new: list[int], **options: Any
) -> tuple[Problem, Tensor]:
    """A problem whose pool has latents, and the weight of their projections."""
    heads, rank, nope, rope, value = sizes
    problem = make_problem(
        prefix_lens=prefix,
        new_lens=new,
        heads=(heads, 1),
        head_dim=rank + rope,
        **options,
    )
    q = problem.q[..., : nope + rope].contiguous()
    weight = torch.randn(heads * (nope + value), rank, device=DEVICE) / rank**0.5
    return replace(problem, q=q, sm_scale=(nope + rope) ** -0.5), weight.to(q.dtype)


def check(problem: Problem, weight: Tensor, sizes: Sizes) -> None:
    tolerance = TOLERANCE[problem.q.dtype]
    torch.testing.assert_close(
        run(problem, weight, sizes).float(),
        expected_of(problem, weight, sizes),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of prefixes, and tiles, that short rows fill."""
    monkeypatch.setattr(latent_form, "PREFIX_BLOCK", 64)
    for name in ("HALF_TILES", "FLOAT_TILES"):
        monkeypatch.setattr(latent_expanded_table, name, {640: TILES[0]})


CASES: list[tuple[Sizes, int, torch.dtype, bool]] = [
    (TINY[0], 1, torch.float32, False),
    (TINY[1], 16, torch.float16, True),
    (TINY[0], 64, torch.float32, True),
]
if ON_GPU:
    CASES += [(LITE, 64, torch.bfloat16, late) for late in (False, True)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("sizes", "page_size", "dtype", "is_late"), CASES, ids=str)
def test_rows_of_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    page_size: int,
    dtype: torch.dtype,
    is_late: bool,
) -> None:
    """Without a prefix, within a block of prefixes, over several of them."""
    for name in ("HALF_TILES", "FLOAT_TILES"):
        monkeypatch.setattr(latent_expanded_table, name, {640: TILES[is_late]})
    prefix, new = [0, 101, 7, 0], [18, 1, 33, 2]
    check(*make(sizes, prefix, new, page_size=page_size, dtype=dtype), sizes)
    if page_size == 1:
        one = make(sizes, [50], [20], dtype=dtype, has_row_index=False)
        check(*one, sizes)


def test_the_shipped_tiles() -> None:
    """Of DeepSeek's channels, of a type of two bytes."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    for prefix, new in (([0], [130]), ([150, 0], [20, 140])):
        check(*make(LITE, prefix, new, dtype=dtype), LITE)


@pytest.mark.usefixtures("small_tiles")
def test_nan_reaches_those_who_attend_it_and_nobody_else() -> None:
    """Of the prefix, of a new token; the rows beside them share their tiles."""
    sizes = TINY[0]
    for bad in (20, 35 + 5):
        problem, weight = make(sizes, [3, 35, 5], [6, 19, 7])
        problem.k_cache[problem.slot(1, bad)] = NAN
        out = run(problem, weight, sizes)
        first = 6 + max(bad - 35, 0)
        assert bool(out[first:25].isnan().all())
        assert not bool(out[:first].isnan().any() | out[25:].isnan().any())


def test_arguments_that_do_not_fit_are_named() -> None:
    problem, weight = make(TINY[0], [3], [2])
    mask = torch.ones(1, 2, 2, dtype=torch.bool, device=DEVICE)
    for message, options in (
        ("tree_mask", {"tree_mask": mask}),
        ("has none of them", {"logit_cap": 1.0}),
    ):
        with pytest.raises(ValueError, match=message):
            run(problem, weight, TINY[0], **options)
    with pytest.raises(ValueError, match=r"weight is .* pass \(88, 32\)"):
        run(problem, weight[1:], TINY[0])
    with pytest.raises(ValueError, match="too many for a tile of 640"):
        run(problem, weight, (2, 32, 24, 8, 600))


# -- the choice --------------------------------------------------------------------


def lens(prefix: list[int], new: list[int]) -> HostLens:
    return HostLens(prefix_lens=prefix, extend_lens=new)


def test_the_rule() -> None:
    latent = LatentConfig(
        rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None
    )
    assert pays_to_expand(lens([0], [1024]), latent)
    assert not pays_to_expand(lens([0], [1023]), latent)
    assert pays_to_expand(lens([100_000], [8192]), latent)
    # Each cached element is attended by 171 queries, or by 170.
    many = 1_000_000
    assert pays_to_expand(lens([many] * 8, [171] * 8), latent)
    assert not pays_to_expand(lens([many] * 8, [170] * 8), latent)
    assert pays_to_expand(lens([many, 0], [16, 30_000]), latent)
    assert not pays_to_expand(lens([many, 0], [16, 10_000]), latent)
    narrow = LatentConfig(
        rank=64, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None
    )
    assert not pays_to_expand(lens([0], [8192]), narrow)


# -- whole models ------------------------------------------------------------------

# Of these tests the reference's name, which runs on both devices.
BACKEND = "triton" if ON_GPU else "torch_native"
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
PROMPT = [7 * i % 264 for i in range(70)]


class ExpandingBackend(TritonAttnBackend):
    """Without a GPU its other ops are the references, which no interpreter runs."""

    def __init__(self, **pools: Any) -> None:
        super().__init__(**pools)
        if not ON_GPU:
            self.decode_op, self.extend_op = decode_attention_ref, extend_attention_ref

    def _decode_options(self, *of: Any) -> dict[str, Any]:
        return super()._decode_options(*of) if ON_GPU else {}

    def _extend_call(
        self, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> tuple[Callable[..., None], dict[str, Any]]:
        op, options = super()._extend_call(k, v, layer, forward_batch)
        return op, options if ON_GPU or op is not self.extend_op else {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens of each expanded call, which every plain extend makes."""
    found: list[int] = []

    def counted(q: Tensor, *caches: Tensor, **args: Any) -> None:
        found.append(q.shape[0])
        expanded_extend_attention(q, *caches, **args)

    monkeypatch.setattr(latent_form, "MIN_TOKENS", 1)
    monkeypatch.setattr(latent_form, "MIN_GAIN", 0.0)
    monkeypatch.setattr(latent_form, "PREFIX_BLOCK", 40)
    monkeypatch.setattr(ExpandingBackend, "expanded_op", staticmethod(counted))
    backends = {BACKEND: lambda: ExpandingBackend}
    monkeypatch.setattr(attention_registry, "_BACKENDS", backends)
    return found


@pytest.fixture
def unpacked() -> Iterator[None]:
    """The weights on the CPU stay as CUDA keeps them."""
    if ON_GPU:
        yield
    else:
        with force_reference():
            yield


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(("architecture", "page_size"), [(V2, 1), (V3, 16)])
def test_models_equal_their_absorbed_form(
    tmp_path: Path, calls: list[int], architecture: str, page_size: int
) -> None:
    """Chunks, rows of several lengths, a prefix of another row, a decode after them;
    under the canary, which reads every byte of the latents."""
    write_tiny_model(tmp_path, architecture, **HEADS)
    found = []
    for min_tokens in (1, 1000):
        latent_form.MIN_TOKENS = min_tokens
        harness = ForwardHarness(
            tmp_path,
            device=DEVICE,
            attention_backend=BACKEND,
            dtype="float32",
            page_size=page_size,
            kv_canary="raise",
            kv_canary_real_data="all",
        )
        first = harness.new_row(PROMPT)
        logits = [harness.extend([(first, 32)])]
        second = harness.new_row(PROMPT, borrow=(first, 32))
        third = harness.new_row(PROMPT[5:])
        logits.append(harness.extend([(first, 57), (third, 11), (second, 40)]))
        rows = [(first, None), (second, None)]
        logits.append(harness.forward(ForwardMode.DECODE, rows))
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=2e-4)
    assert calls == [32, 32, 44, 44]


@pytest.mark.usefixtures("unpacked")
def test_an_engine_expands_prefills(tmp_path: Path, calls: list[int]) -> None:
    """Chunks, and what a cached prefix leaves; the canary sees nothing."""
    write_tiny_model(tmp_path, V3, **HEADS)
    prompts = (PROMPT[:50], PROMPT[:44] + PROMPT[:3])
    answers = []
    for min_tokens in (1, 1000):
        latent_form.MIN_TOKENS = min_tokens
        engine = EngineHarness(
            tmp_path,
            device=DEVICE,
            dtype="float32",
            attention_backend=BACKEND,
            skip_tokenizer_init=True,
            chunked_prefill_size=40,
            kv_canary="raise",
        )
        for prompt in prompts:
            answer = engine.generate(
                prompt, temperature=0.0, max_new_tokens=1, ignore_eos=True
            )
            answers.append((answer.output_ids, answer.cached_tokens))
    assert answers[:2] == answers[2:] and answers[1][1] == 44
    # Two layers of two chunks, then of what was not cached.
    assert calls == [40, 40, 10, 10, 3, 3]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
