"""Real engines under random traffic: who follows their events has their blocks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from event_world import ReplayClient, events_of, example, wait_until

from sglang.srt.managers.messages.io_struct import FlushCacheReq
from sglang.srt.managers.scheduler.kv_event_feed import open_event_publisher
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.kv_blocks import StrictReader, tree_blocks
from sglang.test.mock_oracle import NO_WINDOWS
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=8, suite="cpu", full_time=150)

VOCAB, CONTEXT = 1000, 512
WINDOW = 24

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "pages of 16": {"page_size": 16, "max_total_tokens": 512},
    "pages of 4, overlapped": {
        "page_size": 4,
        "max_total_tokens": 512,
        "overlap": True,
    },
    "single tokens": {"page_size": 1, "max_total_tokens": 512},
    "windows": {"page_size": 4, "max_total_tokens": 512, "swa_full_tokens_ratio": 0.5},
    "drafts": {"page_size": 4, "max_total_tokens": 512, "overlap": True},
}
# The whole counts of these are 2,000 requests.
LONG = ("pages of 4, overlapped", "drafts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    write_mock_model(root / "plain", **sizes)
    write_mock_model(
        root / "windows",
        **sizes,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    )
    write_mock_draft(root / "draft", kind="EAGLE", source="attention", **sizes)
    return root


def config_of(endpoints: tuple[str, str], **more: Any) -> str:
    return json.dumps(
        {
            "publisher": "zmq",
            "endpoint": endpoints[0],
            "replay_endpoint": endpoints[1],
            "buffer_steps": 1_000_000,
            **more,
        }
    )


def engine(models: Path, name: str, endpoints: tuple[str, str]) -> EngineHarness:
    options = dict(CONFIGURATIONS[name])
    if name == "drafts":
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(models / "draft"),
            "speculative_eagle_topk": 1,
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": 4,
        }
    return EngineHarness(
        models / ("windows" if name == "windows" else "plain"),
        skip_tokenizer_init=True,
        chunked_prefill_size=64,
        kv_events_config=config_of(endpoints),
        **options,
    )


def close(harness: EngineHarness) -> None:
    feed = harness.scheduler._kv_events
    assert feed is not None
    feed.close()


class Lossy:
    """The reader of the guide, of which some messages are withheld; and a strict one
    that gets every batch by replays alone."""

    def __init__(self, harness: EngineHarness, endpoints: tuple[str, str]) -> None:
        self._rng = random.Random(0)
        self._harness = harness
        self.cached = example()(*endpoints)
        self._replays = ReplayClient(endpoints[1])
        self._strict = StrictReader(harness.scheduler.cache.page_size)
        self._next = 0
        self.num_lost = 0
        self.seen = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}

    def on_step(self, step: int) -> None:
        if self._rng.random() < 0.03:
            for _ in range(self._rng.randrange(1, 6)):
                if self.cached.events.poll(0):
                    self.cached.events.recv_multipart()
                    self.num_lost += 1
        elif self._rng.random() < 0.5:
            self.cached.read(timeout_ms=0)

    def check(self) -> None:
        """Compare both readers with the tree of an engine that rests."""
        publisher = self._harness.scheduler._kv_events._publisher
        end = publisher._log.end
        wait_until(lambda: publisher._next == end, "all is published")
        # A withheld last message would show with the next one only.
        self.cached.replay()
        blocks = tree_blocks(self._harness.scheduler.cache)
        assert {h: list(block.tokens) for h, block in blocks.items()} == (
            self.cached.blocks
        )
        for seq, payload in self._replays.replay(self._next):
            assert seq == self._next
            self._next += 1
            events = events_of(payload)
            assert events, "a batch of nothing"
            for event in events:
                self.seen[event[0]] += 1
            self._strict.apply(events)
        assert self._strict.blocks == blocks

    def close(self) -> None:
        self.cached.events.close(linger=0)
        self.cached.replays.close(linger=0)
        self._replays.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_readers_have_the_blocks_of_the_engine(
    models: Path, endpoints: tuple[str, str], name: str
) -> None:
    """Evictions, retractions, aborts, flushes, and messages that are lost."""
    harness = engine(models, name, endpoints)
    reader = Lossy(harness, endpoints)
    windows = (WINDOW, None) if name == "windows" else NO_WINDOWS
    rounds = count(ci=2, full=20)
    for turn in range(rounds):
        traffic = Traffic(
            harness,
            random.Random(turn),
            count(ci=20, full=100 if name in LONG else 30),
            longest_output=count(ci=80, full=160),
        )

        def on_step(step: int, traffic: Traffic = traffic) -> None:
            traffic.on_step(step)
            reader.on_step(step)

        answers = harness.run(on_step=on_step)
        check(traffic.expected, answers, vocab_size=VOCAB, windows=windows)
        reader.check()
        if turn % 3 == 0:
            harness.io.requests.append(FlushCacheReq(call_id=turn))
            harness.run()
            assert tree_blocks(harness.scheduler.cache) == {}
            reader.check()
            assert reader.cached.blocks == {}
    stats = harness.scheduler.stats_snapshot()
    assert stats.kv_events_published_total == sum(reader.seen.values())
    assert stats.kv_events_dropped_total == 0 < stats.kv_events_replayed_total
    assert reader.num_lost and reader.seen["BlockRemoved"]
    assert reader.seen["AllBlocksCleared"] == 1 + len(range(0, rounds, 3))
    reader.close()
    close(harness)


@pytest.mark.timeout(1800)
def test_readers_have_the_blocks_after_healing(
    models: Path, endpoints: tuple[str, str]
) -> None:
    """Cached runs that a healing cuts, and pages under quarantine."""
    harness = EngineHarness(
        models / "plain",
        skip_tokenizer_init=True,
        page_size=4,
        max_total_tokens=2048,
        kv_canary="heal",
        kv_canary_real_data="all",
        kv_events_config=config_of(endpoints),
    )
    reader = Lossy(harness, endpoints)
    prompt = list(range(100, 160))
    harness.generate(prompt, max_new_tokens=20, ignore_eos=True)
    reader.check()
    cache = harness.scheduler.cache
    node = next(cache.iter_nodes())
    keys, _ = harness.scheduler.worker.model_runner.token_to_kv_pool.get_kv_buffer(0)
    keys[int(node.slots[8])] += 1
    before = reader.seen["BlockRemoved"]
    answer = harness.generate(prompt, max_new_tokens=20, ignore_eos=True)
    assert len(answer.output_ids) == 20
    assert sum(harness.scheduler.stats_snapshot().kv_canary_heals_total.values())
    reader.check()
    assert reader.seen["BlockRemoved"] > before
    reader.close()
    close(harness)


def test_an_endpoint_in_use_refuses_the_engine(
    models: Path, endpoints: tuple[str, str]
) -> None:
    """Before weights are read: the model does not even exist."""
    harness = engine(models, "single tokens", endpoints)
    with pytest.raises(ValueError, match=f"endpoint {endpoints[0]} is in use"):
        EngineHarness(models / "none", kv_events_config=config_of(endpoints))
    close(harness)


def test_the_first_rank_alone_publishes(
    models: Path, endpoints: tuple[str, str]
) -> None:
    args = ServerArgs(
        model_path=str(models / "plain"),
        skip_tokenizer_init=True,
        kv_events_config=config_of(endpoints),
    )
    assert open_event_publisher(args, rank=1) is None
    publisher = open_event_publisher(args, rank=0)
    assert publisher is not None
    publisher.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
