"""Forces the recorded tokens and ends of requests, whatever the model would choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.sampling.sampler import SamplerOutput

# Returns the recorded tokens of a request, or None if it is not in the record.
TokensOf = Callable[["Req"], "IntArray | None"]


class ForcedEnd:
    """Ends an output after `length` tokens, instead of its stop tokens and strings."""

    def __init__(self, length: int, *, seen: int = 0) -> None:
        self._length = length
        self._seen = seen

    def push(self, token: int) -> str | None:
        """Return a match once all tokens have arrived."""
        self._seen += 1
        return "recorded" if self._seen == self._length else None

    def at(self, tokens: Sequence[int]) -> ForcedEnd:
        """Return a matcher for the same output that has only seen `tokens`."""
        return ForcedEnd(self._length, seen=len(tokens))


def force_tokens(worker: Worker, tokens_of: TokensOf) -> list[int]:
    """Make `worker` sample the recorded tokens; draft verification chooses freely.

    Returns:
        A count per sampled batch: rows whose own token differed.
    """
    target: Any = worker.target_worker if isinstance(worker, EAGLEWorkerV2) else worker
    sample = target.sample
    differing: list[int] = []

    def forced(
        batch: ScheduleBatch, forward_batch: ForwardBatch, logits: Tensor
    ) -> SamplerOutput:
        sampled: SamplerOutput = sample(batch, forward_batch, logits)
        own = sampled.token_ids.tolist()
        wanted = [
            _at(req, tokens_of(req), position, otherwise=token)
            for req, position, token in zip(
                batch.reqs, forward_batch.seq_lens.tolist(), own, strict=True
            )
        ]
        differing.append(sum(a != b for a, b in zip(own, wanted, strict=True)))
        ids = torch.tensor(wanted, dtype=sampled.token_ids.dtype)
        return sampled.forced(ids.to(sampled.token_ids.device))

    target.sample = forced
    return differing


def _at(req: Req, tokens: IntArray | None, position: int, *, otherwise: int) -> int:
    # A chunk that does not end its prompt samples nothing that counts.
    if req.is_chunked or tokens is None or position >= len(tokens):
        return otherwise
    return int(tokens[position])
