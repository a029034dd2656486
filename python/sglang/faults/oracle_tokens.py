"""Lets the token oracle, and the fault that swaps two tokens, change what a worker
samples and what a verification chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from sglang.srt.kv_canary.token_oracle import oracle_logits, oracle_tokens
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    from sglang.faults.driver import PerturbDriver
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.sampling.sampler import SamplerOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_utils import Decision

Sample: TypeAlias = "Callable[[ScheduleBatch, ForwardBatch, Tensor], SamplerOutput]"


class TokenOracle:
    """Chooses the tokens of a worker: wraps `TpModelWorker.sample`, and
    `EAGLEWorkerV2.verify`.

    Attributes:
        perturb: driver of the target's pool, which swaps two tokens where that fault is
            planted; None: nobody does.
    """

    def __init__(self, worker: Worker) -> None:
        self.perturb: PerturbDriver | None = None
        target: Any = worker
        if isinstance(worker, EAGLEWorkerV2):
            target = worker.target_worker
            self._replace_choices(worker)
        self._vocab_size = target.model_runner.model_config.vocab_size
        target.sample = self._replacing(target.sample)

    def _replacing(self, sample: Sample) -> Sample:
        def sample_by_oracle(
            batch: ScheduleBatch, forward_batch: ForwardBatch, logits: Tensor
        ) -> SamplerOutput:
            ends = forward_batch.seq_lens
            tokens = self._swapped(
                oracle_tokens(
                    forward_batch.rids_int, ends, vocab_size=self._vocab_size
                ),
                rows=forward_batch.req_pool_indices,
                serials=forward_batch.req_serial,
                ends=ends,
            )
            return sample(batch, forward_batch, logits).forced(tokens)

        return sample_by_oracle

    def _replace_choices(self, worker: Any) -> None:
        """Let the target choose the oracle's token after each node: its logits allow no
        other one, whether the request samples or not."""
        verify = worker.verify

        def verify_by_oracle(
            live: WorkspaceRows,
            logits: Tensor,
            sampling_info: SamplingBatchInfo,
            **options: Any,
        ) -> Decision:
            identity, positions = live.row_identity(), live.tree.positions
            tokens = self._swapped(
                oracle_tokens(
                    identity.rids_int[:, None],
                    positions + 1,
                    vocab_size=self._vocab_size,
                ),
                rows=identity.req_pool_indices,
                serials=identity.req_serial,
                ends=positions[:, 0] + 1,
            )
            only = oracle_logits(logits, tokens.view(-1))
            decided: Decision = verify(live, only, sampling_info, **options)
            return decided

        worker.verify = verify_by_oracle

    def _swapped(self, tokens: Tensor, **rows: Tensor) -> Tensor:
        return tokens if self.perturb is None else self.perturb.swapped(tokens, **rows)
