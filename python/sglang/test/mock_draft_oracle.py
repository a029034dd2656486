"""The oracle of the mock draft heads: computes accept lengths from tokens only.

Knows the rule of the draft tree, but neither workers nor KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.draft_trees.buffers import DraftLevels
from sglang.srt.draft_trees.ops.tree.op import select_top_k_ref
from sglang.srt.models import mock_math
from sglang.srt.models.mock_draft_math import DraftSettings, proposal

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape

# Scores closer than this, relative to their size, may swap order under the rounding of
# a softmax.
CLOSE = 4e-6
# Maximum logits in memory at a time.
LOGITS_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request's tokens: `prompt_len` of the prompt, then the whole output."""

    tokens: Sequence[int]
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted iterations of one request.

    Fields:
        accept_lens: tokens of each iteration, 1 .. S + 1, including the bonus. The last
            one counts all verified tokens, even if the request ends inside it.
        off_first_branch: accepted drafts of each iteration that are not the first
            choice, or do not descend from first choices only.
        is_close: iterations where two scores at a cut of the tree differ by no more
            than rounding, so that another softmax may accept another number.
    """

    accept_lens: tuple[int, ...]
    off_first_branch: tuple[int, ...]
    is_close: tuple[bool, ...]

    def explains(self, accept_lens: Sequence[int]) -> bool:
        """Whether these are the predicted lengths, except in close iterations.

        Meant for a prediction that followed `accept_lens`.
        """
        return len(accept_lens) == len(self.accept_lens) and all(
            found == expected or is_close
            for found, expected, is_close in zip(
                accept_lens, self.accept_lens, self.is_close, strict=True
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOracle:
    """Predicts accept lengths.

    Assumes greedy decoding, the same tree shape throughout, one prefill that gives the
    first token, and requests that end by length only.

    Fields:
        shape: K, S and D of the trees.
        settings: of the head's config.json.
        is_exact: whether branches attend to their ancestors; else a head that attends
            reads the KV of its branch's own columns, whichever branch it continues.
        dtype: of the models: it rounds the logits.
    """

    shape: TreeShape
    settings: DraftSettings
    is_exact: bool = True
    dtype: torch.dtype = torch.float32

    def predict(
        self,
        answers: Sequence[Answer],
        *,
        followed: Sequence[Sequence[int]] | None = None,
    ) -> list[Prediction]:
        """Return one prediction per answer.

        Args:
            followed: observed accept lengths. If given, iteration i is predicted for
                the length they lead to, so that one difference does not cause more.
        """
        out: list[Prediction] = []
        for start in range(0, len(answers), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            walked = None if followed is None else followed[chunk]
            out += self._predict(answers[chunk], walked)
        return out

    def _predict(
        self, answers: Sequence[Answer], followed: Sequence[Sequence[int]] | None
    ) -> list[Prediction]:
        history = _History.from_answers(
            answers,
            vocab_size=self.settings.vocab_size,
            room=self.shape.num_steps,
        )
        found: list[list[tuple[int, int, bool]]] = [[] for _ in answers]
        lens = [answer.prompt_len for answer in answers]
        ends = [len(answer.tokens) - 1 for answer in answers]
        while rows := [r for r, end in enumerate(ends) if lens[r] < end]:
            gained = self._iterate(
                history, torch.tensor(rows), torch.tensor([lens[row] for row in rows])
            )
            for row, values in zip(rows, gained, strict=True):
                seen = () if followed is None else followed[row][len(found[row]) :]
                found[row].append(values)
                lens[row] += max(seen[0], 1) if seen else values[0]
        return [_prediction(iterations) for iterations in found]

    def _iterate(
        self, history: _History, rows: Tensor, lens: Tensor
    ) -> list[tuple[int, int, bool]]:
        """Predict one iteration of each of `rows` [b], at these KV lengths [b].

        Returns:
            (accept length, accepted off the first branch, is close) per row.
        """
        steps = torch.arange(1, self.shape.num_steps + 1)
        truth = history.tokens[rows[:, None], lens[:, None] + steps]
        levels, is_close = self._draft(
            history.fold0[rows, lens], history.fold1[rows, lens], lens
        )
        accepted, off_first = self._follow(levels, truth)
        is_close |= _is_close(levels.scores, self.shape.num_draft_tokens - 1)[:, -1]
        return list(
            zip(
                (accepted + 1).tolist(),
                off_first.tolist(),
                is_close.tolist(),
                strict=True,
            )
        )

    def _draft(
        self, fold0: Tensor, fold1: Tensor, lens: Tensor
    ) -> tuple[DraftLevels, Tensor]:
        """Return all levels of the trees of b requests, and whether a cut was close.

        The newest token is number `lens`; the folds [b] include it.
        """
        shape, count = self.shape, len(lens)
        levels = DraftLevels.allocate(count, shape, device="cpu")
        input_ids = torch.empty(count * shape.topk, dtype=torch.int64)
        hidden_rows = torch.empty_like(input_ids)
        is_close = torch.zeros(count, dtype=torch.bool)
        hot = self.settings.hot_token_ids()
        follows = self.is_exact or self.settings.source == "hidden"
        places = lens
        for level in range(shape.num_steps):
            probs, ids = self._candidates(fold0, fold1, places)
            select_top_k_ref(
                level,
                shape=shape,
                topk_p=probs,
                topk_index=ids,
                hot_token_id=hot,
                levels=levels,
                input_ids=input_ids,
                hidden_rows=hidden_rows,
            )
            if level:
                begin = shape.topk + shape.topk**2 * (level - 1)
                block = levels.scores[:, begin : begin + shape.topk**2]
                cuts = _is_close(block, shape.topk)
                # The order matters to a branch that reads its own column.
                is_close |= cuts[:, -1] if follows else cuts.any(-1)
            if level == shape.num_steps - 1:
                break
            if level == 0 or follows:
                fold0, fold1 = fold0[hidden_rows], fold1[hidden_rows]
            places = lens.repeat_interleave(shape.topk) + level + 1
            fold0, fold1 = _append(fold0, fold1, input_ids, places)
        return levels, is_close

    def _candidates(
        self, fold0: Tensor, fold1: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return probabilities and draft ids [R, K] of the best candidates per row.

        Among equals the lower id comes first.
        """
        code, weights = proposal(fold0, fold1, places, self.settings)
        hidden = mock_math.signs(code, mock_math.TOKEN_BITS) * weights
        codes = self.settings.head_codes().T
        chunk = max(LOGITS_AT_ONCE // codes.shape[1], 1)
        parts = [self._best(rows @ codes) for rows in hidden.split(chunk)]
        probs, ids = zip(*parts, strict=True)
        return torch.cat(probs), torch.cat(ids)

    def _best(self, exact: Tensor) -> tuple[Tensor, Tensor]:
        logits = exact.to(self.dtype).float()
        # Logits are multiples of 1/128 below 32: with the id as the last digits they
        # are distinct integers that float32 holds.
        size = mock_math.MAX_VOCAB
        keys = logits * (128 * size) - torch.arange(logits.shape[1])
        ids = keys.topk(self.shape.topk, dim=-1).indices
        if self.shape.topk == 1:
            return torch.ones(ids.shape), ids
        chosen = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
        return chosen.exp(), ids

    def _follow(self, levels: DraftLevels, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Count the accepted drafts when the target's tokens are `truth` [b, S].

        Returns:
            The number accepted, and how many of them are off the first branch; [b].
        """
        shape, k = self.shape, self.shape.topk
        best = levels.scores.sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(levels.scores, dtype=torch.bool)
        chosen.scatter_(1, best[:, : shape.num_draft_tokens - 1], True)
        parents = levels.parents.repeat_interleave(k, dim=1)
        place = torch.full((len(truth),), -1)
        is_on_path = torch.ones(len(truth), dtype=torch.bool)
        is_first = is_on_path.clone()
        accepted, off_first = torch.zeros_like(place), torch.zeros_like(place)
        for level in range(shape.num_steps):
            begin = 0 if level == 0 else k + k * k * (level - 1)
            block = slice(begin, begin + (k if level == 0 else k * k))
            is_match = (
                (levels.tokens[:, block] == truth[:, level, None])
                & (parents[:, block] == place[:, None])
                & chosen[:, block]
            )
            is_on_path = is_on_path & is_match.any(-1)
            place = begin + is_match.int().argmax(-1)
            is_first = is_first & (place % k == 0)
            accepted += is_on_path
            off_first += is_on_path & ~is_first
        return accepted, off_first


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """Tokens and the folds up to each of them, int64 [requests, positions].

    Positions after a request's last token hold the target's own continuation.
    """

    tokens: Tensor
    fold0: Tensor
    fold1: Tensor

    @classmethod
    def from_answers(
        cls, answers: Sequence[Answer], *, vocab_size: int, room: int
    ) -> _History:
        """Compute the folds of `answers`, and `room` tokens of continuation."""
        sizes = torch.tensor([len(answer.tokens) for answer in answers])
        longest = int(sizes.max()) if answers else 0
        tokens = torch.zeros(len(answers), longest + room, dtype=torch.int64)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer.tokens)] = torch.tensor(answer.tokens)
        places = torch.arange(longest).expand(len(answers), longest).reshape(-1)
        x = mock_math.key_layer0(tokens[:, :longest].reshape(-1), places)
        folds: list[Tensor] = []
        for layer in range(mock_math.NUM_LAYERS):
            terms = mock_math.term(x, layer).view(len(answers), longest)
            folds.append(torch.zeros_like(tokens))
            folds[layer][:, :longest] = terms.cumsum(1)
            x = mock_math.key_layer1(folds[0][:, :longest].reshape(-1), places)
        history = cls(tokens=tokens, fold0=folds[0], fold1=folds[1])
        history._continue(sizes, vocab_size, room)
        return history

    def _continue(self, sizes: Tensor, vocab_size: int, count: int) -> None:
        rows = torch.arange(len(sizes))
        for place in (sizes + step for step in range(count)):
            before0 = self.fold0[rows, place - 1]
            before1 = self.fold1[rows, place - 1]
            token = mock_math.next_token(before0, before1, place - 1, vocab_size)
            after0, after1 = _append(before0, before1, token, place)
            self.tokens[rows, place] = token
            self.fold0[rows, place] = after0
            self.fold1[rows, place] = after1


def _append(
    fold0: Tensor, fold1: Tensor, tokens: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the folds [T] after adding `tokens` [T] at `places` [T]."""
    after0 = fold0 + mock_math.term(mock_math.key_layer0(tokens, places), 0)
    after1 = fold1 + mock_math.term(mock_math.key_layer1(after0, places), 1)
    return after0, after1


def _is_close(scores: Tensor, kept: int) -> Tensor:
    """Whether neighbours among the best `kept` + 1 of the scores [b, C] might swap.

    bool [b, kept]; the last entry is the cut.
    """
    if kept >= scores.shape[1]:
        return torch.zeros(len(scores), kept, dtype=torch.bool)
    best = scores.topk(kept + 1, dim=-1).values
    return best[:, :-1] - best[:, 1:] <= CLOSE * best[:, :-1]


def _prediction(iterations: list[tuple[int, int, bool]]) -> Prediction:
    lens, off_first, close = zip(*iterations, strict=True) if iterations else ((),) * 3
    return Prediction(accept_lens=lens, off_first_branch=off_first, is_close=close)
