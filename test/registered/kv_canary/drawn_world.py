"""Batches that the engine's own sampler draws from, as the canary sees them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
import torch
from canary_world import DEVICE, REQ_ROWS
from torch import Tensor

from kv_canary.drawn import (
    MASK_WORDS,
    SAMPLING_WORDS,
    SERIAL_WORD_MASK,
    DrawnTokens,
    MaskWord,
    Sampling,
    SamplingFlag,
)
from kv_canary.records import UNKNOWN
from sglang.srt.sampling.ops.noise import mix_seed
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampler import Sampler, filtered_probs, process_logits
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask, mask_words

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to sample; `is_padding` for a row of the batch that is no request."""

    params: SamplingParams = GREEDY
    has_grammar: bool = False
    is_padding: bool = False

    @property
    def is_edited(self) -> bool:
        p = self.params
        return bool(p.has_penalty or p.logit_bias or p.min_new_tokens)

    @property
    def is_filtered(self) -> bool:
        p = self.params
        filters = p.top_k != -1 or p.top_p < 1 or p.min_p > 0
        return filters and not p.is_greedy

    @property
    def flags(self) -> SamplingFlag:
        wanted = {
            SamplingFlag.GREEDY: self.params.is_greedy,
            SamplingFlag.EDITED: self.is_edited,
            SamplingFlag.GRAMMAR: self.has_grammar,
        }
        return SamplingFlag(sum(flag for flag, is_set in wanted.items() if is_set))


PADDING = Kind(is_padding=True)
BIAS = {0: 1.5, 7: -2.0}
KINDS = {
    "greedy": Kind(),
    "drawn": Kind(params=SamplingParams(temperature=0.7)),
    "cold": Kind(params=SamplingParams(temperature=0.02)),
    "top k": Kind(params=SamplingParams(temperature=1.3, top_k=5)),
    "top p": Kind(params=SamplingParams(top_p=0.8)),
    "min p": Kind(params=SamplingParams(temperature=1.5, min_p=0.2)),
    "filters": Kind(params=SamplingParams(top_k=20, top_p=0.9, min_p=0.05)),
    "bias": Kind(params=SamplingParams(logit_bias=BIAS)),
    "greedy bias": Kind(params=SamplingParams(temperature=0.0, logit_bias=BIAS)),
    "penalties": Kind(
        params=SamplingParams(
            temperature=0.8,
            frequency_penalty=0.5,
            presence_penalty=0.3,
            repetition_penalty=1.2,
        )
    ),
    "young": Kind(params=SamplingParams(min_new_tokens=60, top_k=50)),
    "grammar": Kind(has_grammar=True),
    "drawn grammar": Kind(params=SamplingParams(temperature=0.9), has_grammar=True),
    "filtered grammar": Kind(params=SamplingParams(top_k=7), has_grammar=True),
    "penal grammar": Kind(
        params=SamplingParams(temperature=1.1, presence_penalty=0.6), has_grammar=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a batch. `spread`: of the logits; `is_strided`: whether rows of
    matrices are parts of longer ones."""

    vocab: int
    width: int = 1
    dtype: torch.dtype = torch.float32
    hidden: int = 24
    spread: float = 2.0
    is_strided: bool = False


def draw(kinds: list[Kind], shape: Shape, *, seed: int = 0) -> DrawnTokens:
    """Sample a batch of these kinds, request rows 1 .. of the table."""
    return _Batch(kinds, shape, seed).draw()


class _Batch:
    def __init__(self, kinds: list[Kind], shape: Shape, seed: int) -> None:
        self.kinds = [_for_vocab(kind, shape.vocab) for kind in kinds]
        self.shape = shape
        self.rng = torch.Generator().manual_seed(seed)
        rows, width = len(kinds), shape.width
        self.count = rows * width
        self.serials = self.ints(1, 1 << 40, rows)
        self.prompts = self.ints(3, 9, rows)
        self.gained = self.ints(0, 50, rows)
        self.extends = self.ints(1, 4, rows)
        self.seeds = self.ints(0, 1 << 60, rows)
        starts = self.prompts + self.gained
        self.positions = (starts[:, None] + torch.arange(width)).view(-1)
        live = torch.tensor([not kind.is_padding for kind in kinds])
        self.req_rows = live.long().cumsum(0) * live
        # More rows of logits and hidden states than tokens, in any order.
        self.at = torch.randperm(self.count + 3, generator=self.rng)[: self.count]
        self.ends = torch.randperm(self.count + 5, generator=self.rng)[: self.count] + 1

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.rng)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A random matrix, perhaps part of a wider one."""
        padding = 6 if self.shape.is_strided else 0
        values = torch.randn(rows, columns + padding, generator=self.rng)
        return (values * self.shape.spread).to(dtype)[:, :columns]

    def draw(self) -> DrawnTokens:
        shape = self.shape
        logits = self.matrix(self.count + 3, shape.vocab, shape.dtype)
        masks = self.masks()
        info = self.info(masks).repeat_rows(shape.width, keep_mask=True)
        own, positions = logits[self.at].to(DEVICE), self.positions.to(DEVICE)
        history = self.history()
        tokens = Sampler()(own, info, positions=positions, history=history).token_ids
        processed = process_logits(
            own.float(), info, positions=positions, history=history
        )
        # Mask and temperature are left to the check.
        plain = [dataclasses.replace(r, params=_cold(r.params)) for r in info.rows]
        edits = SamplingBatchInfo.from_rows(
            plain, vocab_size=shape.vocab, device=DEVICE
        )
        edited = process_logits(
            own.float(), edits, positions=positions, history=history
        )
        hidden = self.matrix(self.count + 5, shape.hidden, shape.dtype)
        inputs = self.matrix(self.count + 3, shape.hidden, shape.dtype)
        inputs[self.at] = hidden[self.ends - 1]
        is_edited = torch.tensor([kind.is_edited for kind in self.kinds])
        is_filtered = torch.tensor([kind.is_filtered for kind in self.kinds])
        drawn = DrawnTokens(
            req_rows=self.req_rows,
            serials=self.serials,
            prefix_lens=self.prompts + self.gained - self.extends,
            extend_lens=self.extends,
            tokens=tokens.cpu(),
            logits_rows=self.at,
            logits=logits,
            inputs=inputs,
            hidden=hidden,
            hidden_ends=self.ends,
            **self.edited(edited.cpu(), is_edited),
            kept=self.rows_only(filtered_probs(processed, info), is_filtered),
            masks=masks,
            sampling=self.sampling(),
        )
        return on_device(drawn)

    def edited(self, values: Tensor, where: Tensor) -> dict[str, Tensor | None]:
        """The edited rows in any order, and where each token's is."""
        where = where.repeat_interleave(self.shape.width)
        number = int(where.sum())
        if not number:
            return {"edited": None, "edited_rows": None}
        rows = torch.full((self.count,), 1 << 40)
        rows[where] = torch.randperm(number, generator=self.rng)
        edited = self.matrix(number, self.shape.vocab, torch.float32)
        edited[rows[where]] = values[where]
        return {"edited": edited, "edited_rows": rows}

    def rows_only(self, values: Tensor, where: Tensor) -> Tensor:
        """Values at the rows of the logits; NaN for rows that nothing may read."""
        where = where.repeat_interleave(self.shape.width)
        rows = self.matrix(self.count + 3, self.shape.vocab, torch.float32)
        rows.fill_(torch.nan)
        rows[self.at[where]] = values.cpu()[where]
        return rows

    def info(self, masks: Tensor) -> SamplingBatchInfo:
        rows = [
            SamplingRow(
                params=kind.params,
                seed=int(self.seeds[r]),
                prompt_len=int(self.prompts[r]),
                stop_ids=(0,) if self.shape.vocab > 1 else (),
            )
            for r, kind in enumerate(self.kinds)
        ]
        vocab = self.shape.vocab
        info = SamplingBatchInfo.from_rows(rows, vocab_size=vocab, device=DEVICE)
        if not any(kind.has_grammar for kind in self.kinds):
            return info
        bits = masks[self.at, : mask_words(vocab)].contiguous()
        return info.with_vocab_mask(bits.to(DEVICE))

    def history(self) -> TokenHistory:
        rows, width = len(self.kinds), self.shape.width
        table = self.ints(0, self.shape.vocab, rows, 80).to(torch.int32)
        return TokenHistory(
            token_table=table.to(DEVICE),
            req_pool_indices=torch.arange(rows).repeat_interleave(width).to(DEVICE),
            lens=self.positions.to(DEVICE),
        )

    def masks(self) -> Tensor:
        vocab, rows = self.shape.vocab, self.count + 3
        words = mask_words(vocab)
        masks = torch.zeros(rows, words + 1 + MASK_WORDS, dtype=torch.int32)
        masks[:, :words] = allocate_vocab_mask(rows, vocab)
        for i, at in enumerate(self.at.tolist()):
            row, place = divmod(i, self.shape.width)
            if not self.kinds[row].has_grammar:
                continue
            masks[at, :words] = self.ints(-(1 << 31), 1 << 31, words).to(torch.int32)
            allowed = int(self.ints(0, vocab, 1))
            bit = 1 << allowed % 32
            masks[at, allowed // 32] |= bit - (1 << 32) if bit >> 31 else bit
            serial = int(self.serials[row]) & SERIAL_WORD_MASK
            masks[at, MaskWord.SERIAL - MASK_WORDS] = serial
            masks[at, MaskWord.ACCEPTED - MASK_WORDS] = int(self.gained[row]) + place
        return masks

    def sampling(self) -> Tensor:
        words = torch.full((REQ_ROWS, SAMPLING_WORDS), UNKNOWN)
        for row, kind in enumerate(self.kinds):
            if kind.is_padding:
                continue
            p, vocab = kind.params, self.shape.vocab
            words[self.req_rows[row]] = torch.tensor(
                [
                    int(self.serials[row]),
                    mix_seed(int(self.seeds[row])),
                    float_word(p.temperature),
                    vocab if p.top_k == -1 else p.top_k,
                    float_word(p.top_p),
                    float_word(p.min_p),
                    int(kind.flags),
                    int(self.prompts[row]),
                    float_word(p.repetition_penalty),
                    float_word(p.frequency_penalty),
                    float_word(p.presence_penalty),
                    p.min_new_tokens,
                ]
            )
        return words


def _cold(params: SamplingParams) -> SamplingParams:
    """The same edits, with nothing done by the temperature."""
    return msgspec.structs.replace(
        params, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0
    )


def _for_vocab(kind: Kind, vocab: int) -> Kind:
    """The kind without bias of ids that the vocabulary lacks."""
    if not kind.params.logit_bias:
        return kind
    bias = {i: b for i, b in kind.params.logit_bias.items() if i < vocab}
    params = msgspec.structs.replace(kind.params, logit_bias=bias)
    return dataclasses.replace(kind, params=params)


def float_word(value: float) -> int:
    """The bits of a float32, as `Sampling` has them."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def on_device(drawn: DrawnTokens) -> DrawnTokens:
    """Move a batch to the device. Strides stay."""
    moved = {}
    for f in dataclasses.fields(drawn):
        value = getattr(drawn, f.name)
        moved[f.name] = _moved(value) if isinstance(value, Tensor) else value
    return DrawnTokens(**moved)


def _moved(t: Tensor) -> Tensor:
    if DEVICE == "cpu" or t.is_contiguous():
        return t.to(DEVICE)
    wide = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE)
    return wide.copy_(t)


def copied(drawn: DrawnTokens) -> DrawnTokens:
    """A batch with memory of its own, in the same layout."""
    tensors = {
        f.name: getattr(drawn, f.name)
        for f in dataclasses.fields(drawn)
        if isinstance(getattr(drawn, f.name), Tensor)
    }
    own = {
        name: torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, device=t.device
        ).copy_(t)
        for name, t in tensors.items()
    }
    return dataclasses.replace(drawn, **own)


def announced(drawn: DrawnTokens, row: int) -> Tensor:
    """The announced words of a row of the batch, to be changed."""
    return drawn.sampling[int(drawn.req_rows[row])]


def set_word(drawn: DrawnTokens, row: int, word: Sampling, value: int) -> None:
    announced(drawn, row)[word] = value
