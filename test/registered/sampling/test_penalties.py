"""Penalties against their formulas, token by token, over a shuffled token table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampler import Sampler, process_logits
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=5, suite="cpu")

VOCAB = 37
WIDTH = 60
GREEDY = {"temperature": 0.0}
PARAMS = [
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, frequency_penalty=0.7),
    SamplingParams(**GREEDY, presence_penalty=-1.2),
    SamplingParams(**GREEDY, repetition_penalty=1.6),
    SamplingParams(**GREEDY, repetition_penalty=0.5),
    SamplingParams(
        temperature=0.8,
        frequency_penalty=-0.3,
        presence_penalty=0.9,
        repetition_penalty=1.2,
        logit_bias={3: 2.5, 30: -4.0},
    ),
]


def by_hand(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """OpenAI's frequency and presence penalties on top of the repetition penalty."""
    result = list(logits)
    for token_id, bias in (params.logit_bias or {}).items():
        result[token_id] += bias
    for token_id in set(prompt + output):
        factor = params.repetition_penalty
        value = result[token_id]
        result[token_id] = value / factor if value > 0 else value * factor
    for token_id, n in Counter(output).items():
        result[token_id] -= n * params.frequency_penalty + params.presence_penalty
    temperature = 1.0 if params.is_greedy else params.temperature
    return [value / temperature for value in result]


@pytest.mark.parametrize("picked", [range(6), [0], [1], [3], [5], [0, 5, 2], [5, 4, 3]])
def test_penalties_equal_the_formula(picked: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(picked))
    for _ in range(count(ci=20, full=300)):
        params = [PARAMS[i] for i in picked]
        n_rows = len(params)
        # Ids beyond a row's length are other requests' tokens and must not count.
        table = torch.randint(
            0, VOCAB, (n_rows + 3, WIDTH), generator=generator, dtype=torch.int32
        )
        slots = torch.randperm(n_rows + 3, generator=generator)[:n_rows]
        lens = torch.randint(0, WIDTH + 1, (n_rows,), generator=generator)
        prompt_lens = [
            int(torch.randint(0, int(n) + 1, (), generator=generator)) for n in lens
        ]
        rows = [
            SamplingRow(params=p, prompt_len=n)
            for p, n in zip(params, prompt_lens, strict=True)
        ]
        info = SamplingBatchInfo.from_rows(rows, vocab_size=VOCAB, device="cpu")
        logits = torch.randn(n_rows, VOCAB, generator=generator) * 3
        before = logits.clone()
        for max_len in (None, int(lens.max())):
            history = TokenHistory(
                token_table=table, req_pool_indices=slots, lens=lens, max_len=max_len
            )
            got = process_logits(logits, info, positions=lens, history=history)
            assert torch.equal(logits, before)
            for row in range(n_rows):
                known = table[slots[row], : lens[row]].tolist()
                expected = by_hand(
                    logits[row].tolist(),
                    params[row],
                    known[: prompt_lens[row]],
                    known[prompt_lens[row] :],
                )
                torch.testing.assert_close(
                    got[row], torch.tensor(expected), rtol=1e-5, atol=1e-5
                )


def test_rows_without_penalty_keep_their_bits() -> None:
    rows = [
        SamplingRow(params=PARAMS[0], prompt_len=2),
        SamplingRow(params=PARAMS[1], prompt_len=2),
    ]
    info = SamplingBatchInfo.from_rows(rows, vocab_size=VOCAB, device="cpu")
    logits = torch.randn(2, VOCAB)
    history = TokenHistory(
        token_table=torch.randint(0, VOCAB, (2, WIDTH), dtype=torch.int32),
        req_pool_indices=torch.arange(2),
        lens=torch.tensor([9, 9]),
    )
    got = process_logits(logits, info, positions=torch.tensor([9, 9]), history=history)
    assert torch.equal(got[0], logits[0])
    assert not torch.equal(got[1], logits[1])


def test_frequency_penalty_breaks_a_loop() -> None:
    row = SamplingRow(params=SamplingParams(**GREEDY, frequency_penalty=1.0))
    info = SamplingBatchInfo.from_rows([row], vocab_size=VOCAB, device="cpu")
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 2.5, 2.0
    table = torch.zeros((1, WIDTH), dtype=torch.int32)
    picks = []
    for step in range(5):
        history = TokenHistory(
            token_table=table,
            req_pool_indices=torch.tensor([0]),
            lens=torch.tensor([step]),
        )
        token = Sampler()(
            logits, info, positions=torch.tensor([step]), history=history
        ).token_ids
        table[0, step] = token
        picks.append(int(token))
    assert picks == [4, 5, 4, 5, 4]


def test_missing_history_is_named() -> None:
    row = SamplingRow(params=PARAMS[1])
    info = SamplingBatchInfo.from_rows([row], vocab_size=VOCAB, device="cpu")
    with pytest.raises(ValueError, match="TokenHistory"):
        Sampler()(torch.zeros(1, VOCAB), info, positions=torch.zeros(1).long())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
