"""Runs the forward of a batch and samples: the scheduler's view of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.kv_canary.api import (
    install_canary,
    watcher_bytes_per_head,
    watcher_bytes_per_slot,
)
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.batch.grammar_masks import GrammarMasks
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.logprobs import LogprobResult
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledForward:
    """One forward and the token that it yielded per row, all on the device.

    Fields:
        token_ids: int64 [R], published in the token table already.
        sent: int64 vectors for the host, the tokens first: with the KV canary what it
            found and noted as well (`StepEnd.send_step`).
        has_marks: whether the canary is on.
    """

    forward_batch: ForwardBatch
    output: LogitsProcessorOutput
    token_ids: Tensor
    sent: list[Tensor]
    has_marks: bool
    logprobs: LogprobResult | None

    def to_host(self) -> GenerationBatchResult:
        """Enqueue the copies after the forward; do not wait."""
        return to_host(
            self.sent,
            bs=len(self.token_ids),
            has_marks=self.has_marks,
            logprobs=self.logprobs,
            input_logprobs=self.output.input_logprobs,
            hidden=self.output.last_hidden,
        )


class TpModelWorker:
    """One model (or one rank's part of it) on one device, with its sampler.

    Args:
        model_runner: initialised.
        canary: installed on it, or None.
    """

    def __init__(
        self,
        *,
        model_runner: ModelRunner,
        canary: CanaryManager | None = None,
    ) -> None:
        self.model_runner = model_runner
        self._canary = canary
        self.sampler = Sampler()
        self._group = get_tp_group()

    @classmethod
    def create(
        cls, *, server_args: ServerArgs, model_config: ModelConfig
    ) -> TpModelWorker:
        """A worker without speculation.

        Raises:
            ValueError: bad weights or impossible memory.
        """
        runner = ModelRunner(
            server_args=server_args,
            model_config=model_config,
            watcher_bytes_per_slot=watcher_bytes_per_slot(server_args),
            watcher_bytes_per_head=watcher_bytes_per_head(server_args),
        )
        runner.initialize()
        canary = install_canary(server_args=server_args, model_runner=runner)
        return cls(model_runner=runner, canary=canary)

    def capture_graphs(self) -> None:
        """As `Worker.capture_graphs`."""
        # The largest graphs first: the others fit into their memory.
        self.model_runner.init_piecewise_cuda_graphs()
        self.model_runner.init_cuda_graphs()
        for manager in self.canary_managers():
            manager.mark_init_finished()

    def canary_managers(self) -> list[CanaryManager]:
        """The canaries of the KV pools; empty while they are off."""
        return [] if self._canary is None else [self._canary]

    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """Forward, sample one token per row, publish the tokens for the next step."""
        info = batch.sampling_info if masks is None else masks.for_requests(batch)
        return self.run(batch, batch.forward_batch(info)).to_host()

    def run(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> SampledForward:
        """Run a prepared forward and sample; the results stay on the device."""
        canary = self._canary
        if canary is not None and forward_batch.forward_mode is ForwardMode.EXTEND:
            canary.expect_prefixes(
                batch.reqs, batch.prefix_lens(), forward_batch.req_pool_indices
            )
        output = self.model_runner.forward(forward_batch)
        sampled = self.sample(batch, forward_batch, output.next_token_logits)
        rows = batch.sampled_rows()
        sent = [sampled.token_ids]
        if canary is not None:
            sent = canary.ends.send_step(forward_batch, sampled.token_ids, rows)
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
        """One token per row from its logits [R, V], on every rank alike."""
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
            # All ranks see the same logits and the same noise, but not every sum over
            # a distribution on a GPU has the same bits twice.
            self._group.broadcast(sampled.token_ids)
        return sampled

    def _publish(
        self, forward_batch: ForwardBatch, token_ids: Tensor, sampled: Tensor | None
    ) -> None:
        """Write the sampled tokens, or those of the rows `sampled`, to the token table,
        where the next step reads its inputs."""
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
    """Enqueue the copies to pinned memory after the work so far; do not wait.

    Args:
        vectors: int64 vectors, as `GenerationBatchResult.packed` joins them.
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
    """Without a tensor in between, which would delay a step of a small model."""
    return [word for vector in vectors for word in vector.tolist()]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
