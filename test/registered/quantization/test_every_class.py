"""Every class of models with every scheme that `docs/models.md` says it loads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_fp8_models import TOLERANCE, count_quantised, load, logits, pairs

from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.models.registry import supported_architectures
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hybrid_models import HYBRIDS, write_text_model
from sglang.test.quantized_models import (
    FOUR_BITS,
    RECIPES,
    is_whole_linear,
    quantize_folder,
)
from sglang.test.scale import is_full, sampled
from sglang.test.tiny_models import FAMILIES

register_cpu_ci(est_time=10, suite="cpu", full_time=200)

# Its matrices are computed, not read.
COMPUTED = ("MockForCausalLM",)
SCHEMES = RECIPES | FOUR_BITS
CLASSES = [*FAMILIES, *HYBRIDS]
# Whole numbers of groups, of families whose sizes are none.
SIZES = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
}


def cases() -> list[tuple[str, str]]:
    """Every class with every scheme; in CI every class with one of them."""
    if is_full():
        return [*itertools.product(CLASSES, SCHEMES)]
    return [*zip(CLASSES, itertools.cycle(SCHEMES), strict=False)]


def twins(root: Path, family: str, scheme: str) -> tuple[Path, Path, Path]:
    """A plain model, it quantised, and the plain one with exactly its values."""
    own = FAMILIES.get(family, {})
    sizes = {name: size for name, size in SIZES.items() if own.get(name)}
    plain, oracle = root / "plain", root / "oracle"
    folder = quantize_folder(
        write_text_model(plain, family, **sizes),
        root / "quantised",
        SCHEMES[scheme],
        chosen=is_whole_linear,
        oracle=oracle,
    )
    return plain, folder, oracle


@pytest.mark.parametrize(("family", "scheme"), cases())
def test_the_scheme_is_loaded_and_kept(
    family: str, scheme: str, tmp_path: Path
) -> None:
    plain, folder, oracle = twins(tmp_path, family, scheme)
    expected = logits(oracle)
    torch.testing.assert_close(logits(folder), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert (logits(plain) - expected).abs().max() > 10 * TOLERANCE
    assert count_quantised(folder) > 0


@pytest.mark.parametrize(
    ("family", "scheme"), sampled(cases(), key=lambda case: "any", ci=2)
)
def test_each_rank_holds_its_part(family: str, scheme: str, tmp_path: Path) -> None:
    _, folder, oracle = twins(tmp_path, family, scheme)
    for rank in range(2):
        with tensor_parallel_group(TensorParallelGroup(rank=rank, size=2)):
            # It is not packed in this type.
            ours, theirs = (load(of, dtype=torch.float64) for of in (folder, oracle))
        for one, other in zip(ours.modules(), theirs.modules(), strict=True):
            order = getattr(getattr(one, "quantized", None), "columns", None)
            for made, expected in pairs(one, other):
                columns = slice(None) if order is None else order
                assert torch.equal(made, expected[:, columns]), rank


def test_no_class_is_left_out() -> None:
    assert {*CLASSES, *COMPUTED} == set(supported_architectures())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
