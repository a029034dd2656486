"""Tokens that can be recomputed from request and position: the oracle of input checks.

Replaces the model's tokens, in tests only, so that a token that reached the wrong
request is noticed on the device. With speculation it replaces what the target chooses
after each node; drafts are as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.checks import Reason
from kv_canary.hashing import MASK64, mix64, mix64_int
from kv_canary.kernels.reference.report import Report
from kv_canary.records import Launch, Ring, pack_word0_tensor
from kv_canary.view import NO_MANAGER
from sglang.srt.forward.batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from kv_canary.state import CanaryState

# Finite, and nothing that a request asks for makes up for it.
_NEVER = -1e4


def oracle_token(rid_hash: int, position: int, *, vocab_size: int) -> int:
    """The token of request `rid_hash` (`utils.hashing.hash_string`) at `position`:
    mix64(id xor position) as an unsigned number, modulo the vocabulary."""
    return (mix64_int(rid_hash ^ position) & MASK64) % vocab_size


def oracle_tokens(rids_int: Tensor, positions: Tensor, *, vocab_size: int) -> Tensor:
    """`oracle_token` of int64 tensors, [R] int64 on their device."""
    mixed = mix64(rids_int ^ positions)
    low = mixed & 0xFFFFFFFF
    high = (mixed >> 32) & 0xFFFFFFFF
    # Unsigned modulo without 64 unsigned bits: both products stay below 2^63 because
    # a vocabulary has fewer than 2^31 entries.
    folded = (high % vocab_size) * ((1 << 32) % vocab_size) + low
    return torch.remainder(folded, vocab_size)


def oracle_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits like [R, V] by which nothing but `tokens` [R] is chosen."""
    only = torch.full_like(logits, _NEVER)
    return only.scatter_(1, tokens[:, None], 0.0)


class InputOracle:
    """The tokens and positions that the target's inputs must have.

    Args:
        req_rows: rows of the request table.
    """

    def __init__(
        self, *, vocab_size: int, req_rows: int, device: torch.device | str
    ) -> None:
        self._vocab_size = vocab_size
        self._prompt_lens = torch.zeros(req_rows, dtype=torch.int64, device=device)

    def expect_prompts(self, prompt_lens: Tensor, req_rows: Tensor) -> None:
        """The first `prompt_lens[i]` tokens of request row `req_rows[i]` are its
        client's: nobody can know them."""
        self._prompt_lens.index_copy_(0, req_rows, prompt_lens)

    def of(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(tokens, positions), [T] each; -1: a token that is not known, of a prompt or
        a draft. Safe to capture for decodes and verifications."""
        inputs = {
            ForwardMode.EXTEND: self._of_prefill,
            ForwardMode.TARGET_VERIFY: self._of_roots,
        }.get(batch.forward_mode, self._of_decode)
        return inputs(batch)

    def _of_decode(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        positions = batch.prefix_lens
        return self._tokens(batch.rids_int, positions), positions

    def _of_roots(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        rows = len(batch.req_pool_indices)
        positions = batch.positions.view(rows, -1).clone()
        tokens = torch.full_like(positions, -1)
        tokens[:, 0], positions[:, 0] = self._of_decode(batch)
        return tokens.view(-1), positions.view(-1)

    def _of_prefill(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """A request that was retracted is prefilled with the tokens it had gained."""
        assert batch.qo_indptr is not None
        places = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        row = torch.searchsorted(batch.qo_indptr, places, right=True) - 1
        positions = (batch.prefix_lens - batch.qo_indptr[:-1])[row] + places
        prompt_lens = self._prompt_lens[batch.req_pool_indices[row]]
        tokens = self._tokens(batch.rids_int[row], positions)
        return torch.where(positions < prompt_lens, -1, tokens), positions

    def check_accepted(self, state: CanaryState, batch: ForwardBatch) -> None:
        """Report the drafts that a verification accepted and that are not the oracle's.
        Waits for the device.

        Args:
            batch: `accepted` of `StepEnd.finish_verify`; the roots were inputs.
        """
        rows = len(batch.req_pool_indices)
        inputs = batch.input_ids.view(rows, -1)
        number = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        due = batch.prefix_lens[:, None] + number
        tokens = self._tokens(batch.rids_int[:, None], due)
        stays = (number > 0) & (number < batch.extend_lens[:, None])
        stays &= batch.req_pool_indices[:, None] != 0
        of_row = [
            (Ring.REQ_ROW, batch.req_pool_indices),
            (Ring.SERIAL, batch.req_serial),
            (Ring.BATCH_ROW, torch.arange(rows, device=inputs.device)),
        ]
        columns = {
            Ring.REASONS: (stays & (inputs != tokens)) * int(Reason.WRITE_TOKEN),
            Ring.SLOT: batch.out_cache_loc.view(rows, -1),
            Ring.POSITION: due,
            Ring.EXPECTED_WORD0: pack_word0_tensor(tokens, due),
            Ring.FOUND_WORD0: pack_word0_tensor(inputs, due),
            # That of the verification, which has ended.
            Ring.CLOCK: (state.clock - 1).expand_as(due),
            **{name: values[:, None].expand_as(due) for name, values in of_row},
        }
        flat = {name: values.reshape(-1) for name, values in columns.items()}
        Report(state, Launch.HEAD, NO_MANAGER).add(flat)

    def _tokens(self, rids_int: Tensor, positions: Tensor) -> Tensor:
        return oracle_tokens(rids_int, positions, vocab_size=self._vocab_size)
