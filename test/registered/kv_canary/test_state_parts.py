"""Sums of runs of states in another engine's memory: every word counts in its turn; the
Triton kernel adds up what the reference does."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from kv_canary.head_sums import mix32
from kv_canary.kernels.reference import state_parts as reference
from kv_canary.layout import FingerprintMode
from kv_canary.state_parts import RUNS, SAMPLED_WORDS, StateParts, Turn
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = (FingerprintMode.PARTIAL, FingerprintMode.ROTATE, FingerprintMode.ALL)
SLOTS, LARGE = 7, 20_000


def pool(seed: int = 0) -> list[list[Tensor]]:
    """Two groups in one memory, as vLLM overlays them, slots with gaps between them."""
    torch.manual_seed(seed)
    # Finite in all of these formats.
    half = torch.randn(SLOTS, 2 * (LARGE + 100), device=DEVICE).bfloat16()
    memory = half.view(torch.float32)
    return [
        [half[:, 2:92].unflatten(1, (3, 30)), memory[:, 100:].unflatten(1, (4, -1))],
        [half[:, :30], half[:, 600:1400].view(torch.float16), memory[:, 900:1157]],
    ]


def summed(
    parts: StateParts, slots: list[int], groups: list[int], turns: list[int]
) -> Tensor:
    found = torch.full((2, len(slots), parts.num_parts), -7, device=DEVICE)
    vectors = (torch.tensor(v, device=DEVICE) for v in (slots, groups, turns))
    reference.sum_states(*vectors, parts, found)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_the_sum_of_its_words(mode: FingerprintMode) -> None:
    tensors = pool()
    parts = StateParts(tensors, mode)
    turns = [Turn.WHOLE, Turn.NOTHING, 0, 5, 1_000_003]
    for group, of_group in enumerate(tensors):
        count = len(turns)
        found = summed(parts, [2] * count, [group] * count, turns)
        for number, tensor in enumerate(of_group):
            words = tensor[2].flatten().view(torch.int32).long()
            place = torch.arange(len(words), device=DEVICE)
            terms = words * (mix32(place) | 1)
            run = {
                FingerprintMode.PARTIAL: min(SAMPLED_WORDS, len(words)),
                FingerprintMode.ROTATE: min(
                    max(-(-len(words) // RUNS), SAMPLED_WORDS), len(words)
                ),
                FingerprintMode.ALL: len(words),
            }[mode]
            runs = terms.split(run)
            due = [terms.sum(), 0, *(runs[t % len(runs)].sum() for t in turns[2:])]
            assert found[0, :, number].tolist() == [int(each) for each in due]
        assert not found[1].any() and not found[:, :, len(of_group) :].any()


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_counts_in_its_turn(mode: FingerprintMode) -> None:
    tensors = pool()
    parts = StateParts(tensors, mode)
    large = parts.words[0][1]
    turns = [*range(-(-large.shape[1] // parts.runs[0][1])), Turn.WHOLE]
    rows = [4] * len(turns), [0] * len(turns), turns
    before = summed(parts, *rows)
    for bit, place in ((0, 0), (31, 511), (7, large.shape[1] - 1)):
        large[4, place] ^= -(1 << 31) if bit == 31 else 1 << bit
        differs = (summed(parts, *rows) != before)[0, :, 1].nonzero()[:, 0].tolist()
        due = place // parts.runs[0][1]
        assert differs == [due, len(turns) - 1]
        before = summed(parts, *rows)


def test_values_that_are_not_finite_are_counted() -> None:
    tensors = pool()
    parts = StateParts(tensors, FingerprintMode.ALL)
    nan, inf = float("nan"), float("inf")
    tensors[0][0][1, 1, 4] = -inf  # bfloat16, the low half of a word
    tensors[0][0][1, 2, 1] = nan  # and the high one
    tensors[0][1][1, 3, 7] = inf
    tensors[1][1][3, 0], tensors[1][1][3, 1] = nan, inf  # both in one word
    tensors[1][1][3, 4] = 65504.0  # the largest of float16
    found = summed(parts, [1, 3, 3, 1], [0, 1, 0, 0], [-1, -1, -1, -2])
    assert found[1].tolist()[0] == [2, 1, 0] and found[1, 1, 1] == 1
    assert not found[1, 3].any()


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_adds_up_what_the_reference_does(mode: FingerprintMode) -> None:
    pytest.importorskip("triton")
    kernels = importlib.import_module("kv_canary.kernels.triton.state_parts")
    tensors = pool(1)
    tensors[0][1][3, 2, 5] = float("inf")
    parts = StateParts(tensors, mode)
    slots = torch.tensor([3, 1, 6, 3, 0, 2], device=DEVICE)
    groups = torch.tensor([0, 0, 0, 1, 1, 1], device=DEVICE)
    turns = torch.tensor([Turn.WHOLE, 77, 3, Turn.NOTHING, 12, 0], device=DEVICE)
    found, due = torch.full((2, 2, 6, parts.num_parts), 9, device=DEVICE)
    kernels.sum_states(slots, groups, turns, parts, found)
    reference.sum_states(slots, groups, turns, parts, due)
    assert found.tolist() == due.tolist()
    assert due[1, 0, 1] == 1


def test_states_that_are_no_words_are_refused() -> None:
    gaps = torch.zeros(4, 6, 8)[:, :, :4]
    odd = torch.zeros(4, 5, dtype=torch.float16)
    for tensor in (gaps, odd):
        with pytest.raises(ValueError, match="a state"):
            StateParts([[tensor]], FingerprintMode.ALL)
