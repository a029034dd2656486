"""Simulated acceptance for benchmarks of verification with random weights.

The room of `SGLANG_SIMULATE_ACC_LEN` and `SGLANG_SIMULATE_ACC_RATE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.faults.fault_points import Seam
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    from sglang.faults.historical_faults import Method
    from sglang.srt.draft_trees.buffers import VerifyResult
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.server_args import ServerArgs


@contextmanager
def opened(server_args: ServerArgs) -> Iterator[None]:
    """Scope in which new workers accept the configured number of tokens per tree on
    average. A rate may change while they run.

    Raises:
        ValueError: the weights are not random.
    """
    variables = (envs.SGLANG_SIMULATE_ACC_LEN, envs.SGLANG_SIMULATE_ACC_RATE)
    found = [each for each in variables if each.get()]
    if not found or server_args.speculative_algorithm is None:
        yield
        return
    if server_args.load_format != "dummy":
        raise ValueError(
            f"{found[0].name}={found[0].get()} makes tokens up and "
            "is for benchmarks: it needs --load-format dummy; unset it"
        )
    mean = envs.SGLANG_SIMULATE_ACC_LEN.get()

    def simulated(worker: EAGLEWorkerV2, verify: Method) -> Method:
        def verify_and_simulate(live: WorkspaceRows, *args: Any, **rest: Any) -> Any:
            decided = verify(live, *args, **rest)
            result, rate = live.result, envs.SGLANG_SIMULATE_ACC_RATE.get()
            lens = lens_of_mean(result, mean) if mean else lens_of_rate(result, rate)
            accept_first(result, lens)
            for tensor in (live.result.accept_index, live.result.accept_lens):
                get_tp_group().broadcast(tensor)
            return decided

        return verify_and_simulate

    with Seam(owner=EAGLEWorkerV2, method="verify", wrap=simulated).opened():
        yield


# Share of the wrong proposals after which the next best one is right.
NEXT_BEST = 0.35


def lens_of_mean(result: VerifyResult, mean: float) -> Tensor:
    """Draw a length for each request, `mean` tokens on average."""
    bs, width = result.accept_index.shape
    base = int(mean)
    noise = torch.rand(bs, device=result.predict.device)
    return (base + (noise < mean - base).long()).clamp_(1, width)


def lens_of_rate(result: VerifyResult, rate: float) -> Tensor:
    """Draw a length for each request: level by level the best proposal is accepted with
    probability `rate`, one of the others of a tree's level `NEXT_BEST` as often in what
    is left."""
    bs, width = result.accept_index.shape
    others = (result.predict.shape[1] - 1) / (width - 1) - 1
    of_level = 1 - (1 - rate) * (1 - NEXT_BEST) ** others
    passed = torch.rand(bs, width - 1, device=result.predict.device) < of_level
    drafted: Tensor = passed.long().cumprod(dim=1).sum(dim=1)
    return 1 + drafted


def accept_first(result: VerifyResult, lens: Tensor) -> None:
    """Accept the first `lens` nodes of each tree instead."""
    bs, width = result.accept_index.shape
    nodes, device = result.predict.shape[1], result.predict.device
    column = torch.arange(width, device=device)
    places = torch.arange(bs, device=device)[:, None] * nodes + column
    result.accept_index.copy_(places.where(column < lens[:, None], -1))
    result.accept_lens.copy_(lens)
