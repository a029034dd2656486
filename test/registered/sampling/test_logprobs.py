"""Logprobs of sampled and prompt tokens against log-softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.sampling import logprobs as logprobs_module
from sglang.srt.sampling.logprobs import (
    LogprobRequest,
    compute_logprobs,
    concat_logprobs,
    prompt_logprobs,
)
from sglang.srt.sampling.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

VOCAB = 101


def build(rows: list[SamplingRow]) -> SamplingBatchInfo:
    return SamplingBatchInfo.from_rows(rows, vocab_size=VOCAB, device="cpu")


def test_distribution_is_that_of_the_edited_logits() -> None:
    """Bias, ban, mask and temperature count; top-k, top-p and min-p do not."""
    rows = [
        SamplingRow(params=SamplingParams(temperature=0.0)),
        SamplingRow(params=SamplingParams(temperature=0.5, top_k=2, top_p=0.5)),
        SamplingRow(params=SamplingParams(logit_bias={7: 2.0}, min_p=0.5)),
        SamplingRow(params=SamplingParams(min_new_tokens=4), stop_ids=(3,)),
        SamplingRow(params=SamplingParams(temperature=2.0)),
        SamplingRow(params=SamplingParams(temperature=0.3, top_k=1)),
    ]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    mask = allocate_vocab_mask(6, VOCAB)
    mask[4] = 0
    mask[4, 1] = 0b1011
    edited = logits.double()
    edited[1] /= 0.5
    edited[2, 7] += 2.0
    edited[3, 3] = float("-inf")
    allowed = torch.tensor([32, 33, 35])
    edited[4] = torch.full((VOCAB,), float("-inf"), dtype=torch.float64).index_copy(
        0, allowed, edited[4, allowed] / 2.0
    )
    expected = torch.log_softmax(edited, dim=-1)

    asked = [4, 0, 1, 2, 3, 5]
    top_ks = [5, 0, 3, 1, VOCAB + 5, 2]
    named = [(33, 0), (), (7,), (3, 3, 100), (), (1,)]
    out = Sampler()(
        logits,
        build(rows).with_vocab_mask(mask),
        positions=torch.zeros(6, dtype=torch.int64),
        logprobs=LogprobRequest.build(asked, top_ks, named=named, device="cpu"),
    )
    assert out.logprobs is not None
    host = out.logprobs.to_host()
    assert len(host) == len(asked)
    for (logprob, top, found), row, k, ids in zip(
        host, asked, top_ks, named, strict=True
    ):
        assert [i for _, i in found] == list(ids)
        for value, i in found:
            # Of a token that the row cannot produce: -inf.
            assert math.isclose(value, expected[row, i], abs_tol=1e-5)
        token = int(out.token_ids[row])
        assert math.isclose(logprob, expected[row, token], abs_tol=1e-5)
        n = min(k, int((expected[row] > float("-inf")).sum()))
        values, best = expected[row].topk(n)
        assert [i for _, i in top] == best.tolist()
        for (value, _), reference in zip(top, values.tolist(), strict=True):
            assert math.isclose(value, reference, abs_tol=1e-5)


def test_tensors_and_their_copy_agree() -> None:
    logits = torch.randn(4, VOCAB)
    tokens = torch.tensor([1, 2, 3, 4])
    result = compute_logprobs(
        logits, tokens, LogprobRequest.build(None, (3,) * 4, device="cpu")
    )
    assert result.packed.shape == (4, 7) and result.packed.dtype == torch.int32
    expected = torch.log_softmax(logits, dim=-1)
    assert torch.equal(result.token_logprobs, expected.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(result.top_values, expected.topk(3).values)
    assert torch.equal(result.top_ids.long(), expected.topk(3).indices)
    assert result.with_packed(result.packed.clone()).to_host() == result.to_host()


def test_large_logits_keep_precision() -> None:
    """Low temperatures make logits of a million; differences must survive."""
    logits = torch.tensor([[1e6, 1e6 - 1.0, 0.0]])
    result = compute_logprobs(
        logits, torch.tensor([1]), LogprobRequest.build(None, (2,), device="cpu")
    )
    expected = -1.0 - math.log(1 + math.exp(-1.0))
    assert math.isclose(result.to_host()[0].logprob, expected, abs_tol=1e-5)


def test_prompt_logprobs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(23, VOCAB)
    tokens = torch.randint(0, VOCAB, (23,))
    whole = prompt_logprobs(logits, tokens, top_k=4, named=(9, 2))
    expected = torch.log_softmax(logits.double(), dim=-1)
    for i, (logprob, top, named) in enumerate(whole.to_host()):
        assert [token for _, token in named] == [9, 2]
        for value, token in named:
            assert math.isclose(value, expected[i, token], abs_tol=1e-5)
        assert math.isclose(logprob, expected[i, tokens[i]], abs_tol=1e-5)
        assert [t for _, t in top] == expected[i].topk(4).indices.tolist()
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 5 * VOCAB)
    chunked = prompt_logprobs(logits, tokens, top_k=4, named=(9, 2))
    assert torch.equal(chunked.packed, whole.packed)
    assert chunked.named == whole.named
    assert chunked.top_ks == whole.top_ks == (4,) * 23
    parts = [
        prompt_logprobs(logits[a:b], tokens[a:b], top_k=4, named=(9, 2))
        for a, b in ((0, 7), (7, 8), (8, 23))
    ]
    assert torch.equal(concat_logprobs(parts).packed, whole.packed)


def test_no_rows() -> None:
    assert concat_logprobs([]).to_host() == []
    empty = prompt_logprobs(torch.empty(0, VOCAB), torch.empty(0).long(), top_k=2)
    assert empty.to_host() == []


def test_requests_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows but 1 top_ks"):
        LogprobRequest.build([0, 1], [3], device="cpu")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
