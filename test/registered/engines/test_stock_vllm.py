"""The harness that lets a stock vLLM run without its compiled package."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")

LAB = Path(__file__).parents[3] / "lab"
HARNESS = LAB / "stock_vllm"


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(HARNESS)
    return importlib.import_module("compiled_ops")


@pytest.mark.parametrize("shape", [(1, 2), (3, 7, 18), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_are_those_of_the_models(
    ops: ModuleType, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Against what they are due to compute, written out in 64 bits."""
    rng = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], generator=rng).to(dtype)

    def normed(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def due(found: torch.Tensor, expected: torch.Tensor) -> None:
        loose = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(found, expected.to(dtype), **loose)

    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-5)
    due(out, normed(x))
    added, kept = x.clone(), residual.clone()
    torch.ops._C.fused_add_rms_norm(added, kept, weight, 1e-5)
    due(kept, x.double() + residual.double())
    due(added, normed(kept))
    gate, up = x.double().chunk(2, dim=-1)
    half = torch.empty_like(x[..., : shape[-1] // 2])
    torch.ops._C.silu_and_mul(half, x)
    due(half, gate * gate.sigmoid() * up)
    torch.ops._C.gelu_tanh_and_mul(half, x)
    due(half, functional.gelu(gate, approximate="tanh") * up)


def test_latents_are_stored_and_gathered(ops: ModuleType) -> None:
    rng = torch.Generator().manual_seed(0)
    blocks, size, latent, rotated = 6, 4, 5, 2
    cache = torch.randn(blocks, size, latent + rotated, generator=rng).bfloat16()
    before = cache.clone()
    new = torch.randn(4, latent + rotated, generator=rng).bfloat16()
    slots = torch.tensor([9, -1, 23])
    parts = new[:, :latent], new[:, latent:]
    one = torch.ones(())
    torch.ops._C_cache_ops.concat_and_cache_mla(*parts, cache, slots, "auto", one)
    due = before.view(-1, latent + rotated)
    due[9], due[23] = new[0], new[2]
    assert torch.equal(cache.view(-1, latent + rotated), due)

    # Two positions of one request from its third one on, five of another.
    table = torch.tensor([[2, 5, 0], [1, 4, 3]], dtype=torch.int32)
    positions = [(0, 2), (0, 3), *((1, p) for p in range(5, 10))]
    out = torch.zeros(9, latent + rotated).bfloat16()
    torch.ops._C_cache_ops.gather_and_maybe_dequant_cache(
        cache,
        out,
        table,
        torch.tensor([0, 2, 7], dtype=torch.int32),
        torch.tensor([row for row, _ in positions] + [9], dtype=torch.int32),
        len(positions),
        "bfloat16",
        one,
        torch.tensor([2, 5], dtype=torch.int32),
    )
    for place, (row, position) in enumerate(positions):
        expected = cache[int(table[row, position // size]), position % size]
        assert torch.equal(out[place], expected)
    assert not out[len(positions) :].any()
    with pytest.raises(NotImplementedError, match="fp8"):
        torch.ops._C_cache_ops.concat_and_cache_mla(*parts, cache, slots, "fp8", one)


@pytest.mark.parametrize("num_with_prefix", [0, 3, None])
def test_two_attentions_are_joined(
    ops: ModuleType, num_with_prefix: int | None
) -> None:
    """Against attention over both parts at once, in 64 bits."""
    rng = torch.Generator().manual_seed(0)
    tokens, heads, size, lens = 5, 2, 4, (7, 3)
    q = torch.randn(heads, tokens, size, generator=rng).double()
    k, v = (torch.randn(heads, sum(lens), size, generator=rng).double() for _ in "kv")

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, part].transpose(1, 2)
        out = scores.softmax(dim=-1) @ v[:, part]
        return out.transpose(0, 1), scores.logsumexp(dim=-1)

    prefix, suffix = attend(slice(0, lens[0])), attend(slice(lens[0], None))
    due, due_lse = (part.clone() for part in attend(slice(None)))
    end = tokens if num_with_prefix is None else num_with_prefix
    due[end:], due_lse[:, end:] = suffix[0][end:], suffix[1][:, end:]
    output = torch.empty(tokens, heads, size)
    lse = torch.empty(heads, tokens)
    parts = [part.float() for part in (*prefix, *suffix)]
    torch.ops._C.merge_attn_states(output, lse, *parts, num_with_prefix, None)
    torch.testing.assert_close(output, due.float())
    torch.testing.assert_close(lse, due_lse.float())


def test_kernels_that_are_not_there_are_not_offered(ops: ModuleType) -> None:
    assert torch.ops._C.cutlass_scaled_mm_supports_fp8(90) is False
    with pytest.raises(AttributeError, match="gptq_gemm"):
        torch.ops._C.gptq_gemm()


def test_what_is_left_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HARNESS)
    monkeypatch.delitem(sys.modules, "make_site", raising=False)
    is_used = importlib.import_module("make_site").is_used
    names = {
        "vllm/v1/worker/gpu/model_runner.py": True,
        "vllm/third_party/pynvml.py": True,
        "vllm-0.33.0.dist-info/entry_points.txt": True,
        "vllm/_C_stable_libtorch.abi3.so": False,
        "vllm/third_party/deep_gemm/include/gemm.h": False,
        "vllm/vllm-rs/server": False,
    }
    assert {name: is_used(name) for name in names} == names


def test_absent_packages_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import json, uvloop; print(json.dumps('there'))"],
        env={"PYTHONPATH": str(HARNESS)},
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == "there", done.stderr
