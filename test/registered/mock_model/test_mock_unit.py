"""The mock model against its oracle, and every single damaged slot against both."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.forward.batch import ForwardMode
from sglang.srt.models import mock_math
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.mock_oracle import MockOracle, next_tokens
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=11, suite="cpu")

BACKENDS = ("torch_native", "cpu_native")
VOCAB = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("mock"), vocab_size=VOCAB)


def random_tokens(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]


def argmax(logits):
    return logits.argmax(-1).tolist()


def test_incremental_oracle_equals_the_vectorised_one():
    rng = random.Random(3)
    prompt = random_tokens(rng, 37)
    generated = MockOracle(prompt, vocab_size=VOCAB).take(25)
    predicted = next_tokens(prompt + generated, vocab_size=VOCAB)
    assert predicted[36:-1] == generated


def test_oracle_depends_on_every_token():
    rng = random.Random(4)
    tokens = random_tokens(rng, 60)
    last = next_tokens(tokens, vocab_size=VOCAB)[-1]
    changed = 0
    for i in range(1, len(tokens)):
        other = list(tokens)
        other[i] = (other[i] + 1) % VOCAB
        changed += next_tokens(other, vocab_size=VOCAB)[-1] != last
    # Two outputs out of VOCAB may coincide by chance.
    assert changed >= len(tokens) - 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equals_the_oracle(folder, backend, dtype, page_size):
    rng = random.Random(page_size)
    harness = ForwardHarness(
        folder, attention_backend=backend, dtype=dtype, page_size=page_size
    )
    rows = [harness.new_row(random_tokens(rng, n)) for n in (1, 2, 33, 160)]
    done = dict.fromkeys(rows, 0)
    while unfinished := [r for r in rows if done[r] < len(harness.tokens(r))]:
        spans = []
        for row in unfinished:
            done[row] = min(done[row] + rng.randrange(1, 60), len(harness.tokens(row)))
            spans.append((row, done[row]))
        logits = harness.extend(spans)
        for (row, end), token in zip(spans, argmax(logits), strict=True):
            prefix = harness.tokens(row)[:end]
            assert token == next_tokens(prefix, vocab_size=VOCAB)[-1]
    for _ in range(12):
        for row in rows:
            harness.append(row, rng.randrange(VOCAB))
        decoded = argmax(harness.forward(ForwardMode.DECODE, [(r, None) for r in rows]))
        for row, token in zip(rows, decoded, strict=True):
            assert token == next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sliding_window(tmp_path, backend):
    rng = random.Random(8)
    write_mock_model(tmp_path, vocab_size=VOCAB, sliding_window=24)
    harness = ForwardHarness(tmp_path, attention_backend=backend)
    row = harness.new_row(random_tokens(rng, 90))
    for end in (10, 24, 25, 70, 90):
        token = argmax(harness.extend([(row, end)]))[0]
        prefix = harness.tokens(row)[:end]
        assert token == next_tokens(prefix, vocab_size=VOCAB, windows=(24, 24))[-1]
    for _ in range(30):
        harness.append(row, rng.randrange(VOCAB))
        token = argmax(harness.forward(ForwardMode.DECODE, [(row, None)]))[0]
        expected = next_tokens(harness.tokens(row), vocab_size=VOCAB, windows=(24, 24))[
            -1
        ]
        assert token == expected


def test_long_context_in_bfloat16(tmp_path):
    write_mock_model(tmp_path, vocab_size=VOCAB, max_position_embeddings=4200)
    harness = ForwardHarness(tmp_path, dtype="bfloat16", slots=4200)
    tokens = random_tokens(random.Random(1), 4096)
    row = harness.new_row(tokens)
    oracle = next_tokens(tokens, vocab_size=VOCAB)
    for end in range(512, 4097, 512):
        assert argmax(harness.extend([(row, end)]))[0] == oracle[end - 1]


def swap(k, v, slot, other):
    for cache in (k, v):
        cache[[slot, other]] = cache[[other, slot]].clone()


def never_written(k, v, slot, other):
    for cache in (k, v):
        cache[slot] = 0.0


def overwritten(k, v, slot, other):
    for cache in (k, v):
        cache[slot] = cache[other]


def flipped_sign(k, v, slot, other):
    channel = int(v[slot].flatten().abs().argmax())
    v[slot].view(-1)[channel] *= -1


def not_a_number(k, v, slot, other):
    v[slot, 0, 0] = float("nan")


DAMAGES = {
    "swapped with a foreign slot": swap,
    "never written": never_written,
    "overwritten": overwritten,
    "one sign flipped": flipped_sign,
    "NaN": not_a_number,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("damage", [*DAMAGES])
def test_every_damaged_slot_changes_the_output(folder, backend, damage):
    """One slot of one layer is damaged before a decode: the token must not be right."""
    rng = random.Random(damage + backend)
    # Under the KV canary the damage would end the forward.
    harness = ForwardHarness(
        folder, attention_backend=backend, slots=4096, kv_canary="none"
    )
    silent, trials = 0, count(ci=12, full=72)
    for trial in range(trials):
        length = rng.choice((2, 17, 60, 200))
        row = harness.new_row(random_tokens(rng, length))
        stranger = harness.new_row(random_tokens(rng, 8))
        harness.extend([(row, length), (stranger, 8)])
        position = rng.randrange(length)
        slot = int(harness.pool.row_slots(row, position, position + 1))
        foreign = int(harness.pool.row_slots(stranger, 5, 6))
        k, v = harness.runner.token_to_kv_pool.get_kv_buffer(
            trial % mock_math.NUM_LAYERS
        )
        DAMAGES[damage](k, v, slot, foreign)
        harness.append(row, rng.randrange(VOCAB))
        token = argmax(harness.forward(ForwardMode.DECODE, [(row, None)]))[0]
        silent += token == next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]
        harness.release(row)
        harness.release(stranger)
    # The seeds are fixed, and none of them meets the one chance in VOCAB that a wrong
    # state gives the right token.
    assert silent == 0, f"{silent} of {trials} damages went unseen"


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_table_entry_changes_the_output(folder, backend):
    """A row that points to another request's slot, or to scratch."""
    rng = random.Random(11)
    harness = ForwardHarness(folder, attention_backend=backend, kv_canary="none")
    for target in ("foreign", "scratch"):
        row = harness.new_row(random_tokens(rng, 50))
        stranger = harness.new_row(random_tokens(rng, 50))
        harness.extend([(row, 50), (stranger, 50)])
        slot = 0 if target == "scratch" else int(harness.pool.row_slots(stranger, 7, 8))
        harness.pool.req_to_token[row, 20] = slot
        harness.append(row, 5)
        token = argmax(harness.forward(ForwardMode.DECODE, [(row, None)]))[0]
        assert token != next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]


def test_hash_matches_published_values():
    """splitmix64 of 0xC0FFEE1234567890 and of 5 ^ 7, from the algorithm's
    description."""
    start = torch.tensor([0xC0FFEE1234567890 - (1 << 64), 5 ^ 7])
    mixed = mock_math.mix64(start)
    assert int(mixed[0]) & (2**64 - 1) == 0xDE7FAE23A9A1B716
    assert (int(mixed[1]) & (2**64 - 1)) % 1000 == 730


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
