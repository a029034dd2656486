"""A graph set captures the largest first, serves the smallest that fits, and counts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sglang.srt.model_executor.graph_set import GraphSet, capture_warm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.recording_backend import RecordingBackend

register_cpu_ci(est_time=2, suite="cpu")


class Key(NamedTuple):
    """A key that is no number."""

    size: int


def sums(sizes, calls):
    """Graphs that add up the first elements of one static tensor."""
    static = torch.zeros(max(sizes, default=1))

    def capture(key):
        def run():
            calls.append(key.size)
            return static[: key.size].sum()

        return capture_warm(run, backend=RecordingBackend(), warm_ups=2)

    keys = [Key(size) for size in sizes]
    graphs = GraphSet("sum", keys, size_of=lambda key: key.size, capture=capture)
    return static, graphs


def test_the_largest_is_captured_first_after_its_warm_ups(caplog):
    calls: list[int] = []
    with caplog.at_level("INFO"):
        _, graphs = sums([2, 8, 4], calls)
    assert calls == [8, 8, 8, 4, 4, 4, 2, 2, 2]
    assert "Captured 3 sum graphs (sizes up to 8, 3 segments)" in caplog.text
    assert graphs.num_segments == 3


def test_the_smallest_graph_that_fits_serves():
    static, graphs = sums([2, 8, 4], [])
    static.fill_(1)
    for count, size in ((0, 2), (1, 2), (2, 2), (3, 4), (5, 8), (8, 8)):
        key, graph = graphs.serving(count)
        assert key == Key(size)
        with torch.inference_mode():
            graph.replay()
        assert graph.outputs.item() == size
    assert graphs.largest == 8
    assert graphs.num_replays == 6
    assert [graph.num_replays for graph in graphs.graphs] == [3, 1, 2]


def test_an_empty_set_serves_nothing(caplog):
    with caplog.at_level("INFO"):
        _, graphs = sums([], [])
    assert (graphs.largest, graphs.graphs, graphs.num_replays) == (0, [], 0)
    assert "Captured" not in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
