"""Words and lineages: one definition on the host, in numpy, torch, C++ and Triton."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from canary_world import DEVICE, Backend, backends, long
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary import records
from kv_canary.checks import Reason, reason_labels
from kv_canary.findings import STATUS_WORDS
from kv_canary.hashing import MASK64, mix64_int, to_signed64
from kv_canary.records import (
    NUM_COUNTERS,
    RING_WORDS,
    TokenRun,
    WriterKind,
    draft_seed,
    extend_lineage,
    extend_lineages,
    fingerprint_keys,
    lineage_term,
    lineage_terms,
    pack_word0,
    pack_word0_tensor,
    pack_word3,
    pack_word3_tensor,
    request_lineage,
    sample_place,
    unpack_word0,
    unpack_word3,
)
from kv_canary.state import create_state
from kv_canary.view import ForwardView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

REPO = Path(__file__).resolve().parents[3]

profile = settings(max_examples=60, deadline=None, derandomize=True)
tokens = st.integers(0, 2**31 - 1)
positions = st.integers(0, 2**31 - 1)
words = st.integers(-(2**63), 2**63 - 1)


@profile
@given(token=tokens, position=st.integers(-1, 2**31 - 1), salt=words)
def test_term_is_the_same_on_host_and_device(
    token: int, position: int, salt: int
) -> None:
    packed = (position << 32 | token) & MASK64
    key = mix64_int(salt ^ 0x5EEDCA11AB1E0B0E)
    expected = mix64_int(mix64_int(packed) ^ key)
    assert lineage_term(token, position, salt) == expected
    terms = lineage_terms(long([token]), long([position]), long([salt]))
    assert terms.tolist() == [expected]
    assert unpack_word0(pack_word0(token, position)) == (token, position)
    assert pack_word0_tensor(long([token]), long([position])).tolist() == [
        pack_word0(token, position)
    ]
    if position == -1:
        assert draft_seed(token, salt) == expected


@profile
@given(
    ids=st.lists(tokens, max_size=40),
    cut=st.integers(0, 40),
    salt=words,
    start=positions,
)
def test_lineage_of_a_list(ids: list[int], cut: int, salt: int, start: int) -> None:
    total = sum(lineage_term(t, p, salt) for p, t in enumerate(ids))
    assert request_lineage(ids, salt) == to_signed64(total & MASK64)
    first, rest = ids[:cut], ids[cut:]
    half = request_lineage(first, salt)
    whole = extend_lineage(half, rest, start_position=len(first), salt=salt)
    assert whole == request_lineage(ids, salt)


@profile
@given(
    runs=st.lists(
        st.tuples(words, st.lists(tokens, max_size=12), positions, words), max_size=9
    ),
    at_once=st.integers(1, 40),
)
def test_lineages_of_many_runs(
    runs: list[tuple[int, list[int], int, int]], at_once: int
) -> None:
    due = [
        to_signed64(
            (before + sum(lineage_term(t, start + i, salt) for i, t in enumerate(ids)))
            & MASK64
        )
        for before, ids, start, salt in runs
    ]
    arrays = [
        TokenRun(before, np.array(ids, dtype=np.int64), start, salt)
        for before, ids, start, salt in runs
    ]
    with patch.object(records, "HASHED_AT_ONCE", at_once):
        assert extend_lineages(arrays) == due


@pytest.mark.parametrize("backend", backends(), ids=lambda b: b.name)
def test_lineages_of_the_kernels(backend: Backend) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(ids=st.lists(tokens, max_size=9), start=positions, salt=words, seed=words)
    def check(ids: list[int], start: int, salt: int, seed: int) -> None:
        state = create_state(
            num_slots=2, req_rows=3, ring_capacity=1, num_managers=1, device=DEVICE
        )
        n = len(ids)
        places = list(range(start, start + n))
        rows = ForwardView(
            req_rows=long([2]),
            prefix_lens=long([0]),
            extend_lens=long([n]),
            qo_indptr=long([0, n]),
            input_ids=long(ids),
            positions=long(places),
            out_cache_loc=long(places),
            serials=long([0]),
            salts=long([salt]),
            seeds=long([seed]),
        )
        findings = long([0] * (STATUS_WORDS + 1))
        backend.launch.finish_step(state, rows, findings)
        due = extend_lineage(seed, ids, start_position=start, salt=salt)
        assert int(state.expected_lineage[2]) == due

    check()


@profile
@given(
    clock=st.integers(0, 2**36 - 1),
    kind=st.sampled_from(WriterKind),
    serial=st.integers(0, 2**48),
)
def test_word3(clock: int, kind: WriterKind, serial: int) -> None:
    word = pack_word3(clock, kind, serial)
    assert unpack_word3(word) == (clock, kind, serial % 2**24)
    packed = pack_word3_tensor(torch.tensor([clock]), kind, torch.tensor([serial]))
    assert packed.tolist() == [word]


def test_order_of_tokens_matters_and_salts_separate() -> None:
    assert request_lineage([1, 2], 0) != request_lineage([2, 1], 0)
    assert request_lineage([1, 2], 0) != request_lineage([1, 2], 1)
    assert request_lineage([], 5) == 0
    assert len({lineage_term(t, p, 0) for t in range(90) for p in range(90)}) == 8100


def test_names_and_sizes() -> None:
    assert reason_labels(Reason.READ_SET | Reason.VERIFY_TORN) == [
        "verify_torn",
        "read_set",
    ]
    assert [r.value for r in Reason] == [1 << i for i in range(len(Reason))]
    assert (RING_WORDS, NUM_COUNTERS) == (16, 9)


def test_samples_cover_all_layers_and_chunks() -> None:
    lineages = torch.arange(4000)
    layer, chunk = sample_place(lineages, layers=5, chunks=7)
    assert sorted(set(zip(layer.tolist(), chunk.tolist(), strict=True))) == [
        (a, b) for a in range(5) for b in range(7)
    ]
    keys = fingerprint_keys(torch.arange(9)[:, None], torch.arange(50))
    assert keys.unique().numel() == 450


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
