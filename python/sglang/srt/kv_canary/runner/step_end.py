"""The end of a step: notes of what was sampled, findings, and the words for the host.

Findings of all groups of slots are united before they are sent; those of all ranks on
the host (`CanaryGate.inspect`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.accepted import AcceptedPath, SampledTokens
from kv_canary.findings import RING
from kv_canary.records import UNKNOWN
from sglang.srt.kv_canary.kernels import (
    finish_accepted,
    finish_step,
    gather_findings,
    note_tokens,
    send_tokens,
)

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.draws import DrawCheck
    from sglang.srt.kv_canary.edits import EditBounds
    from sglang.srt.kv_canary.single_forward_manager.manager import (
        CanaryTarget,
        SingleForwardManager,
    )
    from sglang.srt.layers.logits_processor import HeadCall
    from sglang.srt.sampling.sampler import Choice, SamplerOutput


class StepEnd:
    """Ends the steps of one pool.

    Args:
        last: of the forward that ends a step.
        draws: the check of what is sampled; None for a draft.
    """

    def __init__(
        self,
        target: CanaryTarget,
        *,
        last: SingleForwardManager,
        draws: DrawCheck | None,
    ) -> None:
        self._state = target.groups[0].state
        # Findings of these groups are united with the primary group's.
        self._others = [group.state for group in target.groups[1:]]
        self._states = target.states
        self._oracle = target.oracle
        self._last = last
        self._draws = draws

    def finish_step(self, forward_batch: ForwardBatch) -> Tensor:
        """Findings of a step whose tokens all stay, for callers that sample nothing;
        once per step, after its forward.

        Returns:
            int64 [STATUS_WORDS + R] on the device, which the next forward overwrites:
            see `kv_canary/findings.py`.
        """
        findings, *others = self._last.findings(forward_batch)
        return unite(findings, others)

    def send_step(
        self,
        forward_batch: ForwardBatch,
        sampled: SamplerOutput,
        rows: Tensor | None,
        *,
        head: HeadCall,
        bounds: EditBounds | None,
    ) -> list[Tensor]:
        """Check and note the sampler's own result, before it is published: the next
        inputs are compared with it. Once per step whose tokens all stay, after its
        forward.

        Args:
            sampled: one token per row.
            rows: int64, the rows whose token counts; None: all.
            head: the call of the head whose logits were sampled from.
            bounds: as for `DrawCheck.check_step`.

        Returns:
            int64 vectors on the device: tokens, findings as of `finish_step`, and marks
            [2 * R], for `CanaryGate.confirm`; on a GPU in one vector.
        """
        tokens = sampled.token_ids
        if rows is not None:
            counting = torch.full_like(tokens, UNKNOWN)
            counting[rows] = tokens[rows]
            tokens = counting
        findings, *others = self._last.findings(forward_batch)
        if self._draws is not None and self._draws.is_on and sampled.is_drawn:
            self._draws.check_step(
                forward_batch,
                tokens,
                head=head,
                choice=sampled.choice,
                bounds=bounds,
                findings=findings,
            )
        drawn = SampledTokens(
            req_rows=forward_batch.req_pool_indices,
            serials=forward_batch.req_serial,
            tokens=tokens,
            prefix_lens=forward_batch.prefix_lens,
            extend_lens=forward_batch.extend_lens,
        )
        if self._state.is_cpu:
            # To join them would delay a step of a small model.
            findings = unite(findings, others)
            return [tokens, findings, note_tokens(self._state, drawn).view(-1)]
        # The launch unites the findings of two groups.
        other = None
        if others:
            other, *others = others
        findings = unite(findings, others)
        return [send_tokens(self._state, drawn, findings, other)]

    def finish_verify(
        self,
        path: AcceptedPath,
        *,
        draft: StepEnd | None,
        salts: Tensor,
        accepted: Callable[[], ForwardBatch],
        head: HeadCall,
        choice: Choice | None,
        masks: Tensor | None,
        bounds: EditBounds | None,
    ) -> Tensor:
        """Check and note what a verification accepted, and gather the findings of both
        pools.

        Args:
            draft: of the draft's pool, whose findings are also sent; None for drafts
                without KV.
            salts: as for `launches.finish_accepted`.
            accepted: makes the batch of the tokens whose KV stays, `extend_lens` of
                each row, for the token oracle.
            head, choice, masks, bounds: as for `DrawCheck.check_path`.

        Returns:
            `AcceptedWords.words`, on the device.
        """
        if self._oracle is not None:
            self._oracle.check_accepted(self._state, accepted())
        sent = finish_accepted(
            self._state,
            None if draft is None else draft._state,
            path,
            salts=salts,
            checks=True,
        )
        if self._draws is not None and self._draws.is_on:
            self._draws.check_path(
                path,
                head=head,
                choice=choice,
                masks=masks,
                bounds=bounds,
                findings=sent.findings,
            )
        for state in self._others:
            combine(sent.findings, finish_step(state, path.rows(salts)))
        if self._states is not None:
            combine(sent.findings, self._states.note_accepted(path, salts))
        for state in () if draft is None else draft._others:
            combine(sent.draft_findings, gather_findings(state, path.req_rows))
        return sent.words


def combine(findings: Tensor, others: Tensor) -> None:
    """Put the findings of another group, int64 [STATUS_WORDS + R], to `findings`, whose
    counters stay."""
    findings[RING:] |= others[RING:]


def unite(findings: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Put the findings of other groups to `findings`, and return it."""
    for other in others:
        combine(findings, other)
    return findings
