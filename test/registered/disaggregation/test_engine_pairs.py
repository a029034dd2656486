"""A prefill and a decode engine: random requests exact, and every damaged, late or
missing unit is a miss that is named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest

from sglang.srt.disaggregation.messages import End, Unit
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.engine_pairs import (
    Cut,
    EnginePair,
    Frame,
    Wire,
    as_bytes,
    engine_pair,
    serve_random,
)
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, is_full, sampled
from sglang.test.tier_traffic import KINDS, VOCAB, tiers_of, windows_of

register_cpu_ci(est_time=10, suite="cpu", full_time=900)
register_cuda_ci(est_time=200, suite="cuda")

SEEDS = range(20) if is_full() else range(1)
# (page size, overlap, canary, decode engine with host memory).
CONFIGURATIONS = [
    (1, False, "raise", False),
    (16, True, "heal", True),
    (4, True, "none", False),
    (64, False, "log", True),
]
LENGTH = 5 * 64 + 2


def check_answer(pair: EnginePair, kind: str, prompt: list[int], **options) -> None:
    answer = pair.generate(prompt, max_new_tokens=4, ignore_eos=True, **options)
    predicted = next_tokens(
        prompt + answer.output_ids, vocab_size=VOCAB, windows=windows_of(kind)
    )
    assert answer.output_ids == predicted[len(prompt) - 1 : -1]


@pytest.mark.parametrize(
    ("kind", "configuration"),
    sampled(
        itertools.product(KINDS, CONFIGURATIONS), key=lambda variant: variant[0], ci=1
    ),
    ids=str,
)
def test_random_requests(tmp_path, kind, configuration):
    page_size, overlap, canary, has_host = configuration
    with engine_pair(
        tmp_path,
        kind,
        overlap=overlap,
        page_size=page_size,
        kv_canary=canary,
        enable_hierarchical_cache=has_host,
    ) as pair:
        serve_random(pair, kind, total=count(ci=40, full=2000), seed=page_size)


@pytest.mark.parametrize("kind", sampled(KINDS, key=lambda kind: "any kind", ci=1))
@pytest.mark.parametrize("page_sizes", [(1, 16), (64, 4)])
def test_pages_may_differ(tmp_path, kind, page_sizes):
    """A unit has whole pages of either side."""
    prefill, decode = page_sizes
    with engine_pair(
        tmp_path, kind, page_size=prefill, decode_args={"page_size": decode}
    ) as pair:
        serve_random(pair, kind, total=count(ci=20, full=500), seed=7)


@pytest.mark.parametrize(
    ("decode_args", "named"),
    [
        (
            {"page_size": 128},
            "--page-size, tokens of a unit: 128 there, 64 here",
        ),
        ({"kv_canary": "none"}, "--kv-canary off there, on here"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 there, float32 here"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype float8_e5m2 there"),
    ],
    ids=str,
)
def test_engines_that_differ_are_refused_by_name(tmp_path, caplog, decode_args, named):
    prompt = list(range(LENGTH))
    with engine_pair(
        tmp_path,
        "plain",
        dtype="float32",
        max_total_tokens=960,
        decode_args=decode_args,
    ) as pair:
        pair.generate(prompt, max_new_tokens=2, ignore_eos=True)
        assert tiers_of(pair.decode).stats.loaded == 0
        assert not pair.scheduler.own_incidents()
        pair.settle()
    refused = [r.getMessage() for r in caplog.records if "refuse" in r.getMessage()]
    assert any(named in text for text in refused), refused


# -- faults of the wire ------------------------------------------------------------


def on_unit(number: int, change: Callable[[Frame], list[Frame]]):
    """Return a tamper that changes one unit of the first transfer, counted from 0."""
    seen = itertools.count()

    def tamper(frame: Frame) -> list[Frame]:
        is_it = isinstance(frame.message, Unit) and next(seen) == number
        return change(frame) if is_it else [frame]

    return tamper


def flip(frame: Frame, rng: random.Random) -> list[Frame]:
    payload = bytearray(frame.payload)
    # Behind the last tensor and the records lie sums, and perhaps bytes of no meaning.
    payload[rng.randrange(len(payload) // 2)] ^= 1 << rng.randrange(8)
    return [Frame(frame.message, bytes(payload))]


def flip_sum(frame: Frame, rng: random.Random) -> list[Frame]:
    payload = bytearray(frame.payload)
    payload[-1 - rng.randrange(8)] ^= 1 << rng.randrange(8)
    return [Frame(frame.message, bytes(payload))]


def cut_short(frame: Frame, rng: random.Random) -> list[Frame]:
    whole = as_bytes(frame)
    raise Cut(whole[: len(whole) - rng.randrange(1, len(frame.payload))])


def say_less(frame: Frame, rng: random.Random) -> list[Frame]:
    less = rng.randrange(1, 100)
    frame.message.size -= less
    return [Frame(frame.message, frame.payload[:-less])]


def other_key(frame: Frame, rng: random.Random) -> list[Frame]:
    frame.message.key = rng.randbytes(16)
    return [frame]


def die(frame: Frame, rng: random.Random) -> list[Frame]:
    raise Cut


def twice(frame: Frame, rng: random.Random) -> list[Frame]:
    return [frame, Frame(frame.message, bytes(len(frame.payload)))]


# Change -> the reason that it is reported with, or None if it does no harm.
FAULTS = {
    flip: "tier_bytes",
    flip_sum: "tier_bytes",
    cut_short: "tier_incomplete",
    say_less: "tier_incomplete",
    other_key: "tier_identity",
    die: "tier_incomplete",
    twice: None,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("change", "kind"),
    sampled(itertools.product(FAULTS, KINDS), key=lambda case: case[0], ci=1),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fault_on_the_wire_is_a_miss(tmp_path, change, kind, seed):
    rng = random.Random(f"{change.__name__} {kind} {seed}")
    prompt = [rng.randrange(VOCAB) for _ in range(LENGTH)]
    tamper = on_unit(rng.randrange(4), partial(change, rng=rng))
    with (
        engine_pair(tmp_path, kind, kv_canary="heal") as pair,
        closing(Wire(pair.port, tamper=tamper)) as wire,
    ):
        check_answer(pair, kind, prompt, port=wire.port)
        check_reports(pair, wire, FAULTS[change])
        pair.settle()


def check_reports(
    pair: EnginePair, wire: Wire | EnginePair, reason: str | None
) -> None:
    """Check that each finding names a unit, and what was wrong with it."""
    incidents = pair.scheduler.own_incidents()
    found = [violation for one in incidents for violation in one["violations"]]
    assert {label for one in found for label in one["reasons"]} == (
        set() if reason is None else {reason}
    )
    for violation in found:
        assert violation["tier"] == "engine"
        assert violation["sender"] == f"127.0.0.1:{wire.port}"
        assert len(violation["unit"]) == 32
        assert violation["rid"]


def test_unit_of_another_request_is_found_by_its_records(tmp_path):
    """The sender took another request's unit, with everything that proves its bytes."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(2)]
    kept: list[Frame] = []

    def tamper(frame: Frame) -> list[Frame]:
        if not isinstance(frame.message, Unit):
            return [frame]
        kept.append(frame)
        if frame.message.transfer == 1 or frame.message.position != 2:
            return [frame]
        other = next(one for one in kept if one.message.position == 2)
        frame.message.seal = other.message.seal
        return [Frame(frame.message, other.payload)]

    with (
        engine_pair(tmp_path, "plain", kv_canary="heal") as pair,
        closing(Wire(pair.port, tamper=tamper)) as wire,
    ):
        for prompt in prompts:
            check_answer(pair, "plain", prompt, port=wire.port)
        check_reports(pair, wire, "tier_identity")
        assert tiers_of(pair.decode).stats.loaded == (5 + 2) * 64
        pair.settle()


def test_unit_that_is_replaced_while_it_is_sent_is_taken_back(tmp_path):
    """Host memory of the sender goes on as if nothing were sent: nothing is damaged."""
    rng = random.Random(6)
    prompt = [rng.randrange(VOCAB) for _ in range(LENGTH)]
    with engine_pair(tmp_path, "plain", kv_canary="heal") as pair:
        outlet, pool = pair.sender._outlet, tiers_of(pair.prefill).pools[0]
        send = outlet.send

        def send_late(link, unit, data, on_sent):
            if unit.position == 3:
                pool.drop([unit.key])
                data.zero_()
            send(link, unit, data, on_sent)

        outlet.send = send_late
        check_answer(pair, "plain", prompt)
        assert not pair.scheduler.own_incidents()
        assert tiers_of(pair.decode).stats.loaded == 3 * 64
        pair.settle()


def test_late_units_go_nowhere(tmp_path):
    """All units but the first are held back until their request was answered. Until
    then its landing memory is out of use."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(2)]
    held: list[Frame] = []

    def tamper(frame: Frame) -> list[Frame]:
        if not isinstance(frame.message, Unit | End):
            return [frame]
        if frame.message.transfer == 1 and getattr(frame.message, "position", 9):
            held.append(frame)
            return []
        late = [frame, *held]
        held.clear()
        return late

    with (
        engine_pair(
            tmp_path,
            "plain",
            kv_canary="heal",
            disaggregation_landing_size=0.01,
            patience=1.0,
        ) as pair,
        closing(Wire(pair.port, tamper=tamper)) as wire,
    ):
        check_answer(pair, "plain", prompts[0], port=wire.port)
        check_reports(pair, wire, "tier_incomplete")
        assert not pair.receiver.landing.is_whole
        check_answer(pair, "plain", prompts[1], port=wire.port)
        check_reports(pair, wire, "tier_incomplete")
        assert tiers_of(pair.decode).stats.loaded == (1 + 5) * 64
        pair.settle()


def test_wrong_room_sends_nothing(tmp_path):
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(3)]

    def rewrite(ask):
        ask.room = 1
        return ask

    with (
        engine_pair(tmp_path, "plain", kv_canary="heal", patience=1.0) as pair,
        closing(Wire(pair.port, rewrite=rewrite)) as wire,
    ):
        check_answer(pair, "plain", prompts[0], port=wire.port)
        check_answer(pair, "plain", prompts[1], port=wire.port)
        check_reports(pair, wire, "tier_incomplete")
        assert tiers_of(pair.decode).stats.loaded == 5 * 64
        # The prefill engine has never heard of a room.
        check_answer(pair, "plain", prompts[2], is_prefilled=False)
        assert tiers_of(pair.decode).stats.loaded == 5 * 64
        pair.settle()


def test_a_room_that_is_given_out_twice_mixes_nothing(tmp_path):
    """The prefill engine keeps the later request of a room. The earlier one asks for
    another prompt's units, or for the same ones."""
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(2)]
    with engine_pair(tmp_path, "plain", kv_canary="heal", patience=1.0) as pair:
        for number, pairing in enumerate([(prompts[0], prompts[1]), (prompts[0],) * 2]):
            pair._rooms = itertools.repeat(number)
            rids = [
                pair.submit(prompt, max_new_tokens=4, ignore_eos=True)
                for prompt in pairing
            ]
            answers = pair.run()
            for rid, prompt in zip(rids, pairing, strict=True):
                outputs = answers[rid].output_ids
                predicted = next_tokens(prompt + outputs, vocab_size=VOCAB)
                assert outputs == predicted[LENGTH - 1 : -1]
        check_reports(pair, pair, "tier_incomplete")
        pair.settle()


def test_silent_and_absent_engines_are_given_up(tmp_path):
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(2)]

    def tamper(frame: Frame) -> list[Frame]:
        return [] if isinstance(frame.message, Unit | End) or was_asked else [frame]

    was_asked: list[int] = []

    def rewrite(ask):
        was_asked.append(ask.room)
        return ask

    with engine_pair(tmp_path, "plain", kv_canary="heal", beat=0.2) as pair:
        with closing(Wire(pair.port, tamper=tamper, rewrite=rewrite)) as wire:
            check_answer(pair, "plain", prompts[0], port=wire.port)
            check_reports(pair, wire, "tier_incomplete")
        check_answer(pair, "plain", prompts[1], port=wire.port)
        pair.settle()


def test_the_inspector_lists_transfers(tmp_path):
    """Of both sides, from the question to the end."""
    prompt = list(range(LENGTH))
    seen: dict[bool, list] = {False: [], True: []}
    with engine_pair(tmp_path, "plain") as pair:
        pair.submit(prompt, max_new_tokens=2, ignore_eos=True)

        def look(step):
            for harness in (pair.prefill, pair.decode):
                for view in harness.scheduler.tiers.snapshot().transfers:
                    seen[view.is_sent].append(view)

        pair.run(on_step=look)
        pair.settle()
        look(0)
    unit_bytes = seen[False][0].total_bytes // 5
    for views in seen.values():
        assert {view.room for view in views} == {"1"}
        assert {view.total_bytes for view in views} == {5 * unit_bytes}
        assert all(0 <= view.bytes <= view.total_bytes for view in views)
    assert {view.state for view in seen[False]} >= {"asked", "is loaded"}
    assert seen[False][-1].bytes == 5 * unit_bytes
    assert {"waits for its prompt", "sending"} & {view.state for view in seen[True]}


def test_aborted_request_gives_its_memory_back(tmp_path):
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(LENGTH)]
    with engine_pair(tmp_path, "plain", kv_canary="raise") as pair:
        for steps in range(8):
            rid = pair.submit(prompt, max_new_tokens=4, ignore_eos=True)

            def on_step(step, rid=rid, steps=steps):
                if step == steps:
                    pair.abort(rid)

            pair.run(on_step=on_step)
            pair.settle()
        check_answer(pair, "plain", prompt)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
