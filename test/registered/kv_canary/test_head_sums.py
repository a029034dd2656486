"""Sums kept of what was written, for attention that compares the bytes it loads."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from canary_world import (
    DEVICE,
    HEADS,
    Backend,
    World,
    backends,
    decode,
    entries,
    findings,
    small_world,
)
from torch import Tensor

from kv_canary.attended import attended_bytes, with_sums
from kv_canary.checks import Reason
from kv_canary.head_sums import (
    MASK32,
    V_PLACE,
    byte_factors,
    head_sums,
)
from kv_canary.layout import (
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
    scattered_fingerprint,
)
from kv_canary.records import Counter, Record, WriterKind
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

# The launches that keep sums.
each_backend = pytest.mark.parametrize(
    "backend",
    [backend for backend in backends() if backend.name != "native"],
    ids=lambda backend: backend.name,
)
WHOLE = [FingerprintMode.ROTATE, FingerprintMode.ALL]


def summed_world(mode: FingerprintMode, *, page_size: int = 1) -> World:
    """Its requests' KV lies in the pool since before there were sums."""
    w = small_world(mode=mode, page_size=page_size)
    w.fingerprint = with_sums(w.fingerprint, heads=HEADS)
    return w


def sums_of(k: Tensor, v: Tensor) -> Tensor:
    """[slots, layers, heads] of K and V [layers, slots, heads, channels]."""
    words = (half.transpose(0, 1).contiguous().view(torch.int64) for half in (k, v))
    return head_sums(*words)


def test_no_two_flipped_bits_cancel() -> None:
    """Of any two bytes of K and V of heads of up to 4,096 bytes: a flip of bit b adds
    or takes 2^b times an odd factor, and only those of equal bits could cancel."""
    factors = byte_factors(torch.arange(2 * V_PLACE))
    assert int(factors.min()) > 0 and int(factors.max()) <= MASK32
    assert bool((factors % 2 == 1).all())
    low = torch.cat((factors, -factors)) & ((1 << 25) - 1)
    assert len(low.unique()) == len(low)


def test_sums_are_those_of_whole_numbers() -> None:
    rng = torch.Generator().manual_seed(3)
    k = torch.randint(-128, 128, (3, 2, 40), generator=rng).to(torch.int8)
    v = torch.randint(-128, 128, (3, 2, 16), generator=rng).to(torch.int8)
    k[0], v[1] = -128, 127
    found = head_sums(k.view(torch.int64), v.view(torch.int64))
    assert found.dtype is torch.int32 and found.shape == (3, 2)
    for slot, head in itertools.product(range(3), range(2)):
        expected = sum(
            byte * int(byte_factors(torch.tensor(first + place)))
            for half, first in ((k, 0), (v, V_PLACE))
            for place, byte in enumerate(half[slot, head].tolist())
        )
        assert int(found[slot, head]) & MASK32 == expected & MASK32


@each_backend
@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_tail_keeps_the_sums_of_what_it_records(
    backend: Backend, mode: FingerprintMode, page_size: int
) -> None:
    w = summed_world(mode, page_size=page_size)
    for extends in ([1, 1, 1], [5, 0, 11]):
        rows = w.rows(extends=extends, pad=1)
        kept = attended_bytes(w.state, w.fingerprint)
        assert kept is not None and kept.in_turn is (mode is FingerprintMode.ROTATE)
        kept.sums.fill_(-7)
        w.write(backend, w.state, rows, WriterKind.EXTEND)
        written = torch.zeros(w.num_slots, dtype=torch.bool, device=DEVICE)
        written[rows.out_cache_loc] = True
        written[:page_size] = False
        expected = sums_of(w.k, w.v)
        assert torch.equal(kept.sums[written], expected[written])
        assert not bool(w.state.tail[written, Record.FINGERPRINT].any())
        assert bool((kept.sums[~written] == -7).all())
        w.lens = [n + e for n, e in zip(w.lens, extends, strict=True)]


@each_backend
@pytest.mark.parametrize(
    ("layers", "heads", "channels", "v_channels", "is_scattered"),
    [(1, 1, 8, 8, False), (3, 5, 40, 24, False), (4, 3, 64, 64, True)],
)
def test_sums_of_odd_shapes(
    backend: Backend,
    layers: int,
    heads: int,
    channels: int,
    v_channels: int,
    is_scattered: bool,
) -> None:
    """V of other channels than K, layers in any order, one head or a few."""
    if is_scattered and backend.name == "reference":
        pytest.skip("the reference reads strides")
    w = small_world(mode=FingerprintMode.ALL)
    memory = torch.randn(2 * layers, w.num_slots, heads, channels).half().to(DEVICE)
    k, v = memory[layers:], memory[:layers, ..., :v_channels].contiguous()
    source = create_fingerprint(
        FingerprintMode.ALL, PoolLayout(groups=[LayerGroup(name="full", k=k, v=v)])
    )
    if is_scattered:
        order = [k[i] for i in (2, 0, 3, 1)], [v[i] for i in (2, 0, 3, 1)]
        source = scattered_fingerprint(FingerprintMode.ALL, order, 1, "full")
        k, v = (torch.stack(half) for half in order)
    w.fingerprint = with_sums(source, heads=heads)
    rows = w.rows(extends=[7, 1, 2])
    w.tail(backend, w.state, rows)
    assert w.fingerprint.sums is not None
    slots = rows.out_cache_loc
    assert torch.equal(w.fingerprint.sums[slots], sums_of(k, v)[slots])


@each_backend
@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("page_size", [1, 4])
def test_where_sums_are_kept_verify_compares_with_them(
    backend: Backend, mode: FingerprintMode, page_size: int
) -> None:
    """As extends and sweeps do; entries are those of the reference."""
    w = summed_world(mode, page_size=page_size)
    w.fingerprint = dataclasses.replace(w.fingerprint, rotation_period=1)
    assert w.fingerprint.sums is not None
    w.fingerprint.sums.copy_(sums_of(w.k, w.v))
    places = [(0, 3), (2, 7), (2, 19)]
    for layer, (request, position) in enumerate(places):
        half = (w.k, w.v)[layer % 2].view(torch.int32)
        half[layer, w.slot(request, position), layer % HEADS, 5] ^= 1 << 31
    rows = w.rows(extends=[5, 1, 2])
    for sweep in (False, True):
        found = []
        for one in (backends()[0], backend):
            state = w.state.clone()
            w.verify(one, state, rows, w.table(rows, with_new=not sweep), sweep=sweep)
            found.append((entries(state), state.counters.tolist()))
            assert {
                (slot, position)
                for reasons, _, slot, position in findings(state)
                if reasons & Reason.VERIFY_REAL_KV
            } == {(w.slot(*place), place[1]) for place in places}
        assert found[0] == found[1]


@each_backend
@pytest.mark.parametrize("mode", WHOLE)
def test_verify_leaves_bytes_to_attention(
    backend: Backend, mode: FingerprintMode
) -> None:
    w = summed_world(mode)
    w.k.view(torch.int32)[1, w.slot(2, 7), 0, 3] ^= 1 << 9
    w.state.tail[w.slot(0, 2), 1] += 1
    rows = decode(w)
    checks = dataclasses.replace(w.checks(), compares_bytes=False)
    backend.launch.verify(w.state, rows, checks, w.table(rows))
    # The record is compared as ever, and the one after it.
    torn = [(int(reasons), slot) for reasons, _, slot, _ in findings(w.state)]
    assert {slot for _, slot in torn} == {w.slot(0, 2), w.slot(0, 3)}
    assert not any(reasons & Reason.VERIFY_REAL_KV for reasons, _ in torn)
    assert int(w.state.counters[Counter.REHASHED_SLOTS]) == 0


@pytest.mark.parametrize("mode", [FingerprintMode.NONE, FingerprintMode.PARTIAL])
def test_only_modes_of_all_bytes_keep_sums(mode: FingerprintMode) -> None:
    w = small_world(mode=mode)
    with pytest.raises(ValueError, match="compares no whole heads"):
        with_sums(w.fingerprint, heads=HEADS)
    assert attended_bytes(w.state, w.fingerprint) is None
