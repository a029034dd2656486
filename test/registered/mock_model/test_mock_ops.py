"""The mock model's native ops against their torch references, which oracles share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.models import mock_math, mock_ops
from sglang.srt.models.mock_draft_math import DraftSettings
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="needs the native CPU kernels"
)

ROWS = (0, 1, 3, 190)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (2, 3, 9, 1000, 4096)
# Sums that no integer holds, that lie between two, and what is no number.
ODD = (0.5, 1.5, 2.5, -0.5, 1e9, -3e18, 9.3e18, 1e30, -1e30)
ODD += (float("nan"), float("inf"), float("-inf"), -0.0)


def words(rows: int, seed: int = 0) -> Tensor:
    """Any 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randint(0, 1 << 32, (2, rows), generator=generator)
    return (halves[0] << 32) | halves[1]


def places(rows: int) -> Tensor:
    """Positions, the first ones among them."""
    return words(rows, seed=9).remainder(1 << 20).where(torch.arange(rows) > 1, 0)


def embeddings(rows: int, dtype: torch.dtype) -> Tensor:
    """Codes of tokens in rows that do not touch each other."""
    ids = words(rows).remainder(mock_math.MAX_VOCAB)
    wide = torch.full((rows, mock_math.HIDDEN_SIZE + 5), float("nan"), dtype=dtype)
    wide[:, : mock_math.TOKEN_BITS] = mock_math.signs(ids, mock_math.TOKEN_BITS)
    return wide[:, : mock_math.HIDDEN_SIZE]


def means(rows: int, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention means of sums of signs, with odd numbers in every third row."""
    sums = words(rows * mock_math.HIDDEN_SIZE, seed=3).remainder(256) - 128
    found = (sums.view(rows, mock_math.HIDDEN_SIZE) / counts[:, None]).to(dtype)
    odd = torch.tensor(ODD).repeat(rows)[:rows].to(dtype)
    channel = torch.arange(rows) * 7 % mock_math.HIDDEN_SIZE
    damaged = torch.arange(rows) % 3 == 2
    found[torch.arange(rows)[damaged], channel[damaged]] = odd[damaged]
    if rows > 5:
        found[5] = 0.0  # a slot that was never written
        found[4] = 0.4 / counts[4]
    return found


def states(rows: int, dtype: torch.dtype) -> Tensor:
    folds = words(rows, seed=1), words(rows, seed=2)
    return mock_ops.hidden_state.reference(*folds, places(rows), 1000, dtype)


def damaged_states(rows: int, dtype: torch.dtype) -> Tensor:
    """Hidden states, three of four rows with another fault."""
    damaged = states(rows, dtype)
    damaged[1::4, 70] = float("nan")
    damaged[2::4, 191] *= 2
    damaged[3::4, 128] = 0
    return damaged


def captured(rows: int, dtype: torch.dtype) -> Tensor:
    """All captured states side by side; in some rows they disagree."""
    joined = torch.cat(mock_math.aux_states(damaged_states(rows, dtype)), dim=-1)
    joined[::5, mock_math.HIDDEN_SIZE + 300] *= -1
    joined[4::8, 2 * mock_math.HIDDEN_SIZE :] = -1
    return joined


def assert_equal(op: object, *args: object) -> None:
    """Both forms of an op return the same, in dtype and shape too."""
    got, wanted = op(*args), op.reference(*args)  # type: ignore[operator, attr-defined]
    if isinstance(got, Tensor):
        got, wanted = [got], [wanted]
    assert len(got) == len(wanted)
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_keys_and_what_attention_gets(rows: int, dtype: torch.dtype) -> None:
    assert_equal(mock_ops.embedded_keys, embeddings(rows, dtype), places(rows))
    assert_equal(mock_ops.next_keys, words(rows), places(rows))
    for layer in range(mock_math.NUM_LAYERS):
        assert_equal(mock_ops.qkv, words(rows), layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_folds_of_sound_and_damaged_means(rows: int, dtype: torch.dtype) -> None:
    counts = places(rows) % 8192 + 1
    mean = means(rows, counts, dtype)
    for layer in range(mock_math.NUM_LAYERS):
        assert_equal(mock_ops.fold, mean, counts, layer)
        assert_equal(
            mock_ops.fold_onto, words(rows), words(rows, seed=4), mean, counts, layer
        )


def test_a_damaged_mean_spoils_its_fold_and_no_other() -> None:
    rows = 60
    counts = torch.full((rows,), 3)
    mean = means(rows, counts, torch.float32)
    sound = torch.ones(rows, dtype=torch.bool)
    sums = (mean * 3).round()
    sound &= sums.isfinite().all(-1) & (sums != 0).any(-1)
    before, x = words(rows), words(rows, seed=4)
    found = mock_ops.fold_onto(before, x, mean, counts, 1)
    assert torch.equal(found == before + mock_math.term(x, 1), sound)
    assert 0 < int((~sound).sum()) < rows / 2


@pytest.mark.parametrize("rows", ROWS)
def test_what_is_not_whole_is_spoilt(rows: int) -> None:
    is_whole = words(rows, seed=5) % 3 != 0
    assert_equal(mock_ops.keep_whole, words(rows), is_whole)
    assert torch.equal(
        mock_ops.keep_whole(words(rows), is_whole) == words(rows), is_whole
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_hidden_states(rows: int, dtype: torch.dtype) -> None:
    for vocab in VOCABS:
        assert_equal(
            mock_ops.hidden_state,
            words(rows),
            words(rows, seed=6),
            places(rows),
            vocab,
            dtype,
        )
    assert_equal(mock_ops.aux_states, states(rows, dtype))
    for made in (states, damaged_states, captured):
        assert_equal(mock_ops.read_folds, made(rows, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "acceptance", [(0.6, 0.3, 0.1), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]
)
def test_proposals(
    acceptance: tuple[float, float, float], rows: int, dtype: torch.dtype
) -> None:
    for vocab in VOCABS:
        settings = DraftSettings(vocab_size=vocab, acceptance=acceptance)
        folds = words(rows), words(rows, seed=6)
        assert_equal(mock_ops.proposed_state, *folds, places(rows), settings, dtype)


def test_bad_arguments_are_named() -> None:
    x, place = words(3), places(3)
    wide = torch.zeros(3, mock_math.HIDDEN_SIZE)
    for match, call in {
        r"positions is Int \[3\]": lambda: mock_ops.next_keys(x, place.int()),
        r"positions is Long \[2\]": lambda: mock_ops.embedded_keys(wide, place[:2]),
        r"embedded is Float \[3, 511\]": lambda: mock_ops.embedded_keys(
            wide[:, 1:], place
        ),
        "layer is 2, expected 0 .. 1": lambda: mock_ops.fold(wide, place, 2),
        "layer is -1": lambda: mock_ops.qkv(x, -1, torch.float32),
        "mean is Double": lambda: mock_ops.fold(wide.double(), place, 0),
        "vocab is 0": lambda: mock_ops.hidden_state(x, x, place, 0, torch.float32),
        r"states is Float \[3, 1024\]": lambda: mock_ops.read_folds(
            torch.cat((wide, wide), dim=-1)
        ),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            call()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
