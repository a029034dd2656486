"""The flash kernels of a GPU compute the attention of chains, gradients included, at
the sizes and in the precision of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.demo_model.chain_attention import chain_attention, chain_attention_ref
from sglang.srt.utils.devices import cuda_device_count
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=10, suite="lab")

pytestmark = pytest.mark.skipif(cuda_device_count() < 1, reason="needs a GPU")
SHAPE = (2, 6, 2043, 64)
TOLERANCE = 0.03


@pytest.mark.parametrize("steps", [1, 4])
def test_chain_attention_in_bfloat16(steps: int) -> None:
    torch.manual_seed(steps)
    wide = [
        torch.randn(SHAPE, device="cuda", requires_grad=True)
        for _ in range(3 + 2 * steps)
    ]
    grad = torch.randn(SHAPE, device="cuda")
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in wide]

    def run(leaves: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
        own = list(zip(leaves[3::2], leaves[4::2], strict=True))
        out = attend(*leaves[:3], own)
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        return [out, *grads]

    expected = run(wide, chain_attention_ref)
    for actual, wanted in zip(run(narrow, chain_attention), expected, strict=True):
        error = (actual.float() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
