"""Whose logits gave whose token: the host announces how each request is sampled, and
each step's tokens are compared with what that draws from the head's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kv_canary.drawn import DrawnTokens, Sampling, SamplingFlag, noise_key
from kv_canary.records import UNKNOWN
from sglang.srt.kv_canary.edits import EditTable, Positions
from sglang.srt.kv_canary.kernels import check_drawn

if TYPE_CHECKING:
    from kv_canary.accepted import AcceptedPath
    from kv_canary.state import CanaryState
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.edits import EditBounds
    from sglang.srt.layers.logits_processor import HeadCall
    from sglang.srt.sampling.sampler import Choice
    from sglang.srt.sampling.sampling_batch_info import SamplingRow

# Wide enough for any vocabulary.
_ALL_IDS = 1 << 40


class SampledOwner(Protocol):
    """A request that tokens are sampled for."""

    serial: int
    sampling_row: SamplingRow
    req_pool_idx: int


class DrawCheck:
    """The check of one target's draws.

    Args:
        state: of the primary group.
        token_table: int32 [request rows, width], the tokens of each request.

    Attributes:
        is_on: whether draws are checked; not in forwards that only rebuild a pool.
    """

    def __init__(self, state: CanaryState, *, token_table: Tensor) -> None:
        self._state = state
        shape = (len(token_table), len(Sampling))
        self._sampling = state.counters.new_full(shape, UNKNOWN)
        self._edits = EditTable(self._sampling, token_table)
        self._ones = state.counters.new_ones(len(token_table))
        self.is_on = False

    def announce(
        self, owners: Sequence[SampledOwner], rows: Tensor, words: Tensor
    ) -> None:
        """Announce how the requests in rows [R] int64 of the table are sampled; `words`
        are their `announced_words` on the device."""
        self._edits.announce(
            [owner.req_pool_idx for owner in owners],
            [owner.sampling_row for owner in owners],
        )
        self._sampling.index_copy_(0, rows, words.t())

    def check_step(
        self,
        forward_batch: ForwardBatch,
        tokens: Tensor,
        *,
        head: HeadCall,
        choice: Choice,
        bounds: EditBounds | None,
        findings: Tensor,
    ) -> None:
        """Check one token per row, and put what is found to `findings`.

        Args:
            tokens: int64 [R]; negative for rows that sampled nothing.
            bounds: None if no row edits its logits.
        """
        info, ends = forward_batch.sampling_info, forward_batch.qo_indptr
        assert info is not None
        edited = None
        if bounds is not None:
            due = Positions(
                req_rows=forward_batch.req_pool_indices,
                serials=forward_batch.req_serial,
                starts=forward_batch.seq_lens,
                gained=tokens[:, None],
                at=None,
                logits=head.logits,
                masks=info.vocab_mask,
            )
            edited = self._edits.edit(due, bounds)
        hidden_ends = None if ends is None else ends[1:]
        is_same = hidden_ends is None and head.inputs is head.hidden
        check_drawn(
            self._state,
            DrawnTokens(
                req_rows=forward_batch.req_pool_indices,
                serials=forward_batch.req_serial,
                prefix_lens=forward_batch.prefix_lens,
                extend_lens=forward_batch.extend_lens,
                tokens=tokens,
                logits_rows=None,
                logits=head.logits,
                inputs=None if is_same else head.inputs,
                hidden=None if is_same else head.hidden,
                hidden_ends=hidden_ends,
                edited=edited and edited.values,
                edited_rows=edited and edited.rows,
                kept=choice.kept,
                masks=info.vocab_mask,
                sampling=self._sampling,
            ),
            findings,
        )

    def check_path(
        self,
        path: AcceptedPath,
        *,
        head: HeadCall,
        choice: Choice | None,
        masks: Tensor | None,
        bounds: EditBounds | None,
        findings: Tensor,
    ) -> None:
        """Check the tokens that a verification's requests gain, likewise.

        Args:
            head: of all nodes.
            choice: of all nodes; None if lowered thresholds also accept others.
            masks: of all nodes.
            bounds: None if no request edits its logits.
        """
        nodes = path.accept_index.view(-1)
        edited = None
        if bounds is not None and choice is not None:
            due = Positions(
                req_rows=path.req_rows,
                serials=path.serials,
                starts=path.prefix_lens + 1,
                gained=path.gained,
                at=path.accept_index,
                logits=head.logits,
                masks=masks,
            )
            edited = self._edits.edit(due, bounds)
        is_same = head.inputs is head.hidden
        check_drawn(
            self._state,
            DrawnTokens(
                req_rows=path.req_rows,
                serials=path.serials,
                prefix_lens=path.prefix_lens,
                extend_lens=self._ones[: path.num_rows],
                tokens=path.gained.view(-1),
                logits_rows=nodes,
                logits=head.logits,
                inputs=None if is_same else head.inputs,
                hidden=None if is_same else head.hidden,
                hidden_ends=None if is_same else nodes + 1,
                edited=edited and edited.values,
                edited_rows=edited and edited.rows,
                kept=None if choice is None else choice.kept,
                masks=masks,
                sampling=self._sampling,
                draws=choice is not None,
            ),
            findings,
        )


def announced_words(owners: Sequence[SampledOwner]) -> npt.NDArray[np.int64]:
    """Return `Sampling` words of requests, int64 [SAMPLING_WORDS, R], by what their
    clients asked for."""
    rows = [owner.sampling_row for owner in owners]
    params = [row.params for row in rows]
    greedy = np.array([p.is_greedy for p in params])
    edits = np.array([row.edits_logits for row in rows])
    bound = np.array([p.grammar_key is not None for p in params])
    top_ks = np.array([p.top_k for p in params])
    columns = {
        Sampling.SERIAL: [owner.serial for owner in owners],
        Sampling.KEY: [noise_key(row.seed) for row in rows],
        Sampling.TEMPERATURE: _bits([p.temperature for p in params]),
        Sampling.TOP_K: np.where(top_ks > 0, top_ks, _ALL_IDS),
        Sampling.TOP_P: _bits([p.top_p for p in params]),
        Sampling.MIN_P: _bits([p.min_p for p in params]),
        Sampling.FLAGS: SamplingFlag.GREEDY * greedy
        | SamplingFlag.EDITED * edits
        | SamplingFlag.GRAMMAR * bound,
        Sampling.PROMPT_LEN: [row.prompt_len for row in rows],
        Sampling.REPETITION: _bits([p.repetition_penalty for p in params]),
        Sampling.FREQUENCY: _bits([p.frequency_penalty for p in params]),
        Sampling.PRESENCE: _bits([p.presence_penalty for p in params]),
        Sampling.MIN_NEW_TOKENS: [p.min_new_tokens for p in params],
    }
    words = np.empty((len(Sampling), len(owners)), dtype=np.int64)
    for column, values in columns.items():
        words[column] = values
    return words


def _bits(values: Sequence[float]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.float32).view(np.int32)
