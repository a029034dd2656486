"""Predicted accept lengths of the mock drafts against a plain simulation that builds
every tree and verifies it, one request and one node at a time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import partial

import pytest
import torch

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.tree.op import (
    build_tree_ref,
    select_top_k_ref,
    top_k_probs_ref,
)
from sglang.srt.draft_trees.ops.verify.op import verify_tree_greedy_ref
from sglang.srt.models import mock_math
from sglang.srt.models.mock_draft_math import DraftSettings, proposal
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.mock_draft_oracle import Answer, DraftOracle, Prediction
from sglang.test.mock_oracle import MockOracle, next_tokens
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_mock_draft

register_cpu_ci(est_time=30, suite="cpu", full_time=100)

VOCAB = 200
# K, S, D
SHAPES = [(1, 1, 2), (1, 5, 6), (2, 3, 6), (4, 1, 4), (4, 4, 12), (8, 5, 32), (8, 6, 9)]


def shape_of(numbers):
    topk, steps, drafts = numbers
    return TreeShape(topk=topk, num_steps=steps, num_draft_tokens=drafts)


def make_answer(rng, *, new_tokens=40, vocab_size=VOCAB):
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40))]
    output = MockOracle(prompt, vocab_size=vocab_size).take(new_tokens)
    return Answer(tokens=prompt + output, prompt_len=len(prompt))


def state_behind(tokens):
    """(X_0, X_1) as the target has them after these tokens, from whole signatures."""
    places = torch.arange(len(tokens))
    x, folds = mock_math.key_layer0(torch.tensor(tokens), places), []
    for layer in range(2):
        folds.append(mock_math.fold_signs(mock_math.sig(x), layer).cumsum(0))
        x = mock_math.key_layer1(folds[0], places)
    return [fold[-1:] for fold in folds]


def candidates(settings, shape, branches, dtype):
    """Probabilities and draft ids [b * K, K] after each of these token lists."""
    rows = []
    for tokens in branches:
        places = torch.tensor([len(tokens) - 1])
        code, weights = proposal(*state_behind(tokens), places, settings)
        rows.append(mock_math.signs(code, 12) * weights)
    logits = (torch.cat(rows) @ settings.head_codes().T).to(dtype)
    probs = torch.empty(len(branches), shape.topk)
    ids = torch.empty(len(branches), shape.topk, dtype=torch.int64)
    top_k_probs_ref(logits, probs=probs, ids=ids)
    return probs, ids


def simulate(oracle, tokens, kv_len):
    """(accept length, accepted off the first branch) of the iteration at `kv_len`."""
    settings, shape, dtype = oracle.settings, oracle.shape, oracle.dtype
    keeps_columns = settings.source == "attention" and not oracle.is_exact
    levels = DraftLevels.allocate(1, shape, device="cpu")
    ids = torch.empty(shape.topk, dtype=torch.int64)
    rows = torch.empty(shape.topk, dtype=torch.int64)
    known = tokens[: kv_len + 1]
    branches = [known]
    for level in range(shape.num_steps):
        probs, index = candidates(settings, shape, branches, dtype)
        hot = settings.hot_token_ids()
        select_top_k_ref(
            level,
            shape=shape,
            topk_p=probs,
            topk_index=index,
            hot_token_id=hot,
            levels=levels,
            input_ids=ids,
            hidden_rows=rows,
        )
        histories = [branches[row] for row in rows.tolist()]
        if keeps_columns and level:
            histories = branches
        chosen = zip(histories, ids.tolist(), strict=True)
        branches = [[*history, token] for history, token in chosen]
    tree = DraftTree.allocate(1, shape, device="cpu")
    root, length = torch.tensor([known[-1]]), torch.tensor([kv_len])
    build_tree_ref(levels, shape=shape, root_tokens=root, seq_lens=length, tree=tree)
    next_token_of = partial(mock_math.next_token, vocab=settings.vocab_size)
    # The target's choice after each node: its own continuation of the path to it.
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens[0], tree.parent_index[0], strict=True):
        history = tokens[:kv_len] if parent < 0 else paths[int(parent)]
        paths.append([*history, int(token)])
    choices = [
        int(next_token_of(*state_behind(path), torch.tensor([len(path) - 1])))
        for path in paths
    ]
    result = VerifyResult.allocate(1, shape, device="cpu")
    verify_tree_greedy_ref(tree, torch.tensor([choices]), result=result)
    accepted = result.accept_index[0, 1 : int(result.accept_lens)].tolist()
    first = int(tree.next_token[0, 0])
    first_branch = set()
    while first >= 0:
        first_branch.add(first)
        first = int(tree.next_token[0, first])
    return len(accepted) + 1, sum(node not in first_branch for node in accepted)


def walk(oracle, answer):
    kv_len, found = answer.prompt_len, []
    while kv_len < len(answer.tokens) - 1:
        found.append(simulate(oracle, list(answer.tokens), kv_len))
        kv_len += found[-1][0]
    return found


def assert_simulated(oracle, answers):
    for answer, predicted in zip(answers, oracle.predict(answers), strict=True):
        simulated = walk(oracle, answer)
        assert predicted.accept_lens == tuple(length for length, _ in simulated)
        assert predicted.off_first_branch == tuple(off for _, off in simulated)


@pytest.mark.parametrize(
    ("numbers", "source", "is_exact", "draft_vocab_size", "dtype"),
    sampled(
        itertools.product(
            SHAPES,
            ["attention", "hidden"],
            [True, False],
            [None, 150],
            [torch.float32, torch.bfloat16],
        ),
        key=lambda variant: variant[0],
        ci=4,
    ),
)
def test_equals_a_simulation(numbers, source, is_exact, draft_vocab_size, dtype):
    rng = random.Random(repr((numbers, source, is_exact, draft_vocab_size, dtype)))
    shape = shape_of(numbers)
    settings = DraftSettings(
        vocab_size=VOCAB, draft_vocab_size=draft_vocab_size, source=source
    )
    length = count(ci=6, full=12)
    answers = [make_answer(rng, new_tokens=length) for _ in range(count(ci=1, full=8))]
    oracle = DraftOracle(shape=shape, settings=settings, is_exact=is_exact, dtype=dtype)
    assert_simulated(oracle, answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_simulation_where_tokens_repeat(dtype):
    """A small vocabulary: one token under several parents, and logits that tie."""
    rng = random.Random(3)
    settings = DraftSettings(vocab_size=24, source="hidden")
    oracle = DraftOracle(shape=shape_of((8, 4, 24)), settings=settings, dtype=dtype)
    assert_simulated(
        oracle, [make_answer(rng, new_tokens=12, vocab_size=24) for _ in range(8)]
    )


def test_equals_a_simulation_where_ancestors_matter():
    """Branches whose column of KV holds another branch's tokens: with few nodes to
    verify they rarely matter, so the requests where they do are looked for."""
    rng = random.Random(5)
    oracles = [
        DraftOracle(
            shape=shape_of((8, 5, 32)),
            settings=DraftSettings(vocab_size=VOCAB, source="attention"),
            is_exact=is_exact,
        )
        for is_exact in (True, False)
    ]
    differing: list[Answer] = []
    for _ in range(20):
        answers = [make_answer(rng, new_tokens=16) for _ in range(10)]
        by_layout = zip(*(oracle.predict(answers) for oracle in oracles), strict=True)
        differing += [
            answer
            for answer, (first, second) in zip(answers, by_layout, strict=True)
            if first.accept_lens != second.accept_lens
        ]
        if len(differing) >= 3:
            break
    assert len(differing) >= 3
    for oracle in oracles:
        assert_simulated(oracle, differing[:3])


@pytest.mark.parametrize("source", ["attention", "hidden"])
@pytest.mark.parametrize("numbers", [(1, 3, 4), (4, 5, 16), (8, 3, 24)])
def test_lengths_cover_all_that_is_possible(numbers, source):
    rng, shape = random.Random(2), shape_of(numbers)
    settings = DraftSettings(vocab_size=1000, source=source)
    answers = [make_answer(rng, vocab_size=1000) for _ in range(40)]
    predictions = DraftOracle(shape=shape, settings=settings).predict(answers)
    lens = Counter(length for p in predictions for length in p.accept_lens)
    assert set(lens) == set(range(1, shape.num_steps + 2))
    off_first = sum(sum(p.off_first_branch) for p in predictions)
    assert (off_first > 0) == (shape.topk > 1)
    close = sum(sum(p.is_close) for p in predictions)
    assert close <= 0.01 * lens.total()


@pytest.mark.parametrize(
    ("acceptance", "topk", "lengths"),
    [((1, 0, 0), 1, {5}), ((0, 1, 0), 1, {1}), ((0, 0, 1), 8, {1})],
)
def test_the_table_decides(acceptance, topk, lengths):
    rng = random.Random(4)
    shape = shape_of((topk, 4, 5 if topk == 1 else 24))
    settings = DraftSettings(vocab_size=1024, acceptance=acceptance)
    answers = [make_answer(rng, vocab_size=1024) for _ in range(10)]
    predictions = DraftOracle(shape=shape, settings=settings).predict(answers)
    assert {n for p in predictions for n in p.accept_lens} == lengths


def test_requests_do_not_depend_on_their_batch():
    rng = random.Random(6)
    oracle = DraftOracle(
        shape=shape_of((4, 3, 10)),
        settings=DraftSettings(vocab_size=VOCAB, source="hidden"),
    )
    answers = [make_answer(rng, new_tokens=rng.randrange(1, 50)) for _ in range(9)]
    together = oracle.predict(answers)
    assert together == [oracle.predict([answer])[0] for answer in answers]
    assert oracle.predict([]) == []


def test_the_last_iteration_verifies_what_lies_behind_the_end():
    """A request that ends inside a run is predicted as if it went on."""
    rng = random.Random(7)
    oracle = DraftOracle(
        shape=shape_of((1, 6, 7)), settings=DraftSettings(vocab_size=VOCAB)
    )
    whole = make_answer(rng, new_tokens=60)
    longest = oracle.predict([whole])[0].accept_lens
    cuts = range(whole.prompt_len + 1, len(whole.tokens) + 1)
    parts = [
        Answer(tokens=whole.tokens[:cut], prompt_len=whole.prompt_len) for cut in cuts
    ]
    for cut, prediction in zip(cuts, oracle.predict(parts), strict=True):
        lens = prediction.accept_lens
        assert lens == longest[: len(lens)]
        verified = whole.prompt_len + 1 + sum(lens)
        assert verified >= cut > (verified - lens[-1] if lens else 0)


def test_a_difference_stays_where_it_is_when_lengths_are_followed():
    rng = random.Random(8)
    oracle = DraftOracle(
        shape=shape_of((1, 4, 5)), settings=DraftSettings(vocab_size=VOCAB)
    )
    answer = make_answer(rng, new_tokens=80)
    predicted = oracle.predict([answer])[0]
    right = list(predicted.accept_lens)
    assert predicted.explains(right)
    assert oracle.predict([answer], followed=[right])[0] == predicted
    place = next(i for i, n in enumerate(right) if i > 3 and n > 1)
    wrong = right[:place] + [right[place] - 1, *[1] * 200]
    again = oracle.predict([answer], followed=[wrong])[0]
    assert again.accept_lens[: place + 1] == tuple(right[: place + 1])
    assert not again.explains(wrong[: len(again.accept_lens)])
    assert not predicted.explains(right[:-1])
    assert not oracle.predict([answer], followed=[right[:-1]])[0].explains(right[:-1])


def test_close_iterations_are_excused():
    lens, off = (3, 1), (0, 0)
    close = Prediction(accept_lens=lens, off_first_branch=off, is_close=(True, False))
    assert close.explains((2, 1)) and not close.explains((3, 2))


def test_settings_come_from_the_heads_folder(tmp_path):
    folder = write_mock_draft(
        tmp_path,
        kind="EAGLE3",
        source="hidden",
        vocab_size=VOCAB,
        draft_vocab_size=99,
        mock_acceptance=[0.5, 0.25, 0.25],
    )
    config = ModelConfig.from_path(folder)
    assert DraftSettings.from_config(config) == DraftSettings(
        vocab_size=VOCAB,
        draft_vocab_size=99,
        source="hidden",
        acceptance=(0.5, 0.25, 0.25),
    )


def test_answers_are_the_targets_own():
    answer = make_answer(random.Random(1))
    predicted = next_tokens(answer.tokens, vocab_size=VOCAB)
    assert (
        list(answer.tokens[answer.prompt_len :])
        == (predicted[answer.prompt_len - 1 : -1])
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
