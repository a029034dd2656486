"""Lets the token oracle, and the fault that swaps two tokens, change what a worker
samples and what a verification chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from sglang.srt.kv_canary.token_oracle import oracle_logits
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    from sglang.faults.driver import PerturbDriver
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.sampling.sampler import SamplerOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

Sample: TypeAlias = "Callable[[ScheduleBatch, ForwardBatch, Tensor], SamplerOutput]"


def install_token_oracle(worker: Worker, perturb: PerturbDriver) -> None:
    """Wrap `TpModelWorker.sample`, and `EAGLEWorkerV2.verify`, so that the token oracle
    chooses. `perturb` is the driver of the target's pool."""
    target = _target(worker)
    target.sample = _with_faults(target.sample, perturb)
    if isinstance(worker, EAGLEWorkerV2):
        _replace_choices(worker, perturb)


def _target(worker: Worker) -> Any:
    return worker.target_worker if isinstance(worker, EAGLEWorkerV2) else worker


def _with_faults(sample: Sample, perturb: PerturbDriver) -> Sample:
    def sample_with_faults(
        batch: ScheduleBatch, forward_batch: ForwardBatch, logits: Tensor
    ) -> SamplerOutput:
        sampled = sample(batch, forward_batch, logits)
        tokens = perturb.tokens(forward_batch, sampled.token_ids)
        return sampled._replace(token_ids=tokens)

    return sample_with_faults


def _replace_choices(worker: Any, perturb: PerturbDriver) -> None:
    """Let the target choose the oracle's token after each node: its logits allow no
    other one, whether the request samples or not."""
    verify = worker.verify

    def verify_with_oracle(
        live: WorkspaceRows,
        logits: Tensor,
        sampling_info: SamplingBatchInfo,
        **options: Any,
    ) -> Tensor:
        tokens = perturb.node_tokens(live.row_identity(), live.tree.positions)
        only = oracle_logits(logits, tokens.view(-1))
        processed: Tensor = verify(live, only, sampling_info, **options)
        return processed

    worker.verify = verify_with_oracle
