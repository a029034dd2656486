"""Sampler against brute force: filters, draws, seeds, mixed batches, odd logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sglang.srt.sampling.ops import noise, row_ops
from sglang.srt.sampling.ops.choose_tokens.op import choose_tokens
from sglang.srt.sampling.ops.noise import mix_seed, uniform
from sglang.srt.sampling.ops.row_ops import argmax_rows, inverse_cdf, negated_best
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampler import (
    Sampler,
    edit_logits,
    filtered_probs,
    heat,
    process_logits,
    target_weights,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=12, suite="cpu")

GREEDY = SamplingParams(temperature=0.0)
WORD = (1 << 64) - 1


def make_info(
    params: list[SamplingParams], vocab_size: int, seeds: list[int] | None = None
) -> SamplingBatchInfo:
    rows = [
        SamplingRow(params=p, seed=i if seeds is None else seeds[i])
        for i, p in enumerate(params)
    ]
    return SamplingBatchInfo.from_rows(rows, vocab_size=vocab_size, device="cpu")


def positions(n_rows: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n_rows)


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def reference_filter(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """Kept probabilities of one row, by the definition, one id at a time."""
    scaled = torch.from_numpy(logits)[None] / params.temperature
    probs = torch.softmax(scaled, dim=-1)[0].double().tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = np.zeros(len(probs))
    before = 0.0
    for rank, token_id in enumerate(order):
        if params.top_k != -1 and rank >= params.top_k:
            break
        if (
            rank > 0
            and params.top_p < 1.0
            and before >= float(np.float32(params.top_p))
        ):
            break
        floor = np.float32(probs[order[0]]) * np.float32(params.min_p)
        if np.float32(probs[token_id]) < floor:
            break
        kept[token_id] = probs[token_id]
        before += probs[token_id]
    return kept


FILTERS = [
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1, temperature=2.0),
    SamplingParams(top_k=2),
    SamplingParams(top_k=40, temperature=1.3),
    SamplingParams(top_k=100000),
    SamplingParams(top_p=0.1),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=7, top_p=0.8),
    SamplingParams(top_k=30, top_p=0.9, min_p=0.02, temperature=0.5),
    SamplingParams(top_p=0.6, min_p=0.3, temperature=3.0),
]


@pytest.fixture(params=["host", "accelerator"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both branches of the row operations, the accelerator's on CPU tensors."""
    if request.param == "accelerator":
        monkeypatch.setattr(row_ops, "on_host", lambda x: False)
    return str(request.param)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000, 4097])
def test_filters_equal_the_definition(vocab_size: int, path: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(FILTERS), vocab_size, generator=generator) * 3
    # Rounded logits make many exact ties, also at the cuts.
    for values in (logits, (logits * 2).round() / 2, torch.zeros_like(logits)):
        info = make_info(FILTERS, vocab_size)
        processed = process_logits(
            values, info, positions=positions(len(FILTERS)), history=None
        )
        got = filtered_probs(processed, info).double().numpy()
        for row, params in enumerate(FILTERS):
            if params.is_greedy:
                continue
            expected = reference_filter(values[row].numpy(), params)
            np.testing.assert_array_equal(got[row], expected, err_msg=str(params))


def test_filters_do_not_depend_on_the_batch() -> None:
    vocab_size = 500
    logits = (torch.randn(len(FILTERS), vocab_size) * 2).round()
    together = make_info(FILTERS, vocab_size)
    at = positions(len(FILTERS), 17)
    sampler = Sampler()
    joint = sampler(logits, together, positions=at).token_ids
    for row, params in enumerate(FILTERS):
        alone = make_info([params], vocab_size, [row])
        token = sampler(logits[row : row + 1], alone, positions=at[row : row + 1])
        assert token.token_ids.item() == joint[row].item(), params


@pytest.mark.parametrize("vocab_size", [130, 4096])
def test_seeded_tokens_survive_any_batch(vocab_size: int, path: str) -> None:
    generator = torch.Generator().manual_seed(1)
    n_rows = count(ci=24, full=64)
    pool = [*FILTERS, GREEDY, SamplingParams(temperature=1.7)]
    params = [pool[i % len(pool)] for i in range(n_rows)]
    seeds = [1000 + i for i in range(n_rows)]
    logits = torch.randn(n_rows, vocab_size, generator=generator) * 2
    at = torch.randint(0, 5000, (n_rows,), generator=generator)
    sampler = Sampler()
    whole = sampler(logits, make_info(params, vocab_size, seeds), positions=at)
    for _ in range(count(ci=20, full=200)):
        size = int(torch.randint(1, n_rows + 1, (), generator=generator))
        rows = torch.randperm(n_rows, generator=generator)[:size].tolist()
        info = make_info(
            [params[i] for i in rows], vocab_size, [seeds[i] for i in rows]
        )
        part = sampler(logits[rows], info, positions=at[rows])
        assert torch.equal(part.token_ids, whole.token_ids[rows])


def test_draws_change_with_seed_and_position() -> None:
    vocab_size = 4096
    logits = torch.zeros(1, vocab_size).expand(64, -1).contiguous()
    params = [SamplingParams()] * 64
    sampler = Sampler()
    by_seed = sampler(
        logits, make_info(params, vocab_size), positions=torch.zeros(64).long()
    ).token_ids
    by_position = sampler(
        logits, make_info(params, vocab_size, [5] * 64), positions=positions(64)
    ).token_ids
    assert len(set(by_seed.tolist())) > 55
    assert len(set(by_position.tolist())) > 55


def test_noise_is_splitmix64() -> None:
    seeds = [0, 1, 2**63 - 1, 123456789]
    at = [0, 1, 4095, 2**40]
    keys = torch.tensor([mix_seed(s) for s in seeds])
    got = uniform(keys, torch.tensor(at)).tolist()
    for seed, position, value in zip(seeds, at, got, strict=True):
        key = splitmix64(seed)
        word = splitmix64((key + position * 0x9E3779B97F4A7C15) & WORD)
        assert value == (word >> 11) / 2**53
        assert 0.0 <= value < 1.0


def test_noise_is_the_same_through_torch_and_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = torch.randint(-(2**62), 2**62, (1000,))
    at = torch.randint(0, 2**31, (1000,))
    by_numpy = noise.uniform(keys, at)
    monkeypatch.setattr(row_ops, "on_host", lambda x: False)
    assert torch.equal(noise.uniform(keys, at), by_numpy)


def test_inverse_cdf_against_brute_force() -> None:
    generator = torch.Generator().manual_seed(3)
    for width in (1, 5, 64, 65, 128, 777):
        weights = torch.rand(50, width, generator=generator)
        weights[torch.rand(50, width, generator=generator) < 0.7] = 0.0
        weights[:, width // 2] += 0.01
        draws = torch.rand(50, dtype=torch.float64, generator=generator)
        got = inverse_cdf(weights, draws)
        for row in range(50):
            sums = weights[row].double().cumsum(0)
            target = draws[row] * sums[-1]
            expected = int((sums > target).nonzero()[0])
            chosen = int(got[row])
            assert weights[row, chosen] > 0
            # Equal but where the noise falls within rounding of a boundary.
            if chosen != expected:
                boundary = sums[min(chosen, expected) : max(chosen, expected)]
                assert bool((boundary - target).abs().max() < 1e-5 * sums[-1])


def test_inverse_cdf_at_the_ends() -> None:
    weights = torch.zeros(3, 200)
    weights[0, 199] = 1e-30
    weights[1, [0, 70, 130]] = torch.tensor([0.3, 0.3, 1e-8])
    weights[2, 5:190] = 0.1
    largest = 1.0 - 2.0**-53
    lowest = inverse_cdf(weights, torch.zeros(3, dtype=torch.float64))
    highest = inverse_cdf(weights, torch.full((3,), largest, dtype=torch.float64))
    assert lowest.tolist() == [199, 0, 5]
    assert highest.tolist() == [199, 130, 189]


def test_inverse_cdf_at_block_ends() -> None:
    """Draws just below and at the end of every block: never an id without weight."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(count(ci=200, full=2000)):
        weights = torch.rand(64 * 40, generator=generator) ** 4
        weights[::64] = 0.0
        weights[63::64] = 0.0
        ends = weights.view(40, 64).sum(dim=1).double().cumsum(0)
        at = (ends / ends[-1])[:-1]
        below = torch.nextafter(at, torch.zeros_like(at))
        draws = torch.cat((below, torch.nextafter(below, torch.zeros_like(at)), at))
        ids = inverse_cdf(weights.expand(draws.numel(), -1).contiguous(), draws)
        assert bool((weights[ids] > 0).all())


def test_row_ops_against_torch(path: str) -> None:
    x = (torch.randn(7, 301) * 4).round()
    best = x.gather(1, argmax_rows(x)[:, None])
    assert torch.equal(best, x.amax(dim=1, keepdim=True))
    for k in (1, 2, 50, 300, 301):
        expected = x.sort(dim=1, descending=True).values[:, :k]
        assert torch.equal(-negated_best(x, k), expected)


def test_greedy_is_argmax_and_leaves_the_logits_alone() -> None:
    logits = torch.randn(9, 333)
    before = logits.clone()
    params = [GREEDY] * 4 + [SamplingParams(top_k=1)] * 4 + [SamplingParams()]
    sampler = Sampler()
    info = make_info(params[:8], 333)
    assert info.is_all_greedy and info.is_plain_greedy
    out = sampler(logits[:8], info, positions=positions(8))
    assert out.logprobs is None
    assert torch.equal(out.token_ids, logits[:8].argmax(dim=-1))
    assert out.token_ids.dtype == torch.int64
    mixed = sampler(logits, make_info(params, 333), positions=positions(9)).token_ids
    assert torch.equal(mixed[:8], logits[:8].argmax(dim=-1))
    assert torch.equal(logits, before)


def test_a_draw_needs_all_of_its_arguments() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    given = {
        "seeds": torch.tensor([1]),
        "positions": torch.tensor([0]),
        "greedy_rows": torch.tensor([True]),
    }
    assert choose_tokens(logits).tolist() == choose_tokens(logits, **given).tolist()
    for name in given:
        alone = {name: given[name]}
        others = {other: given[other] for other in given if other != name}
        for some in (alone, others):
            with pytest.raises(ValueError, match="must be given together"):
                choose_tokens(logits, **some)


def test_weights_of_a_node_follow_the_tokens_on_its_path() -> None:
    """Edits change the target's distribution as they change a plain step's."""
    nodes, vocab_size = 2, 6
    rows = [
        SamplingRow(
            params=SamplingParams(
                frequency_penalty=2.0, temperature=0.7, top_k=4, min_new_tokens=3
            ),
            stop_ids=(5,),
        ),
        SamplingRow(params=SamplingParams(temperature=0.0, presence_penalty=2.0)),
    ]
    info = SamplingBatchInfo.from_rows(rows, vocab_size=vocab_size, device="cpu")
    plain = info.repeat_rows(nodes)
    generator = torch.Generator().manual_seed(1)
    for step in (2, 3):
        logits = torch.randn(4, vocab_size, generator=generator)
        # The paths of a request's two nodes differ, and so may their depths.
        table = torch.randint(0, vocab_size, (4, step), generator=generator)
        history = TokenHistory(
            token_table=table.to(torch.int32),
            req_pool_indices=torch.arange(4),
            lens=torch.full((4,), step),
        )
        places = torch.tensor([step, step - 1, 1, 1])
        edited, weights = target_weights(
            logits, info, nodes=nodes, positions=places, history=history
        )
        expected = edit_logits(logits, plain, positions=places, history=history)
        assert torch.equal(edited, expected)
        expected = heat(expected, plain)
        assert torch.equal(weights[:2], filtered_probs(expected, plain)[:2])
        assert torch.equal(weights[2:], torch.eye(vocab_size)[expected[2:].argmax(-1)])


def test_half_precision_logits_are_accepted() -> None:
    logits = torch.randn(2, 100).bfloat16()
    out = Sampler()(logits, make_info([GREEDY] * 2, 100), positions=positions(2))
    assert torch.equal(out.token_ids, logits.float().argmax(dim=-1))


def test_empty_batch() -> None:
    for params in ([], [GREEDY], [SamplingParams(top_p=0.5, min_p=0.1)]):
        info = make_info(params, 50).filter([])
        out = Sampler()(torch.empty(0, 50), info, positions=positions(0))
        assert out.token_ids.shape == (0,)


@pytest.mark.parametrize("params", [GREEDY, *FILTERS], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_odd_logits_give_some_id(params: SamplingParams, bad: float, path: str) -> None:
    logits = torch.randn(3, 100)
    logits[0, 17] = bad
    logits[1, :] = bad
    info = make_info([params] * 3, 100)
    ids = Sampler()(logits, info, positions=positions(3)).token_ids
    assert bool(((ids >= 0) & (ids < 100)).all())
    alone = Sampler()(logits[2:], info.filter([2]), positions=positions(1, 2))
    assert ids[2] == alone.token_ids[0]


def test_logit_bias_bans_and_forces() -> None:
    logits = torch.zeros(3, 64)
    params = [
        SamplingParams(temperature=0.0, logit_bias={5: 3.0, 6: 2.0}),
        SamplingParams(logit_bias={i: -1e9 for i in range(63)}),
        SamplingParams(logit_bias={9: 1e4}),
    ]
    out = Sampler()(logits, make_info(params, 64), positions=positions(3))
    assert out.token_ids.tolist() == [5, 63, 9]


def test_min_new_tokens_bans_stop_ids_until_reached() -> None:
    logits = torch.zeros(1, 32)
    logits[0, 4], logits[0, 8], logits[0, 11] = 9.0, 8.0, 7.0
    row = SamplingRow(
        params=SamplingParams(temperature=0.0, min_new_tokens=3),
        prompt_len=10,
        stop_ids=(4, 8, 4),
    )
    info = SamplingBatchInfo.from_rows([row], vocab_size=32, device="cpu")
    picks = [
        Sampler()(logits, info, positions=torch.tensor([p])).token_ids.item()
        for p in range(10, 15)
    ]
    assert picks == [11, 11, 11, 4, 4]


def test_a_complete_grammar_wins_over_min_new_tokens() -> None:
    rows = [
        SamplingRow(
            params=SamplingParams(temperature=temperature, min_new_tokens=5),
            stop_ids=(4,),
        )
        for temperature in (0.0, 1.0)
    ] * 2
    info = SamplingBatchInfo.from_rows(rows, vocab_size=40, device="cpu")
    mask = allocate_vocab_mask(4, 40)
    mask[:2] = 0
    mask[:2, 0] = 1 << 4
    mask[2:] = 0
    mask[2:, 0] = (1 << 4) | (1 << 7)
    out = Sampler()(
        torch.zeros(4, 40),
        info.with_vocab_mask(mask),
        positions=torch.zeros(4, dtype=torch.int64),
    )
    assert out.token_ids.tolist() == [4, 4, 7, 7]


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {"3": 1e30}},
        {"logit_bias": {"3": -1e30}},
        {"temperature": 1e30},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
    ],
)
def test_the_extremes_that_are_accepted_leave_finite_logits(
    extreme: dict[str, Any],
) -> None:
    """Together with the smallest temperature and penalty; a token is there to draw."""
    smallest = {"temperature": 1e-5, "repetition_penalty": 0.01}
    params = SamplingParams.from_wire({**smallest, **extreme})
    info = make_info([params], vocab_size=5)
    history = TokenHistory(
        token_table=torch.full((1, 2), 3, dtype=torch.int32),
        req_pool_indices=torch.tensor([0]),
        lens=torch.tensor([2]),
    )
    logits = torch.tensor([[1.0, -2.0, 50.0, -50.0, 0.0]])
    positions = torch.tensor([2])
    processed = process_logits(logits, info, positions=positions, history=history)
    assert torch.isfinite(processed).all()
    assert (filtered_probs(processed, info) > 0).any()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
