"""Records a served model's text with the states that an EAGLE3 head reads: the engine
generates, and a recorder keeps the states of every position as they are computed.

Knows the engine and its model; refuses to know draft heads and training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.managers.messages.io_struct import AbortReq, BatchOutput, GenerateReq
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.models.stack import StackOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

MIN_TOKENS = 16
# Every third request is sampled, the others are greedy.
SAMPLED_ONE_IN = 3
TEMPERATURE = 0.8
HEAD_SLICE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One request: its prompt and answer, of n tokens.

    Fields:
        ids: int64 [n].
        aux: [n, 3 H], inputs of the captured layers.
        hidden: [n, H], what the target's head reads.
        best: int64 [n], the target's greedy token after each.
    """

    ids: Tensor
    aux: Tensor
    hidden: Tensor
    best: Tensor


class Recorder:
    """Wraps a model's layer stack and keeps its states by request.

    A row of the pool belongs to one request from its prefill, which begins at position
    0, to the next one's.
    """

    def __init__(self, model: Any, *, rows: int, length: int, device: str) -> None:
        self._model, self._stack = model, model.forward_stack
        size, dtype = (
            model.config.hidden_size,
            model.lm_head.rows(torch.zeros(1, dtype=torch.int64, device=device)).dtype,
        )
        self._length = length
        options: dict[str, Any] = {"device": device}
        self._ids = torch.full((rows + 1, length), -1, dtype=torch.int64, **options)
        self._states = torch.empty(rows + 1, length, 4 * size, dtype=dtype, **options)
        self._size = size
        self.documents: list[Document] = []
        self.num_tokens = 0
        model.forward_stack = self._forward

    def _forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        output: StackOutput = self._stack(input_ids, positions, forward_batch)
        rows = forward_batch.req_pool_indices
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            self._close(rows[forward_batch.prefix_lens == 0].tolist())
            rows = rows.repeat_interleave(
                forward_batch.extend_lens, output_size=len(input_ids)
            )
        self._ids[rows, positions] = input_ids
        self._states[rows, positions] = torch.cat((*output.aux, output.hidden), dim=-1)
        return output

    def _close(self, rows: list[int]) -> None:
        for row in rows:
            count = int((self._ids[row] >= 0).sum())
            if count >= MIN_TOKENS:
                self._keep(self._ids[row, :count].clone(), self._states[row, :count])
            self._ids[row] = -1

    def _keep(self, ids: Tensor, states: Tensor) -> None:
        hidden = states[:, 3 * self._size :].clone()
        best = [
            self._model.lm_head(part).argmax(-1) for part in hidden.split(HEAD_SLICE)
        ]
        # Halves the memory if the model runs in float32.
        self.documents.append(
            Document(
                ids=ids,
                aux=states[:, : 3 * self._size].to(torch.bfloat16, copy=True),
                hidden=hidden.to(torch.bfloat16),
                best=torch.cat(best),
            )
        )
        self.num_tokens += len(ids)

    def close(self) -> None:
        """Keep the states of unfinished requests, and restore the model."""
        with torch.inference_mode():
            self._close(list(range(1, len(self._ids))))
        self._model.forward_stack = self._stack


def build_target(
    model: str, *, device: str, rows: int, length: int, dtype: str
) -> tuple[Scheduler, ListIO]:
    """Serve `model` in this process; nothing replays forwards past the recorder."""
    io = ListIO()
    args = ServerArgs(
        model_path=model,
        device=device,
        dtype=dtype,
        max_running_requests=rows,
        max_total_tokens=rows * length,
        context_length=length,
        chunked_prefill_size=4096,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        disable_piecewise_cuda_graph=True,
    )
    return build_scheduler(args, io), io


def write_documents(
    scheduler: Scheduler,
    io: ListIO,
    prompts: Iterator[list[int]],
    recorder: Recorder,
    *,
    rows: int,
    length: int,
    seconds: float,
    max_tokens: int,
) -> None:
    """Let the target continue prompts until the clock or `max_tokens` recorded ones."""
    began = time.monotonic()
    submitted = finished = 0
    while time.monotonic() - began < seconds and recorder.num_tokens < max_tokens:
        while submitted - finished < rows + 8:
            ids = next(prompts, None)
            if ids is None:
                break
            io.requests.append(request(submitted, ids, length))
            submitted += 1
        if submitted == finished:
            break
        scheduler.step()
        finished += count_finished(io)
    io.requests.append(AbortReq(abort_all=True, message="recorded"))
    while scheduler.step() or scheduler.has_work():
        pass
    io.responses.clear()
    recorder.close()


def request(index: int, ids: list[int], length: int) -> GenerateReq:
    is_sampled = index % SAMPLED_ONE_IN == 0
    params = SamplingParams(
        max_new_tokens=length - len(ids) - 1,
        temperature=TEMPERATURE if is_sampled else 0.0,
    )
    return GenerateReq(rid=f"{index}", input_ids=ids, sampling_params=params)


def count_finished(io: ListIO) -> int:
    """Return how many requests finished.

    Raises:
        SystemExit: one was refused, for instance for tokens of another model.
    """
    found = 0
    for message in io.responses:
        for output in message.outputs if isinstance(message, BatchOutput) else ():
            reason = output.finish_reason
            if reason is not None and reason.type == "abort":
                raise SystemExit(f"prompt {output.rid} is refused: {reason.message}")
            found += reason is not None
    io.responses.clear()
    return found
