"""Hybrid models: rows of all ages in one forward, the parts that ranks hold, and what
loaders say of their checkpoints. `test_hf_parity.py` compares logits as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.forward.context import ForwardContext, forward_context
from sglang.srt.layers.ops.rope.op import rope_store_kv_ref
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.state import gated_delta, short_conv
from sglang.srt.layers.state.forward import StateCommit, StateForward
from sglang.srt.layers.state.layer import StateLayer
from sglang.srt.layers.state.nodes import StateNodes
from sglang.srt.mem_cache.state_pool import StatePool
from sglang.srt.model_executor.state_memory import state_shape
from sglang.srt.model_loader.loader import load_model
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.hybrid_models import HYBRIDS, write_hybrid_model

register_cpu_ci(est_time=20, suite="cpu")

LFM2, NEXT, QWEN3_5 = "Lfm2ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"
TOLERANCE = 3e-4
Logits = Callable[[list[int]], Tensor]


def reference_of(folder: Path) -> Logits:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0, -1]

    return logits


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 264, (length,), generator=generator).tolist()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def assert_counted(harness: ForwardHarness, row: int, tokens: int) -> None:
    """Every part of every layer says that it has folded so many tokens."""
    pool = harness.runner.state_pool
    assert pool is not None
    assert (pool.folded[row] == tokens).all(), pool.folded[row]


# -- rows ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [LFM2, NEXT])
def test_rows_of_all_ages_in_one_forward(tmp_path: Path, architecture: str) -> None:
    """New rows, rows that go on inside and at the end of a chunk of the operation, and
    rows whose slots others have left."""
    reference = reference_of(write_hybrid_model(tmp_path, architecture))
    harness = ForwardHarness(tmp_path, max_running_requests=8)
    left = [harness.new_row(prompt(70)) for _ in range(3)]
    harness.extend([(row, 70) for row in left])
    for row in left:
        harness.release(row)
    rows = {length: harness.new_row(prompt(length)) for length in (1, 2, 150, 200)}
    first = [(rows[150], 64), (rows[2], 1), (rows[200], 37)]
    then = [(rows[1], 1), (rows[150], 150), (rows[2], 2), (rows[200], 165)]
    for spans in (first, then, [(rows[200], 200)]):
        logits = harness.extend(spans)
        for (row, end), found in zip(spans, logits, strict=True):
            assert_close(found, reference(harness.tokens(row)[:end]))
            assert_counted(harness, row, end)
    for step in range(4):
        alive = list(rows.values())[step % 2 :]
        for row in alive:
            harness.append(row, 17 * step + row)
        logits = harness.forward(ForwardMode.DECODE, [(row, None) for row in alive])
        for row, found in zip(alive, logits, strict=True):
            assert_close(found, reference(harness.tokens(row)))
            assert_counted(harness, row, len(harness.tokens(row)))


@pytest.mark.parametrize("architecture", [LFM2, QWEN3_5])
def test_untied_and_tied_heads_and_plain_projections(
    tmp_path: Path, architecture: str
) -> None:
    """The features that `HYBRIDS` has on are off, and the other way round."""
    tied = HYBRIDS[architecture][1]["tie_word_embeddings"]
    others = {
        LFM2: {"conv_bias": False, "conv_L_cache": 4},
        QWEN3_5: {"attention_bias": False, "linear_conv_kernel_dim": 2},
    }
    write_hybrid_model(
        tmp_path, architecture, tie_word_embeddings=not tied, **others[architecture]
    )
    harness, tokens = ForwardHarness(tmp_path), prompt(90)
    found = harness.extend([(harness.new_row(tokens), 90)])[0]
    assert_close(found, reference_of(tmp_path)(tokens))


def test_sparse_and_dense_layers_alternate(tmp_path: Path) -> None:
    write_hybrid_model(
        tmp_path, NEXT, decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False
    )
    harness, tokens = ForwardHarness(tmp_path), prompt(30)
    kinds = [type(layer.mlp).__name__ for layer in harness.runner.model.model.layers]
    assert kinds == ["DecoderMLP", "MoeFeedForward"] * 2
    found = harness.extend([(harness.new_row(tokens), 30)])[0]
    assert_close(found, reference_of(tmp_path)(tokens))


def test_a_layer_without_its_state_says_something_else(tmp_path: Path) -> None:
    """Each part of the state reaches the logits, so the tests above see it."""
    write_hybrid_model(tmp_path, NEXT)
    harness, tokens = ForwardHarness(tmp_path), prompt(40)
    pool = harness.runner.state_pool
    assert pool is not None and pool.matrix is not None
    expected = reference_of(tmp_path)(tokens)
    for part in (pool.conv, pool.matrix):
        for layer in range(len(pool.shape.layers)):
            row = harness.new_row(tokens)
            harness.extend([(row, 39)])
            part[row, layer] = 0
            found = harness.extend([(row, 40)])[0]
            assert (found - expected).abs().max() > 0.01
            harness.release(row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("architecture", [LFM2, NEXT])
def test_kernels_take_what_layers_give_them(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels on a layer's views, where no GPU calls them."""
    pytest.importorskip("triton")
    from sglang.srt.layers.ops.state.gated_delta import triton as delta_kernels
    from sglang.srt.layers.ops.state.short_conv import triton as conv_kernels

    for form in ("decode", "prefill"):
        name = f"short_conv_{form}"
        monkeypatch.setattr(short_conv, name, getattr(conv_kernels, name))
        name = f"gated_delta_{form}"
        monkeypatch.setattr(gated_delta, name, getattr(delta_kernels, name))
    reference = reference_of(write_hybrid_model(tmp_path, architecture))
    harness = ForwardHarness(tmp_path)
    rows = [harness.new_row(prompt(length)) for length in (70, 5)]
    harness.extend([(rows[0], 64)])
    found = [harness.extend([(rows[0], 70), (rows[1], 5)])]
    for row in rows:
        harness.append(row, 7)
    found.append(harness.forward(ForwardMode.DECODE, [(row, None) for row in rows]))
    for i, row in enumerate(rows):
        tokens = harness.tokens(row)
        assert_close(found[0][i], reference(tokens[:-1]))
        assert_close(found[1][i], reference(tokens))
        assert_counted(harness, row, len(tokens))


@pytest.mark.parametrize("architecture", [LFM2, NEXT])
def test_commits_count_the_accepted_nodes(tmp_path: Path, architecture: str) -> None:
    write_hybrid_model(tmp_path, architecture)
    harness = ForwardHarness(tmp_path)
    pool, device = harness.runner.state_pool, harness.runner.device
    assert pool is not None
    rows = [harness.new_row(prompt(length)) for length in (9, 5)]
    harness.extend([(rows[0], 9), (rows[1], 5)])
    accepted = StateCommit(
        pool=pool,
        nodes=StateNodes(pool, size=8),
        slots=torch.tensor(rows, device=device),
        path=torch.tensor([[0, 2, 3], [4, -1, -1]], device=device),
        path_lens=torch.tensor([3, 0], device=device),
        num_nodes=8,
    )
    for layer in harness.runner.model.modules():
        if isinstance(layer, StateLayer):
            layer.commit(accepted)
    assert_counted(harness, rows[0], 12)
    assert_counted(harness, rows[1], 5)


# -- ranks ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alone(TensorParallelGroup):
    """A rank whose results are its own parts of the sums."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class OneRowAttention:
    """A backend for one row without cached tokens."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *_: Any, out: Any
    ) -> None:
        tokens = torch.arange(len(q))
        k_cache, v_cache = torch.zeros(2, *k.shape)
        rope_store_kv_ref(
            q,
            k,
            v,
            positions=tokens,
            cos_sin_cache=layer.cos_sin_cache,
            k_cache=k_cache,
            v_cache=v_cache,
            out_cache_loc=tokens,
            q_norm_weight=layer.q_norm.weight,
            k_norm_weight=layer.k_norm.weight,
            eps=layer.q_norm.eps,
        )
        attended = functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k_cache, v_cache)),
            is_causal=True,
            scale=layer.scaling,
            enable_gqa=True,
        )
        out.copy_(attended.transpose(0, 1))


def load(folder: Path, load_format: str = "auto") -> Any:
    config = ModelConfig.from_path(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "rope_rows": 256}
    return load_model(config, load_format=load_format, **options)


def mixed(
    folder: Path, x: Tensor, group: TensorParallelGroup, load_format: str
) -> list[Tensor]:
    """What each layer's mixer of a rank makes of `x`, prefilled and then decoded."""
    with tensor_parallel_group(group):
        model, config = load(folder, load_format), ModelConfig.from_path(folder)
        args = ServerArgs(model_path=str(folder), device="cpu")
        shape = state_shape(config, args, dtype=torch.float32)
    assert shape is not None
    pool = StatePool(shape, size=2, device="cpu")
    slots, found = torch.tensor([2]), []
    prefill = StateForward(
        pool=pool,
        slots=slots,
        qo_indptr=torch.tensor([0, len(x)]),
        has_state=torch.tensor([False]),
    )
    for state in (prefill, StateForward(pool=pool, slots=slots)):
        context = ForwardContext(attn_backend=OneRowAttention(), state=state)
        given = x if state is prefill else x[-1:]
        with torch.inference_mode(), forward_context(context):
            for layer in model.model.layers:
                found.append(layer.mixer(given.clone(), None, None))
    return found


@pytest.mark.parametrize(
    ("architecture", "config", "load_format", "size"),
    [
        (LFM2, {}, "auto", 2),
        (NEXT, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}, "auto", 4),
        (QWEN3_5, {}, "auto", 2),
        (QWEN3_5, {}, "dummy", 2),
    ],
)
def test_the_parts_of_ranks_add_up(
    tmp_path: Path,
    architecture: str,
    config: dict[str, Any],
    load_format: str,
    size: int,
) -> None:
    """With four ranks, two of them hold the same KV head."""
    write_hybrid_model(tmp_path, architecture, **config)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    whole = mixed(tmp_path, x, Alone(), load_format)
    parts = [
        mixed(tmp_path, x, Alone(rank=rank, size=size), load_format)
        for rank in range(size)
    ]
    for expected, *ours in zip(whole, *parts, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(sum(ours), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (LFM2, {"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 64"),
        (NEXT, {"num_attention_heads": 3}, "linear_num_key_heads 2"),
        (
            QWEN3_5,
            {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
            "linear_num_key_heads 1",
        ),
    ],
)
def test_sizes_that_ranks_cannot_share(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    options = {"num_key_value_heads": 1, "head_dim": 8}
    write_hybrid_model(tmp_path, architecture, **options | config)
    with (
        tensor_parallel_group(TensorParallelGroup(rank=0, size=3)),
        pytest.raises(ValueError, match=f"--tp-size 3 does not divide {message}"),
    ):
        load(tmp_path)


# -- checkpoints ---------------------------------------------------------------------


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (LFM2, "model.layers.0.conv.conv.weight"),
        (LFM2, "model.layers.0.conv.in_proj.bias"),
        (LFM2, "model.layers.0.feed_forward.w3.weight"),
        (LFM2, "model.layers.1.self_attn.q_layernorm.weight"),
        (LFM2, "model.embedding_norm.weight"),
        (NEXT, "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        (NEXT, "model.layers.0.linear_attn.A_log"),
        (QWEN3_5, "model.layers.0.linear_attn.in_proj_qkv.weight"),
        (QWEN3_5, "model.layers.0.linear_attn.conv1d.weight"),
        (QWEN3_5, "model.layers.2.self_attn.q_proj.bias"),
    ],
)
def test_tensors_that_are_missing_or_misshapen(
    tmp_path: Path, architecture: str, name: str
) -> None:
    """Errors name the checkpoint's tensor, not the parameter that has room for it."""
    write_hybrid_model(tmp_path, architecture)
    kept: dict[str, Tensor] = {}

    def misshape(tensors: dict[str, Tensor]) -> None:
        kept[name] = tensors[name]
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    change_tensors(tmp_path, misshape)
    shape = tuple(load_file(tmp_path / "model.safetensors")[name].shape)
    with pytest.raises(ValueError, match=f"{name} has shape") as error:
        load(tmp_path)
    assert f"{shape}, but config.json makes it {tuple(kept[name].shape)}" in str(
        error.value
    )
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"lacks 1 tensor\(s\) .*: {name}$"):
        load(tmp_path)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    write_hybrid_model(tmp_path, QWEN3_5)
    extra = {"mtp.fc.weight": torch.ones(64, 128), "mtp.norm.weight": torch.ones(64)}
    change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    load(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
