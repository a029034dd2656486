"""Sampling parameters of the rows of a batch, as tensors and host flags.

Built from one host row per request, so filtering and merging are rebuilds and cannot
drift from a fresh batch. Knows nothing of logits, requests or grammars (it only carries
the grammars' token mask).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_

import torch

from sglang.srt.sampling.ops.noise import mix_seed
from sglang.srt.sampling.sampling_params import SamplingParams

# What a row needs, as bits, so that a batch's needs are one OR over its rows.
_GREEDY = 1
_SAMPLED = 2
_SORT = 4
_MIN_P = 8
_OUTPUT_PENALTY = 16
_REPETITION = 32
_MIN_NEW_TOKENS = 64
_LOGIT_BIAS = 128
_PENALTY = _OUTPUT_PENALTY | _REPETITION
_EDITS = _PENALTY | _LOGIT_BIAS | _MIN_NEW_TOKENS

_N_FLOATS = 6
_N_INTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One request's constants; make it once per request and reuse it in every batch.

    Fields:
        params: validated sampling parameters.
        seed: the request's seed (the scheduler draws one if the user gave none).
        prompt_len: tokens before the first output token.
        stop_ids: EOS and stop token ids, banned until `min_new_tokens` are out.
    """

    params: SamplingParams
    seed: int = 0
    prompt_len: int = 0
    stop_ids: Collection[int] = ()
    needs: int = field(init=False, compare=False, repr=False)
    floats: tuple[float, ...] = field(init=False, compare=False, repr=False)
    ints: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        p = self.params
        greedy = p.is_greedy
        needs = _GREEDY if greedy else _SAMPLED
        if not greedy and (p.top_p < 1.0 or p.top_k != -1):
            needs |= _SORT
        if not greedy and p.min_p > 0.0:
            needs |= _MIN_P
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            needs |= _OUTPUT_PENALTY
        if p.repetition_penalty != 1.0:
            needs |= _REPETITION
        if p.min_new_tokens > 0 and self.stop_ids:
            needs |= _MIN_NEW_TOKENS
        if p.logit_bias:
            needs |= _LOGIT_BIAS
        floats = (
            1.0 if greedy else p.temperature,
            1.0 if greedy else p.top_p,
            0.0 if greedy else p.min_p,
            p.frequency_penalty,
            p.presence_penalty,
            p.repetition_penalty,
        )
        ints = (
            1 if greedy else p.top_k,
            self.key,
            self.prompt_len,
            p.min_new_tokens,
            int(greedy),
        )
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "floats", floats)
        object.__setattr__(self, "ints", ints)

    @property
    def key(self) -> int:
        """Key of its noise."""
        return mix_seed(self.seed)

    @property
    def edits_logits(self) -> bool:
        """Whether bias, penalties or a minimum length change its logits."""
        return bool(self.needs & _EDITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTokens:
    """Token ids attached to rows: entry i is token `ids[i]` of row `rows[i]`.

    Fields:
        rows, ids: [E] int64 on the device.
        values: [E] float32 on the device (logit bias), or None.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None = None

    def repeat(self, times: int) -> SparseTokens:
        """Repeat the entries of row r for each copy of that row, as in
        `repeat_rows`."""
        values = self.values
        return SparseTokens(
            rows=_repeat_indices(self.rows, times),
            ids=self.ids.repeat_interleave(times),
            values=None if values is None else values.repeat_interleave(times),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatchInfo:
    """Sampling state of R rows. Only the mask changes from step to step.

    If every row is greedy and asks for nothing else (`is_plain_greedy`), the per-row
    tensors are shared neutral constants. A reader must check the flag of a feature
    before it reads the feature's tensors.

    Fields:
        rows: host rows, in batch order.
        vocab_size: width of the logits.
        needs: OR of the rows' needs; read it through the `is_*`, `needs_*`, `has_*`
            properties.
        floats: [6, R] float32 and ints [5, R] int64 on the device; read them through
            the named properties.
        filter_rows: [F] int64, the rows with top-k or top-p, or None if there are none.
        max_top_k: the largest top-k of those rows; `vocab_size` if one of them only
            filters by top-p, 0 if there are none.
        penalty_rows: [P] int64, the rows with a penalty, or None if there are none.
        logit_bias, stop_tokens: sparse entries, or None if no row has any.
        vocab_mask: int32 bit mask [R, ceil(vocab_size / 32)] on the device; a set bit
            allows the id. None if no row has a grammar. Set for each step with
            `with_vocab_mask`.
    """

    rows: tuple[SamplingRow, ...]
    vocab_size: int
    needs: int
    floats: torch.Tensor
    ints: torch.Tensor
    max_top_k: int = 0
    filter_rows: torch.Tensor | None = None
    penalty_rows: torch.Tensor | None = None
    logit_bias: SparseTokens | None = None
    stop_tokens: SparseTokens | None = None
    vocab_mask: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[SamplingRow],
        *,
        vocab_size: int,
        device: torch.device | str,
    ) -> SamplingBatchInfo:
        """Build the batch of `rows`, in order. It has no mask yet."""
        rows = tuple(rows)
        device = torch.device(device)
        needs = reduce(or_, [row.needs for row in rows], 0)
        if not needs & ~_GREEDY:
            floats, ints = _plain_constants(len(rows), device)
            return cls(
                rows=rows, vocab_size=vocab_size, needs=needs, floats=floats, ints=ints
            )
        floats, ints = _row_tensors(rows, vocab_size, device)
        return cls(
            rows=rows,
            vocab_size=vocab_size,
            needs=needs,
            floats=floats,
            ints=ints,
            max_top_k=_max_top_k(rows, vocab_size),
            filter_rows=_rows_with(_SORT, rows, needs, device),
            penalty_rows=_rows_with(_PENALTY, rows, needs, device),
            logit_bias=_bias_entries(rows, device) if needs & _LOGIT_BIAS else None,
            stop_tokens=_stop_entries(rows, device)
            if needs & _MIN_NEW_TOKENS
            else None,
        )

    def filter(self, keep: Sequence[int]) -> SamplingBatchInfo:
        """Return the rows at host indices `keep`, in that order, without the mask."""
        rows = self.rows
        return self.from_rows(
            [rows[i] for i in keep], vocab_size=self.vocab_size, device=self.device
        )

    def merge(self, other: SamplingBatchInfo) -> SamplingBatchInfo:
        """Return these rows followed by the rows of `other`, without the masks."""
        return self.from_rows(
            self.rows + other.rows, vocab_size=self.vocab_size, device=self.device
        )

    def repeat_rows(self, times: int, *, keep_mask: bool = False) -> SamplingBatchInfo:
        """Repeat each row `times` times in succession: a request becomes its tree
        nodes.

        `keep_mask`: the mask already has a row for each copy.
        """
        mask, filtering, penal = self.vocab_mask, self.filter_rows, self.penalty_rows
        return dataclasses.replace(
            self,
            rows=tuple(row for row in self.rows for _ in range(times)),
            floats=self.floats.repeat_interleave(times, dim=1),
            ints=self.ints.repeat_interleave(times, dim=1),
            filter_rows=None
            if filtering is None
            else _repeat_indices(filtering, times),
            penalty_rows=None if penal is None else _repeat_indices(penal, times),
            logit_bias=self.logit_bias and self.logit_bias.repeat(times),
            stop_tokens=self.stop_tokens and self.stop_tokens.repeat(times),
            vocab_mask=mask
            if mask is None or keep_mask
            else mask.repeat_interleave(times, dim=0),
        )

    def with_vocab_mask(self, mask: torch.Tensor | None) -> SamplingBatchInfo:
        """Return the same rows under the grammar masks of this step."""
        return dataclasses.replace(self, vocab_mask=mask)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.floats.device

    @property
    def is_all_greedy(self) -> bool:
        return not self.needs & _SAMPLED

    @property
    def is_plain_greedy(self) -> bool:
        """Whether nothing but an argmax of the raw logits is asked for."""
        return not self.needs & ~_GREEDY and self.vocab_mask is None

    @property
    def has_greedy(self) -> bool:
        return bool(self.needs & _GREEDY)

    @property
    def needs_sort(self) -> bool:
        return bool(self.needs & _SORT)

    @property
    def needs_min_p(self) -> bool:
        return bool(self.needs & _MIN_P)

    @property
    def filters_draws(self) -> bool:
        """Whether some row is drawn after top-k, top-p or min-p."""
        return self.needs_sort or self.needs_min_p

    @property
    def has_penalty(self) -> bool:
        return bool(self.needs & _PENALTY)

    @property
    def has_output_penalty(self) -> bool:
        """Whether some row has a frequency or presence penalty."""
        return bool(self.needs & _OUTPUT_PENALTY)

    @property
    def has_repetition_penalty(self) -> bool:
        return bool(self.needs & _REPETITION)

    @property
    def has_min_new_tokens(self) -> bool:
        return bool(self.needs & _MIN_NEW_TOKENS)

    @property
    def edits_logits(self) -> bool:
        """Whether bias, penalties or a minimum length change the logits of some row."""
        return bool(self.needs & _EDITS)

    @property
    def has_logit_bias(self) -> bool:
        return bool(self.needs & _LOGIT_BIAS)

    @property
    def temperatures(self) -> torch.Tensor:
        """[R] float32; 1 for greedy rows."""
        return self.floats[0]

    @property
    def top_ps(self) -> torch.Tensor:
        """[R] float32; 1 for greedy rows."""
        return self.floats[1]

    @property
    def min_ps(self) -> torch.Tensor:
        """[R] float32; 0 for greedy rows."""
        return self.floats[2]

    @property
    def frequency_penalties(self) -> torch.Tensor:
        """[R] float32."""
        return self.floats[3]

    @property
    def presence_penalties(self) -> torch.Tensor:
        """[R] float32."""
        return self.floats[4]

    @property
    def repetition_penalties(self) -> torch.Tensor:
        """[R] float32."""
        return self.floats[5]

    @property
    def top_ks(self) -> torch.Tensor:
        """[R] int64 in [1, vocab_size]; 1 for greedy rows."""
        return self.ints[0]

    @property
    def seeds(self) -> torch.Tensor:
        """[R] int64: `mix_seed` of each request's seed, the key of its noise."""
        return self.ints[1]

    @property
    def prompt_lens(self) -> torch.Tensor:
        """[R] int64."""
        return self.ints[2]

    @property
    def min_new_tokens(self) -> torch.Tensor:
        """[R] int64."""
        return self.ints[3]

    @property
    def greedy_rows(self) -> torch.Tensor:
        """[R] bool."""
        return self.ints[4] != 0


def _upload(
    values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy host values to the device without waiting for it."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def _plain_constants(
    n_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return neutral `floats` and `ints`, shared by all plain greedy batches of a
    size."""
    row = SamplingRow(params=SamplingParams(temperature=0.0))
    return _row_tensors((row,) * n_rows, 1, device)


def _row_tensors(
    rows: tuple[SamplingRow, ...], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `floats` [6, R] and `ints` [5, R] of SamplingBatchInfo."""
    floats: list[float] = []
    ints: list[int] = []
    for float_column in zip(*(row.floats for row in rows), strict=True):
        floats.extend(float_column)
    for int_column in zip(*(row.ints for row in rows), strict=True):
        ints.extend(int_column)
    ints[: len(rows)] = [
        k if 0 < k < vocab_size else vocab_size for k in ints[: len(rows)]
    ]
    return (
        _upload(floats, torch.float32, device).view(_N_FLOATS, len(rows)),
        _upload(ints, torch.int64, device).view(_N_INTS, len(rows)),
    )


def _max_top_k(rows: tuple[SamplingRow, ...], vocab_size: int) -> int:
    top_ks = [row.params.top_k for row in rows if row.needs & _SORT]
    if -1 in top_ks:
        return vocab_size
    return min(vocab_size, max(top_ks, default=0))


def _rows_with(
    need: int, rows: tuple[SamplingRow, ...], needs: int, device: torch.device
) -> torch.Tensor | None:
    """Return [n] int64: indices of the rows with `need`, or None if no row has it."""
    if not needs & need:
        return None
    indices = [i for i, row in enumerate(rows) if row.needs & need]
    return _upload(indices, torch.int64, device)


def _repeat_indices(rows: torch.Tensor, times: int) -> torch.Tensor:
    """Return [n * times]: index r becomes r * times .. r * times + times - 1."""
    copies = torch.arange(times, device=rows.device)
    return (rows[:, None] * times + copies).flatten()


def _bias_entries(rows: tuple[SamplingRow, ...], device: torch.device) -> SparseTokens:
    entries = [
        (i, token_id, value)
        for i, row in enumerate(rows)
        for token_id, value in (row.params.logit_bias or {}).items()
    ]
    return SparseTokens(
        rows=_upload([e[0] for e in entries], torch.int64, device),
        ids=_upload([e[1] for e in entries], torch.int64, device),
        values=_upload([e[2] for e in entries], torch.float32, device),
    )


def _stop_entries(rows: tuple[SamplingRow, ...], device: torch.device) -> SparseTokens:
    entries = [
        (i, token_id)
        for i, row in enumerate(rows)
        if row.needs & _MIN_NEW_TOKENS
        for token_id in row.stop_ids
    ]
    return SparseTokens(
        rows=_upload([e[0] for e in entries], torch.int64, device),
        ids=_upload([e[1] for e in entries], torch.int64, device),
    )
