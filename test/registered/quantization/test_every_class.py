"""Every class of models with every scheme that `docs/models.md` says it loads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_fp8_models import TOLERANCE, count_quantised, logits

from sglang.srt.models.registry import supported_architectures
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hybrid_models import HYBRIDS, write_text_model
from sglang.test.quantized_models import (
    FOUR_BITS,
    RECIPES,
    is_whole_linear,
    quantize_folder,
)
from sglang.test.scale import is_full
from sglang.test.tiny_models import FAMILIES

register_cpu_ci(est_time=10, suite="cpu", full_time=120)

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


@pytest.mark.parametrize(("family", "scheme"), cases())
def test_the_scheme_is_loaded_and_kept(
    family: str, scheme: str, tmp_path: Path
) -> None:
    own = FAMILIES.get(family, {})
    sizes = {name: size for name, size in SIZES.items() if own.get(name)}
    plain = write_text_model(tmp_path / "plain", family, **sizes)
    folder = quantize_folder(
        plain,
        tmp_path / "quantised",
        SCHEMES[scheme],
        chosen=is_whole_linear,
        oracle=tmp_path / "oracle",
    )
    expected = logits(tmp_path / "oracle")
    torch.testing.assert_close(logits(folder), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert (logits(plain) - expected).abs().max() > 10 * TOLERANCE
    assert count_quantised(folder) > 0


def test_no_class_is_left_out() -> None:
    assert {*CLASSES, *COMPUTED} == set(supported_architectures())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
