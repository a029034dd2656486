"""Runs the forward of a batch and samples: the scheduler's view of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.kv_canary.api import install_canary, watcher_bytes
from sglang.srt.kv_canary.edits import EditBounds
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.grammar_masks import GrammarMasks
    from sglang.srt.sampling.logprobs import LogprobResult
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledForward:
    """One forward and the token it yielded per row, all on the device.

    Fields:
        token_ids: int64 [R], already published in the token table.
        sent: int64 vectors for the host: the tokens, then the KV canary's findings and
            marks, if it is on (`StepEnd.send_step`).
        has_marks: whether the canary is on.
    """

    forward_batch: ForwardBatch
    output: LogitsProcessorOutput
    token_ids: Tensor
    sent: list[Tensor]
    has_marks: bool
    logprobs: LogprobResult | None

    def to_host(self) -> GenerationBatchResult:
        """Enqueue the copies after the forward, without waiting."""
        return to_host(
            self.sent,
            bs=len(self.token_ids),
            has_marks=self.has_marks,
            logprobs=self.logprobs,
            input_logprobs=self.output.input_logprobs,
            hidden=self.output.last_hidden,
        )


class TpModelWorker:
    """One model, or one rank's part of it, on one device, with its sampler.

    Args:
        model_runner: an initialised model runner.
        canary: the canary installed on it, or None.
    """

    def __init__(
        self,
        *,
        model_runner: ModelRunner,
        canary: CanaryManager | None = None,
    ) -> None:
        self.model_runner = model_runner
        self.max_behind = 0
        self._canary = canary
        self.sampler = Sampler()
        self._group = get_tp_group()

    @classmethod
    def create(
        cls, *, server_args: ServerArgs, model_config: ModelConfig
    ) -> TpModelWorker:
        """Create a worker without speculation.

        Raises:
            ValueError: the weights are bad or do not fit in memory.
        """
        runner = ModelRunner(
            server_args=server_args,
            model_config=model_config,
            watcher=watcher_bytes(server_args),
        )
        runner.initialize()
        canary = install_canary(server_args=server_args, model_runner=runner)
        return cls(model_runner=runner, canary=canary)

    def capture_graphs(self) -> None:
        """As `Worker.capture_graphs`."""
        # Capture the largest graphs first: the others fit in their memory.
        self.model_runner.init_piecewise_cuda_graphs()
        self.model_runner.init_cuda_graphs()
        for manager in self.canary_managers():
            manager.mark_init_finished()

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Nothing drafts."""

    def on_checkpoint(self) -> None:
        """Nothing depends on earlier requests."""

    def model_runners(self) -> list[ModelRunner]:
        """As `Worker.model_runners`."""
        return [self.model_runner]

    def canary_managers(self) -> list[CanaryManager]:
        """The canaries of the KV pools; empty while the canary is off."""
        return [] if self._canary is None else [self._canary]

    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """Run the forward, sample one token per row, and publish the tokens for the
        next step.
        """
        info = batch.sampling_info if masks is None else masks.for_requests(batch)
        return self.run(batch, batch.forward_batch(info)).to_host()

    def run(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> SampledForward:
        """Run a prepared forward and sample; the results stay on the device."""
        canary = self._canary
        if canary is not None and forward_batch.forward_mode is ForwardMode.EXTEND:
            canary.expect_prefixes(
                batch.reqs,
                batch.prefix_lens(),
                forward_batch.req_pool_indices,
                salts=batch.salts,
            )
        output = self.model_runner.forward(forward_batch)
        sampled = self.sample(batch, forward_batch, output.next_token_logits)
        rows = batch.sampled_rows()
        sent = [sampled.token_ids]
        if canary is not None:
            sent = canary.ends.send_step(
                forward_batch,
                sampled,
                rows,
                head=output.head,
                bounds=EditBounds.of(
                    batch.sampling_info, batch.seq_lens_cpu, ahead=batch.ahead
                ),
            )
        self._publish(forward_batch, sampled.token_ids, rows)
        return SampledForward(
            forward_batch=forward_batch,
            output=output,
            token_ids=sampled.token_ids,
            sent=sent,
            has_marks=canary is not None,
            logprobs=sampled.logprobs,
        )

    def sample(
        self, batch: ScheduleBatch, forward_batch: ForwardBatch, logits: Tensor
    ) -> SamplerOutput:
        """Sample one token per row from logits [R, V], the same on every rank."""
        sampling_info = forward_batch.sampling_info
        assert sampling_info is not None
        sampled = self.sampler(
            logits,
            sampling_info,
            positions=forward_batch.seq_lens,
            history=batch.token_history(),
            logprobs=batch.logprob_request,
        )
        if not sampling_info.is_all_greedy:
            # All ranks see the same logits and noise, but on a GPU a sum over a
            # distribution may differ in its last bits from run to run.
            self._group.broadcast(sampled.token_ids)
        return sampled

    def _publish(
        self, forward_batch: ForwardBatch, token_ids: Tensor, sampled: Tensor | None
    ) -> None:
        """Write the sampled tokens, or only rows `sampled`, to the token table, where
        the next step reads its inputs.
        """
        table = self.model_runner.req_to_token_pool.token_table
        indices, positions = forward_batch.req_pool_indices, forward_batch.seq_lens
        if sampled is not None:
            indices, positions = indices[sampled], positions[sampled]
            token_ids = token_ids[sampled]
        table[indices, positions] = token_ids.to(table.dtype)


def to_host(
    vectors: list[Tensor],
    *,
    bs: int,
    stride: int = 1,
    has_accept_lens: bool = False,
    num_pools: int = 1,
    has_marks: bool = False,
    logprobs: LogprobResult | None = None,
    input_logprobs: dict[int, LogprobResult] | None = None,
    hidden: Tensor | None = None,
) -> GenerationBatchResult:
    """Enqueue copies to pinned memory after the work so far, without waiting.

    Args:
        vectors: int64 vectors, in the order of `GenerationBatchResult.packed`.
    """
    is_device = vectors[0].is_cuda
    take = _pinned_copy if is_device else _unchanged
    result = GenerationBatchResult(
        packed=_join_in_one_copy(vectors) if is_device else _join_on_host(vectors),
        bs=bs,
        stride=stride,
        has_accept_lens=has_accept_lens,
        num_pools=num_pools,
        has_marks=has_marks,
        logprobs=logprobs and logprobs.with_packed(take(logprobs.packed)),
        input_logprobs={
            row: scored.with_packed(take(scored.packed))
            for row, scored in (input_logprobs or {}).items()
        },
        hidden=None if hidden is None else take(hidden),
        copy_done=torch.cuda.Event() if is_device else None,
    )
    if result.copy_done is not None:
        result.copy_done.record()
    return result


def _join_in_one_copy(vectors: list[Tensor]) -> Tensor:
    return _pinned_copy(vectors[0] if len(vectors) == 1 else torch.cat(vectors))


def _join_on_host(vectors: list[Tensor]) -> list[int]:
    """Join on the host without an intermediate tensor, which would delay a small
    model's step.
    """
    return [word for vector in vectors for word in vector.tolist()]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
