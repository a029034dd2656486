"""The cut that is found without a sort against the sorted reference, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.sampling import sampler
from sglang.srt.sampling.ops.draw import triton as draw_kernels
from sglang.srt.sampling.ops.draw.op import draw_ref
from sglang.srt.sampling.ops.keep_prefix import triton as kernels
from sglang.srt.sampling.ops.keep_prefix.op import Filters, keep_prefix_ref
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, is_full, sampled

register_cpu_ci(est_time=60, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Several of the tiles below. The interpreter adds id by id.
SEVERAL = 400 if ON_GPU or is_full() else 160
VOCABS = [1, 2, 31, SEVERAL, *([4097, 128256, 262144] if ON_GPU else [])]
NAN, INF = float("nan"), float("inf")
# (top_k, top_p, min_p); no top-k is -1.
FILTERS = [
    (-1, 0.5, 0.0),
    (-1, 0.95, 0.0),
    (1, 1.0, 0.1),
    (5, 1.0, 0.0),
    (40, 0.9, 0.3),
    (-1, 0.999, 0.0),
    (-1, 1e-30, 0.0),
    (-1, 1e-300, 1.0),
    (-1, 1.0, 0.02),
    (7, 0.3, 0.0),
    (1000, 0.99, 0.001),
    (-1, 0.9999999, 0.0),
]


def set_tiles(
    monkeypatch: pytest.MonkeyPatch, block: int, candidates: int, few: int, sample: int
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_CANDIDATES", candidates)
    monkeypatch.setattr(kernels, "_FEW", few)
    monkeypatch.setattr(kernels, "_SAMPLE", sample)
    for module in (kernels, draw_kernels):
        monkeypatch.setattr(module, "split_rows", partial(split, block))


def split(block: int, op: str, rows: int, vocab: int) -> tuple[int, int]:
    return block, -(-vocab // block)


@pytest.fixture
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make short rows need samples, several tiles and passes."""
    set_tiles(monkeypatch, 64, 32, 8, 16)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds several sums at once in Python, id by id, so that there even
    one tile is smaller than a kernel's."""
    if request.param == "many tiles":
        request.getfixturevalue("many_tiles")
    elif not ON_GPU:
        set_tiles(monkeypatch, *[512 if is_full() else 256] * 4)


def both(
    probs: Tensor, filters: list[tuple[int, float, float]]
) -> tuple[Tensor, Tensor]:
    """Return what the reference keeps, and the kernel."""
    rows, vocab = probs.shape
    columns = list(zip(*filters, strict=True))
    top_ks = [k if 0 < k < vocab else vocab for k in columns[0]]
    top_ps = torch.tensor(columns[1], device=DEVICE)
    is_cut = [k < vocab or p < 1.0 for k, p in zip(top_ks, columns[1], strict=True)]
    filtering = torch.tensor(is_cut, device=DEVICE).nonzero().flatten()
    made = Filters(
        rows=filtering if len(filtering) else None,
        top_ks=torch.tensor(top_ks, device=DEVICE),
        top_ps=top_ps,
        max_top_k=max(k for k, cut in zip(top_ks, is_cut, strict=True) if cut)
        if any(is_cut)
        else 0,
        min_ps=torch.tensor(columns[2], device=DEVICE) if any(columns[2]) else None,
    )
    expected = keep_prefix_ref(probs.clone(), made)
    return expected, kernels.keep_prefix(probs.clone(), made)


def assert_same_bits(expected: Tensor, got: Tensor) -> None:
    differs = (expected.view(torch.int32) != got.view(torch.int32)).any(dim=1)
    assert not differs.any(), differs.nonzero().flatten().tolist()


def logits_like(kind: str, rows: int, vocab: int) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        logits = logits.bfloat16().float()
    elif kind == "few values":
        logits = logits.round()
    elif kind == "uniform":
        logits = torch.zeros_like(logits)
    elif kind == "peaked":
        logits = logits * 12
    elif kind == "mostly forbidden":
        logits[:, 1:][:, ::2] = -INF
    elif kind == "one hot":
        logits[:] = -INF
        logits[:, vocab // 3] = 4.0
    return logits.to(DEVICE)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "ties",
        "few values",
        "uniform",
        "peaked",
        "mostly forbidden",
        "one hot",
    ],
)
def test_keeps_what_the_sort_keeps(kind: str, vocab: int, tiles: None) -> None:
    logits = logits_like(kind, len(FILTERS), vocab)
    assert_same_bits(*both(torch.softmax(logits, dim=-1), FILTERS))


@pytest.mark.parametrize("vocab", [31, SEVERAL])
def test_rows_of_nan_stay(vocab: int, tiles: None) -> None:
    logits = torch.randn(len(FILTERS), vocab, device=DEVICE)
    logits[0, vocab // 2] = NAN
    logits[1] = -INF
    logits[2, 3] = INF
    expected, got = both(torch.softmax(logits, dim=-1), FILTERS)
    assert got[:3].isnan().all() and expected[:3].isnan().all()
    assert_same_bits(expected[3:], got[3:])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "bad", sampled([NAN, INF, -1.0, 2.0], key=lambda _: None, ci=2)
)
def test_values_that_are_no_probabilities_end(bad: float, tiles: None) -> None:
    """As damaged memory may hold: any result, but no hang."""
    probs = torch.softmax(torch.randn(len(FILTERS), SEVERAL, device=DEVICE), dim=-1)
    probs[:, SEVERAL // 2] = bad
    probs[::2, SEVERAL * 5 // 8 :] = bad
    both(probs, FILTERS)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_a_sum_that_equals_p_is_enough(top_p: float, tiles: None) -> None:
    """Sums of powers of two are exact, so that the cut may not be off by an id."""
    vocab = 1024
    probs = torch.full((1, vocab), 1.0 / vocab, device=DEVICE)
    expected, got = both(probs, [(-1, top_p, 0.0)])
    assert_same_bits(expected, got)
    kept = int(vocab * top_p)
    assert got[0, :kept].all() and not got[0, kept:].any()


def test_a_row_does_not_depend_on_the_others(many_tiles: None) -> None:
    probs = torch.softmax(logits_like("ties", len(FILTERS), SEVERAL), dim=-1)
    _, together = both(probs, FILTERS)
    for row, one in enumerate(FILTERS):
        _, alone = both(probs[row : row + 1], [one])
        assert_same_bits(alone, together[row : row + 1])


def test_the_sampler_draws_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, many_tiles: None
) -> None:
    """Of greedy, drawn and filtered rows, through the sampler of plain steps and of
    nodes."""
    cycle = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=9, temperature=0.7),
        SamplingParams(min_p=0.1, top_p=0.9),
    ]
    params = [cycle[i % len(cycle)] for i in range(count(ci=5, full=10))]
    rows = [SamplingRow(params=p, seed=i) for i, p in enumerate(params)]
    vocab, nodes = 300, 2
    info = SamplingBatchInfo.from_rows(rows, vocab_size=vocab, device=DEVICE)
    logits = logits_like("ties", len(rows) * nodes, vocab)
    positions = torch.arange(len(rows) * nodes, device=DEVICE)
    chosen, weights = [], []
    for draw, keep in (
        (draw_ref, keep_prefix_ref),
        (draw_kernels.draw, kernels.keep_prefix),
    ):
        monkeypatch.setattr(sampler, "draw", draw)
        monkeypatch.setattr(sampler, "keep_prefix", keep)
        of_nodes = sampler.node_choices(
            logits, info, nodes=nodes, positions=positions, history=None
        )
        plain = sampler.Sampler()(
            logits[: len(rows)], info, positions=positions[: len(rows)]
        )
        _, target = sampler.target_weights(
            logits, info, nodes=nodes, positions=positions, history=None
        )
        chosen.append(torch.cat((of_nodes.token_ids, plain.token_ids)))
        assert of_nodes.kept is not None and plain.choice.kept is not None
        weights.append(torch.cat((of_nodes.kept, plain.choice.kept, target)))
    assert torch.equal(chosen[0], chosen[1])
    assert_same_bits(weights[0], weights[1])


def test_refusals() -> None:
    probs = torch.full((2, 8), 0.125, device=DEVICE)
    filters = Filters(
        rows=torch.arange(2, device=DEVICE),
        top_ks=torch.full((2,), 8, device=DEVICE),
        top_ps=torch.full((2,), 0.5, device=DEVICE),
        max_top_k=8,
        min_ps=None,
    )
    with pytest.raises(ValueError, match="probs"):
        kernels.keep_prefix(probs[:, :4], filters)
    with pytest.raises(ValueError, match="top_ks"):
        kernels.keep_prefix(probs, replace(filters, top_ks=filters.top_ks[:1]))
    assert kernels.keep_prefix(probs, replace(filters, rows=None)) is probs
    assert probs.all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
