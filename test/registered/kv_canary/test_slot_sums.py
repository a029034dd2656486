"""The sums over all bytes of a slot: every implementation equals the reference, and any
change shows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from canary_world import DEVICE, Backend, backends, each_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.layer_sums import LayerSums, place_keys
from kv_canary.slot_places import MARK, PageLayout, SlotPlaces
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

PAGES = 5


def problem(
    dtype: torch.dtype, *, page_size: int, values: int, layers: int, seed: int = 0
) -> dict[str, Any]:
    """Slots scattered over their pages, in layers at odd distances."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    page_stride = page_size * values + rng.randrange(4)
    order = torch.randperm(page_size * values, generator=generator)
    bases = torch.tensor([n * PAGES * page_stride + n for n in range(layers)])
    size = int(bases[-1]) + PAGES * page_stride
    limits = torch.iinfo(dtype)
    flat = torch.randint(
        limits.min, limits.max + 1, (size,), dtype=dtype, generator=generator
    )
    slots = torch.randint(0, PAGES * page_size, (9,), generator=generator)
    return {
        "values": flat.to(DEVICE),
        "bases": bases.to(DEVICE),
        "offsets": order.view(page_size, values).to(DEVICE),
        "keys": place_keys(values).to(DEVICE),
        "slots": slots.to(DEVICE),
        "page_stride": page_stride,
    }


def sums_of(backend: Backend, given: dict[str, Any]) -> list[list[int]]:
    shape = (len(given["slots"]), len(given["bases"]))
    sums = torch.full(shape, -7, dtype=torch.int64, device=DEVICE)
    backend.launch.sum_slots(**given, sums=sums)
    found: list[list[int]] = sums.tolist()
    return found


def plain_sums(given: dict[str, Any]) -> list[list[int]]:
    """In Python's integers."""
    values, offsets = given["values"].tolist(), given["offsets"].tolist()
    keys, found = given["keys"].tolist(), []
    for slot in given["slots"].tolist():
        page, offset = divmod(slot, len(offsets))
        line = []
        for base in given["bases"].tolist():
            at = base + page * given["page_stride"]
            pairs = zip(offsets[offset], keys, strict=True)
            total = sum(values[at + place] * key for place, key in pairs) % 2**64
            line.append(total - 2**64 * (total >> 63))
        found.append(line)
    return found


@each_backend
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    ("page_size", "values", "layers"), [(1, 16, 1), (3, 24, 2), (8, 40, 3)]
)
def test_sums_are_exact(
    backend: Backend, dtype: torch.dtype, page_size: int, values: int, layers: int
) -> None:
    given = problem(dtype, page_size=page_size, values=values, layers=layers)
    assert sums_of(backend, given) == plain_sums(given)


@each_backend
def test_many_slots_and_none(backend: Backend) -> None:
    """More than one thread's share, and more values than a program's block."""
    given = problem(torch.int16, page_size=4, values=1040, layers=1)
    given["slots"] = torch.arange(20, device=DEVICE).repeat(3)
    reference = backends()[0]
    assert sums_of(backend, given) == sums_of(reference, given)
    given["slots"] = given["slots"][:0]
    assert sums_of(backend, given) == []


def test_no_two_keys_cancel() -> None:
    """For 8,192 values: a slot of 128 KV heads of 64 channels, say."""
    keys = place_keys(8192) % (1 << 33)
    both = torch.cat((keys, -keys % (1 << 33)))
    assert len(both.unique()) == len(both)
    assert bool((keys % 2 == 1).all())


LAYERS, PAGE, SIZE = 3, 4, 16


def pool() -> tuple[list[torch.Tensor], LayerSums]:
    torch.manual_seed(0)
    layers = [torch.randn(PAGES, PAGE, SIZE, device=DEVICE) for _ in range(LAYERS)]
    offsets = torch.arange(PAGE * SIZE).view(PAGE, SIZE)
    layout = PageLayout(
        page_stride=PAGE * SIZE,
        k=offsets[:, : SIZE // 2],
        v=offsets[:, SIZE // 2 :],
    )
    sums = LayerSums(SlotPlaces(layers, layout), num_slots=PAGES * PAGE)
    sums.keep(torch.arange(PAGES * PAGE, device=DEVICE))
    return layers, sums


@settings(max_examples=count(ci=40, full=2000), deadline=None)
@given(
    flips=st.sets(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.integers(0, PAGES * PAGE - 1),
            st.integers(0, SIZE - 1),
            st.integers(0, 31),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_flipped_bits_show_in_their_slots_and_layers(
    flips: set[tuple[int, int, int, int]],
) -> None:
    layers, sums = pool()
    for layer, slot, value, bit in flips:
        words = layers[layer].view(torch.int32).view(-1, SIZE)
        words[slot, value] ^= -(1 << 31) if bit == 31 else 1 << bit
    every = torch.arange(PAGES * PAGE, device=DEVICE)
    differs = (sums.compute(every) != sums.kept).nonzero().tolist()
    assert {(layer, slot) for slot, layer in differs} == {f[:2] for f in flips}
    for layer in range(LAYERS):
        one = sums.compute(every, layer)[:, 0]
        assert one.tolist() == sums.compute(every)[:, layer].tolist()


def test_the_sign_of_every_value() -> None:
    """An even number of equal changes."""
    layers, sums = pool()
    layers[1].neg_()
    every = torch.arange(PAGES * PAGE, device=DEVICE)
    differs = sums.compute(every) != sums.kept
    assert differs[:, 1].all() and not differs[:, [0, 2]].any()


def test_slots_outside_of_the_memory_are_refused() -> None:
    layers, _ = pool()
    offsets = torch.arange(PAGE * SIZE).view(PAGE, SIZE)
    layout = PageLayout(page_stride=PAGE * SIZE, k=offsets, v=offsets)
    places = SlotPlaces(layers[:1], layout)
    with pytest.raises(ValueError, match="24 slots end at value 384 of 320"):
        LayerSums(places, num_slots=24)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_a_mark_is_a_usual_value_in_every_format(dtype: torch.dtype) -> None:
    """Attention may read it, if a store does not happen."""
    values = torch.tensor(MARK).view(dtype).float()
    assert values.isfinite().all() and 0 < values.abs().min() <= values.abs().max() < 4
