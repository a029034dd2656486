"""Runs the forward of a batch and samples: the scheduler's view of the model."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import ServerArgs


class TpModelWorker:
    """One model on one device, with its sampler."""

    def __init__(self, *, server_args: ServerArgs, model_config: ModelConfig) -> None:
        self.model_runner = ModelRunner(
            server_args=server_args, model_config=model_config
        )
        self.model_runner.initialize()
        self.sampler = Sampler(server_args.sampling_backend or "pytorch")

    def forward_batch_generation(
        self, batch: ScheduleBatch, sampling_info: SamplingBatchInfo
    ) -> GenerationBatchResult:
        """Forward, sample one token per row, publish the tokens for the next step."""
        forward_batch = batch.forward_batch(sampling_info)
        output = self.model_runner.forward(forward_batch)
        sampled = self.sampler(
            output.next_token_logits,
            sampling_info,
            positions=forward_batch.seq_lens,
            history=batch.token_history(),
            logprobs=batch.logprob_request,
        )
        self._publish(forward_batch, batch, sampled.token_ids)
        return GenerationBatchResult(
            tokens=sampled.token_ids,
            logprobs=sampled.logprobs,
            input_logprobs=output.input_logprobs,
            hidden=output.hidden_states,
        )

    def _publish(
        self, forward_batch: ForwardBatch, batch: ScheduleBatch, token_ids: Tensor
    ) -> None:
        """Write the sampled tokens to the device token table: the next step's
        inputs."""
        table = self.model_runner.req_to_token_pool.token_table
        rows, positions = forward_batch.req_pool_indices, forward_batch.seq_lens
        counted = batch.sampled_rows()
        if counted is not None:
            rows, positions = rows[counted], positions[counted]
            token_ids = token_ids[counted]
        table[rows, positions] = token_ids.to(table.dtype)
