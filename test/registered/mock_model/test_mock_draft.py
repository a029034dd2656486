"""The mock model's draft heads, driven forward by forward: every row proposes exactly
what the tokens imply, and damaged KV or hidden states change what is proposed."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from draft_world import (
    DRAFT_VOCAB,
    HEADS,
    VOCAB,
    Pair,
    Spec,
    assert_rows,
    check_rows,
    expected_rows,
    folds_of,
    random_tokens,
)

from sglang.srt.configs.draft_config import layers_to_capture, num_hidden_sources
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.models import mock_draft_math, mock_math
from sglang.srt.models.mock_draft_math import DraftSettings
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=12, suite="cpu")

BACKENDS = ("torch_native", "cpu_native")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_rows_propose_what_the_tokens_imply(
    tmp_path, target_folder, head, dtype, page_size
):
    rng = random.Random(repr((head, dtype, page_size)))
    backend = BACKENDS[page_size == 16]
    args = {"attention_backend": backend, "dtype": dtype, "page_size": page_size}
    pair = Pair(tmp_path, target_folder, head, **args)
    check_rows(pair, rng, (3, 35, 120))


@pytest.mark.parametrize("head", [h for h in HEADS if h[2] != DRAFT_VOCAB])
def test_the_truth_has_the_ranks_that_the_table_wants(tmp_path, target_folder, head):
    pair = Pair(tmp_path, target_folder, head)
    tokens = random_tokens(random.Random(9), 500)
    _, (logits, _) = pair.prefill(tokens)
    after = next_tokens(tokens, vocab_size=VOCAB)[pair.offset :]
    truth = torch.tensor(after[: len(logits)])
    hot = pair.model.hot_token_ids
    if hot is not None:
        logits = torch.empty_like(logits).index_copy_(1, hot, logits)
    own = logits.gather(1, truth[:, None])
    ranks = (logits > own).sum(-1)
    shares = [
        float(share.float().mean())
        for share in (ranks == 0, (ranks > 0) & (ranks < 8), ranks >= 8)
    ]
    assert shares == pytest.approx(mock_draft_math.ACCEPTANCE, abs=0.06)
    assert all((ranks == rank).any() for rank in range(8))


def swapped_aux(states):
    first, second, third = states.split(512, -1)
    return torch.cat((second, first, third), -1)


def one_stale_aux(states):
    first, second, third = states.split(512, -1)
    return torch.cat((first, second, third.roll(1, 0)), -1)


def flipped_bit(states):
    states = states.clone()
    states[:, 100] *= -1
    return states


def not_a_number(states):
    states = states.clone()
    states[:, 70] = float("nan")
    return states


HIDDEN_DAMAGES = {
    "of the position before": lambda states: states.roll(1, 0),
    "of the position after": lambda states: states.roll(-1, 0),
    "one bit flipped": flipped_bit,
    "never written": torch.zeros_like,
    "twice the value": lambda states: states * 2,
    "NaN": not_a_number,
}
AUX_DAMAGES = {"two exchanged": swapped_aux, "one of them stale": one_stale_aux}
# These are visible without knowing the right values.
MALFORMED = ("never written", "twice the value", "NaN", *AUX_DAMAGES)


def damage_cases():
    for head in HEADS:
        kind, source, _ = head
        if kind == "STANDALONE":
            continue
        damages = HIDDEN_DAMAGES | (AUX_DAMAGES if kind == "EAGLE3" else {})
        for name, damage in damages.items():
            # A flipped bit makes EAGLE3's three states disagree.
            is_malformed = name in MALFORMED or (
                kind == "EAGLE3" and name == "one bit flipped"
            )
            if source == "hidden" or is_malformed:
                yield pytest.param(head, damage, id=f"{head} {name}")


@pytest.mark.parametrize(("head", "damage"), [*damage_cases()])
def test_damaged_hidden_states_change_the_proposals(
    tmp_path, target_folder, head, damage
):
    pair = Pair(tmp_path, target_folder, head)
    tokens = random_tokens(random.Random(5), 80)
    target_row = pair.target.new_row(tokens[:-1])
    right = pair.target_states([(target_row, 79)])
    row = pair.draft_row(tokens)
    logits, _ = pair.propose(ForwardMode.EXTEND, [(row, 79)], damage(right))
    expected, _ = expected_rows(pair, tokens)
    assert not (logits == expected).all(-1).any()


def test_the_states_before_the_first_one_are_not_needed_by_standalone(
    tmp_path, target_folder
):
    pair = Pair(tmp_path, target_folder, ("STANDALONE", None, None))
    tokens = random_tokens(random.Random(5), 20)
    _, found = pair.prefill(tokens, states=torch.full((19, 512), float("nan")))
    assert_rows(pair, found, tokens)


def never_written(k, v, slot, other):
    for cache in (k, v):
        cache[slot] = 0.0


def foreign(k, v, slot, other):
    for cache in (k, v):
        cache[slot] = cache[other]


def nan(k, v, slot, other):
    v[slot, 0, 0] = float("nan")


SLOT_DAMAGES = {"never written": never_written, "foreign": foreign, "NaN": nan}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("head", "damage"),
    [
        (head, damage)
        for head in HEADS
        for damage in SLOT_DAMAGES
        if (head[1], damage) != ("hidden", "foreign")
    ],
)
def test_damaged_slots_change_the_proposals(
    tmp_path, target_folder, head, damage, backend
):
    """A step after the damage. A head that takes its state from the hidden states sees
    slots that were never written and NaN, and cannot see foreign ones."""
    rng = random.Random(repr((head, damage)))
    pair = Pair(
        tmp_path, target_folder, head, attention_backend=backend, kv_canary="none"
    )
    for trial in range(count(ci=4, full=24)):
        length = rng.choice((2, 18, 60))
        tokens = random_tokens(rng, length + 1)
        row, (_, hidden) = pair.prefill(tokens)
        stranger, _ = pair.prefill(random_tokens(rng, 9))
        place = rng.randrange(length)
        slot = int(pair.draft.pool.row_slots(row, place, place + 1))
        other = int(pair.draft.pool.row_slots(stranger, 5, 6))
        k, v = pair.draft.runner.token_to_kv_pool.get_kv_buffer(trial % 2)
        SLOT_DAMAGES[damage](k, v, slot, other)
        tokens.append(rng.randrange(VOCAB))
        pair.append(row, tokens)
        logits, _ = pair.propose(ForwardMode.DECODE, [(row, None)], hidden[-1:])
        expected, _ = expected_rows(pair, tokens)
        assert not torch.equal(logits, expected[-1:])
        pair.release(row)
        pair.release(stranger)


def test_logits_rows_and_hidden_states_follow_the_capture_mode(tmp_path, target_folder):
    pair = Pair(tmp_path, target_folder, ("EAGLE3", "hidden", DRAFT_VOCAB))
    tokens = random_tokens(random.Random(3), 12)
    target_row = pair.target.new_row(tokens[:-1])
    states = pair.target_states([(target_row, 11)])
    row = pair.draft_row(tokens)
    batch = dataclasses.replace(
        pair.draft.prepare(ForwardMode.EXTEND, [(row, 11)]),
        spec_info=Spec(hidden_states=states),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    output = pair.draft.run(batch)
    assert output.next_token_logits.shape == (1, DRAFT_VOCAB)
    assert output.hidden_states.shape == (1, 512)
    found = (output.next_token_logits, output.hidden_states)
    assert_rows(pair, found, tokens, slice(-1, None))


def test_captured_states_are_distinct_and_lead_back(target_folder):
    harness = ForwardHarness(target_folder)
    row = harness.new_row(random_tokens(random.Random(2), 30))

    def run(layers, end):
        harness.runner.model.capture_layers(layers)
        batch = dataclasses.replace(
            harness.prepare(ForwardMode.EXTEND, [(row, end)]),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return harness.run(batch).hidden_states

    assert run((), 10).shape == (10, 512)
    states = run((0, 1, 2), 20).split(512, -1)
    origins = [mock_math.aux_origin(state, i) for i, state in enumerate(states)]
    assert all(torch.equal(origin, states[0]) for origin in origins)
    for i in range(3):
        for j in range(i):
            assert (states[i] != states[j]).any(-1).all()
    fold0, _, is_whole = mock_math.read_folds(states[0])
    assert is_whole.all()
    assert torch.equal(fold0, folds_of(harness.tokens(row))[0][10:20])
    assert run((1, 2), 30).shape == (10, 1024)
    for layers in ((1, 1), (2, 1), (3,), (-1,)):
        with pytest.raises(ValueError, match="has 2 layers"):
            harness.runner.model.capture_layers(layers)


@pytest.mark.parametrize("vocab_size", [2, 7, 265, 1000, 1234, 4096])
def test_draft_ids_reach_distinct_tokens(vocab_size):
    settings = DraftSettings(vocab_size=vocab_size, draft_vocab_size=vocab_size)
    ids = settings.hot_token_ids()
    assert sorted(ids.tolist()) == list(range(vocab_size))
    assert DraftSettings(vocab_size=vocab_size).hot_token_ids() is None
    if vocab_size > 2:  # mixing up the two numberings shows
        assert ids[1:].ne(torch.arange(1, vocab_size)).float().mean() > 0.8


def test_one_signature_folds_to_its_term():
    x = torch.randint(-(1 << 62), 1 << 62, (200,))
    for layer in range(2):
        whole = mock_math.fold_signs(mock_math.sig(x), layer)
        assert torch.equal(mock_math.term(x, layer), whole)


def test_weights_of_the_bits_grow_in_bf16():
    """So that the ranks do not depend on the rounding of logits."""
    x = torch.randint(-(1 << 62), 1 << 62, (500,))
    settings = DraftSettings(vocab_size=4096)
    code, weights = mock_draft_math.proposal(x, x, torch.arange(500), settings)
    assert torch.equal(weights.bfloat16().float(), weights)
    assert (weights.diff(dim=-1) >= 5 / 128).all() and (weights < 2).all()
    best = (mock_math.signs(code, 12) * weights) @ mock_math.token_codes(4096).T
    values = best.bfloat16().topk(13).values
    assert (values.diff(dim=-1) < 0).all()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("EAGLE", {"mock_draft_source": "tea"}, "mock_draft_source 'tea'.*hidden"),
        ("EAGLE", {"mock_acceptance": [0.5, 0.1, 0.1]}, "mock_acceptance.*sum to 1"),
        ("EAGLE", {"mock_acceptance": [1.5, -0.5, 0]}, "mock_acceptance"),
        ("EAGLE", {"mock_acceptance": 3}, "config.json"),
        ("EAGLE", {"sliding_window": 9}, "sliding_window 9.*remove"),
        ("EAGLE", {"num_hidden_layers": 1}, "num_hidden_layers 2, got 1"),
        ("EAGLE3", {"draft_vocab_size": VOCAB + 1}, f"{VOCAB + 1}.*{VOCAB}"),
        ("STANDALONE", {"mock_draft_source": "hidden"}, "no hidden states"),
    ],
)
def test_configurations_that_cannot_draft(tmp_path, kind, changes, words):
    folder = write_mock_draft(tmp_path, kind=kind, vocab_size=VOCAB, **changes)
    with pytest.raises(ValueError, match=words):
        ForwardHarness(folder, is_draft_worker=True)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_a_draft_is_not_served_alone(tmp_path, kind):
    folder = write_mock_draft(tmp_path, kind=kind)
    with pytest.raises(ValueError, match="--model-path .* is a draft"):
        ForwardHarness(folder)


def test_eagle3_says_what_it_reads(tmp_path):
    config = ModelConfig.from_path(write_mock_draft(tmp_path, kind="EAGLE3"))
    assert layers_to_capture(config, num_target_layers=2) == (0, 1, 2)
    assert num_hidden_sources(config) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
