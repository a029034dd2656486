"""Compiles launches ahead for sm_90 without a GPU; run by test_kernels_ahead.

A driver that names the target takes the place of CUDA's; nothing is ever launched.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kv_canary.kernels.triton import ends, records
from kv_canary.state import create_state
from sglang.srt.layers.ops.attention.decode import launch as decode
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend_dense.kernels import extend_dense_kernel
from sglang.srt.layers.ops.linear.triton import choose, gemm
from sglang.srt.layers.ops.norm.triton import rmsnorm
from sglang.srt.sampling.ops.choose_tokens.triton import choose_tokens
from sglang.srt.utils.kernels_ahead import compiled_ahead
from sglang.srt.utils.triton_keys import make_keys_stable

# Of all processes.
SAID = Path(tempfile.mkdtemp()) / "said"


def say(what: str) -> None:
    with SAID.open("a") as file:
        file.write(f"{what}\n")


def heard() -> Counter[str]:
    """What was said since the last time."""
    lines = SAID.read_text().split("\n")[:-1]
    SAID.unlink()
    return Counter(lines)


class TargetAlone:
    """The properties that Triton asks of its driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        say("launcher")


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def launch() -> None:
    """One launch or two of kernels whose arguments are of every kind."""
    x, weight = halves(3, 1024), halves(2048, 1024)
    normed = rmsnorm(x, halves(1024), 1e-6)
    assert not normed.any(), "memory that no kernel has filled"
    for rows in (x, x[:1]):
        config = choose(rows, weight)
        assert config is not None
        gemm(rows, weight, config=config)
    assert choose_tokens(torch.randn(3, 5000)).tolist() == [0, 0, 0]
    for tokens in (4, 256):  # from the pool, and with descriptors of the new ones
        extend_attention(
            halves(tokens, 8, 64),
            halves(512, 2, 64),
            halves(512, 2, 64),
            page_table=torch.zeros(1, 512, dtype=torch.int32),
            row_index=longs(0),
            qo_indptr=longs(0, tokens),
            prefix_lens=longs(0),
            page_size=1,
            sm_scale=0.1,
            k_new=halves(tokens, 2, 64),
            v_new=halves(tokens, 2, 64),
            out=halves(tokens, 8, 64),
        )
    # In Triton's other language.
    decode.decode_attention(
        halves(2, 8, 128),
        halves(512, 2, 128),
        halves(512, 2, 128),
        page_table=torch.zeros(2, 512, dtype=torch.int32),
        row_index=longs(0, 1),
        read_lens=longs(7, 300),
        page_size=1,
        sm_scale=0.1,
        out=halves(2, 8, 128),
        workspace=decode.decode_workspace(
            rows=2, q_heads=8, kv_heads=2, head_dim=128, max_context=512, device="cpu"
        ),
    )
    state = create_state(
        num_slots=64, req_rows=4, ring_capacity=8, num_managers=1, device="cpu"
    )
    records.poison(state, longs(1, 2, 3), None)
    ends.gather_findings(state, longs(1, 2), torch.zeros(64).long())


KINDS = 9


class Loaded(NamedTuple):
    """A kernel that earlier work has loaded."""

    name: str

    def launch_metadata(self, *args: Any) -> None:
        raise AssertionError(f"{self.name} is launched")


def compile_and_load() -> list[tuple[dict[Any, Any], Any, Loaded]]:
    """Compile what `launch` launches and load it; return the places of the kernels."""
    places: list[tuple[dict[Any, Any], Any]] = []
    runtime = triton.knobs.runtime
    with compiled_ahead():
        note = runtime.jit_cache_hook

        def also(*, key: Any, fn: Any, compile: dict[str, Any], **about: Any) -> Any:
            kernels = fn.jit_function.device_caches[compile["device"]][0]
            places.append((kernels, key))
            return note(key=key, fn=fn, compile=compile, **about)

        runtime.jit_cache_hook = also
        launch()
    loaded = [(*place, Loaded(str(i))) for i, place in enumerate(places)]
    for kernels, key, kernel in loaded:
        kernels[key] = kernel
    return loaded


def main() -> None:
    driver.set_active(TargetAlone())
    make_keys_stable()
    decode.serves_decode = lambda **shape: True
    key = extend_dense_kernel.cache_key
    extend_dense_kernel.hash = None
    assert extend_dense_kernel.cache_key == key, "it knows of helpers hashed before"
    runtime = triton.knobs.runtime
    triton.knobs.compilation.listener = lambda **about: say(
        "found" if about["cache_hit"] else "compiled"
    )
    with compiled_ahead():
        launch()
        launch()
    assert runtime.jit_cache_hook is None
    said = heard()
    assert said == {"compiled": KINDS, "launcher": KINDS}, said
    loaded = compile_and_load()
    said = heard()
    assert said == {"found": KINDS, "launcher": KINDS}, f"not what is launched: {said}"

    with compiled_ahead():
        launch()
    assert not SAID.exists(), "what is loaded is not compiled"
    for kernels, key, kernel in loaded:
        assert kernels.pop(key) is kernel, "what was loaded is lost"

    try:
        with compiled_ahead():
            launch()
            raise KeyError
    except KeyError:
        pass
    assert runtime.jit_cache_hook is None
    assert "torch._dynamo" not in sys.modules, "its import takes seconds"
    assert torch.empty(3).numel() == 3
    print(f"{KINDS} kernels were ahead")


main()
