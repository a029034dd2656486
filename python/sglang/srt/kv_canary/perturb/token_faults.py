"""Lets the token oracle, and the fault that swaps two tokens, change what a worker
samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.kv_canary.perturb.driver import PerturbDriver
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker import Worker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampler import SamplerOutput

Sample: TypeAlias = "Callable[[ScheduleBatch, ForwardBatch, Tensor], SamplerOutput]"


def install_token_faults(worker: Worker) -> None:
    """Wrap `TpModelWorker.sample` where the configuration has the token oracle, which
    speculation excludes; leave every other worker as it is."""
    target: Any = worker
    for manager in worker.canary_managers():
        if manager.config.use_token_oracle:
            target.sample = _with_faults(target.sample, manager.perturb)


def _with_faults(sample: Sample, perturb: PerturbDriver) -> Sample:
    def sample_with_faults(
        batch: ScheduleBatch, forward_batch: ForwardBatch, logits: Tensor
    ) -> SamplerOutput:
        sampled = sample(batch, forward_batch, logits)
        tokens = perturb.tokens(forward_batch, sampled.token_ids)
        return sampled._replace(token_ids=tokens)

    return sample_with_faults
