"""SamplingBatchInfo: filter, merge and repeat equal a rebuild; flags; sharing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.sampling.ops.noise import mix_seed
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")

VOCAB = 50
PROPERTY = settings(
    derandomize=True, deadline=None, max_examples=count(ci=100, full=1000)
)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 2, 7, 50, 999]),
    top_p=st.sampled_from([0.3, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_new_tokens=st.sampled_from([0, 3]),
    logit_bias=st.none()
    | st.dictionaries(
        st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=3
    ),
)
plain = st.just(SamplingParams(temperature=0.0))
rows = st.builds(
    SamplingRow,
    params=plain | params,
    seed=st.integers(0, 2**63 - 1),
    prompt_len=st.integers(0, 100),
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True).map(tuple),
)
row_lists = st.lists(rows, max_size=6)


def build(rows: list[SamplingRow]) -> SamplingBatchInfo:
    return SamplingBatchInfo.from_rows(rows, vocab_size=VOCAB, device="cpu")


def assert_same(left: SamplingBatchInfo, right: SamplingBatchInfo) -> None:
    for field in dataclasses.fields(SamplingBatchInfo):
        assert_same_value(getattr(left, field.name), getattr(right, field.name))


def assert_same_value(left: object, right: object) -> None:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif dataclasses.is_dataclass(left) and dataclasses.is_dataclass(right):
        for field in dataclasses.fields(left):
            if field.compare:
                assert_same_value(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple) and isinstance(right, tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same_value(a, b)
    else:
        assert left == right


@PROPERTY
@given(row_lists)
def test_rows_to_tensors(batch: list[SamplingRow]) -> None:
    info = build(batch)
    assert len(info) == len(batch)
    sampled = [r for r in batch if not r.params.is_greedy]
    assert info.is_all_greedy == (not sampled)
    assert info.has_greedy == (len(sampled) < len(batch))
    assert info.needs_sort == any(
        r.params.top_p < 1 or r.params.top_k != -1 for r in sampled
    )
    assert info.needs_min_p == any(r.params.min_p > 0 for r in sampled)
    assert info.has_penalty == any(r.params.has_penalty for r in batch)
    assert info.has_penalty == (info.has_output_penalty or info.has_repetition_penalty)
    assert info.has_logit_bias == any(bool(r.params.logit_bias) for r in batch)
    assert info.has_min_new_tokens == any(
        r.params.min_new_tokens > 0 and r.stop_ids for r in batch
    )
    if info.is_plain_greedy:
        return
    for i, row in enumerate(batch):
        p, greedy = row.params, row.params.is_greedy
        assert info.temperatures[i] == (1.0 if greedy else p.temperature)
        assert info.greedy_rows[i] == greedy
        assert info.seeds[i] == mix_seed(row.seed)
        assert info.prompt_lens[i] == row.prompt_len
        assert info.min_new_tokens[i] == p.min_new_tokens
        assert info.frequency_penalties[i] == p.frequency_penalty
        assert info.presence_penalties[i] == p.presence_penalty
        assert info.repetition_penalties[i] == p.repetition_penalty
        if not greedy:
            assert info.top_ks[i] == (VOCAB if p.top_k == -1 else min(p.top_k, VOCAB))
            assert abs(float(info.top_ps[i]) - p.top_p) < 1e-6
            assert abs(float(info.min_ps[i]) - p.min_p) < 1e-6


@PROPERTY
@given(row_lists, st.data())
def test_filter_is_a_rebuild(batch: list[SamplingRow], data: st.DataObject) -> None:
    keep = data.draw(
        st.lists(st.sampled_from(range(len(batch))), unique=True)
        if batch
        else st.just([])
    )
    assert_same(build(batch).filter(keep), build([batch[i] for i in keep]))


@PROPERTY
@given(row_lists, row_lists)
def test_merge_is_a_rebuild(left: list[SamplingRow], right: list[SamplingRow]) -> None:
    assert_same(build(left).merge(build(right)), build(left + right))


@PROPERTY
@given(row_lists, st.integers(1, 4))
def test_repeat_is_a_rebuild(batch: list[SamplingRow], times: int) -> None:
    repeated = build(batch).repeat_rows(times)
    rebuilt = build([row for row in batch for _ in range(times)])
    assert len(repeated) == len(batch) * times
    # Sparse entries may come in another order; everything else is equal.
    for name in ("logit_bias", "stop_tokens"):
        assert dense(repeated, name).equal(dense(rebuilt, name))
    assert_same(
        dataclasses.replace(repeated, logit_bias=None, stop_tokens=None),
        dataclasses.replace(rebuilt, logit_bias=None, stop_tokens=None),
    )


def dense(info: SamplingBatchInfo, name: str) -> torch.Tensor:
    out = torch.zeros(len(info), VOCAB, dtype=torch.float64)
    entries = info.logit_bias if name == "logit_bias" else info.stop_tokens
    if entries is not None:
        values = (
            torch.ones(entries.ids.shape) if entries.values is None else entries.values
        )
        out.index_put_((entries.rows, entries.ids), values.double(), accumulate=True)
    return out


def test_repeat_carries_the_mask() -> None:
    mask = allocate_vocab_mask(2, VOCAB)
    mask[1] = 5
    batch = [SamplingRow(params=SamplingParams())] * 2
    repeated = build(batch).with_vocab_mask(mask).repeat_rows(3)
    assert repeated.vocab_mask is not None
    assert repeated.vocab_mask[:, 0].tolist() == [-1] * 3 + [5] * 3
    assert not build([]).with_vocab_mask(mask).is_plain_greedy


def test_plain_greedy_batches_share_their_tensors() -> None:
    a = [SamplingRow(params=SamplingParams(temperature=0.0), seed=i) for i in range(5)]
    first, second = build(a), build(a[::-1])
    assert first.is_plain_greedy
    assert first.floats is second.floats and first.ints is second.ints


def test_info_is_frozen() -> None:
    info = build([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.needs = 3  # type: ignore[misc]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
