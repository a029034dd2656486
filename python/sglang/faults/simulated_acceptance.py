"""Simulated acceptance for benchmarks of verification with random weights.

The room of `SGLANG_SIMULATE_ACC_LEN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

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
    average.

    Raises:
        ValueError: the weights are not random.
    """
    mean = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if not mean or server_args.speculative_algorithm is None:
        yield
        return
    if server_args.load_format != "dummy":
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN={mean} makes tokens up and "
            "is for benchmarks: it needs --load-format dummy; unset it"
        )

    def simulated(worker: EAGLEWorkerV2, verify: Method) -> Method:
        def verify_and_simulate(live: WorkspaceRows, *args: Any, **rest: Any) -> Any:
            decided = verify(live, *args, **rest)
            simulate_acceptance(live.result, mean=mean)
            for tensor in (live.result.accept_index, live.result.accept_lens):
                get_tp_group().broadcast(tensor)
            return decided

        return verify_and_simulate

    with Seam(owner=EAGLEWorkerV2, method="verify", wrap=simulated).opened():
        yield


def simulate_acceptance(result: VerifyResult, *, mean: float) -> None:
    """Accept the first nodes of each tree instead: `mean` tokens on average, drawn anew
    for every request."""
    bs, width = result.accept_index.shape
    nodes = result.predict.shape[1]
    device = result.predict.device
    base = int(mean)
    noise = torch.rand(bs, device=device)
    lens = (base + (noise < mean - base).long()).clamp_(1, width)
    column = torch.arange(width, device=device)
    places = torch.arange(bs, device=device)[:, None] * nodes + column
    result.accept_index.copy_(places.where(column < lens[:, None], -1))
    result.accept_lens.copy_(lens)
