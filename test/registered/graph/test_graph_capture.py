"""Segments and breaks replay in order, on captured addresses, with live inputs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sglang.srt.forward.graph_backends import CudaGraphBackend
from sglang.srt.forward.graph_capture import (
    SideStream,
    capture_graph,
    eager_break,
    is_capturing,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.recording_backend import RecordingBackend

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

BACKENDS = {"cpu": RecordingBackend}
if torch.cuda.is_available():
    BACKENDS["cuda"] = CudaGraphBackend


@pytest.fixture(params=[*BACKENDS])
def device(request):
    """Everything the fixture's device allocates by default lies there."""
    with torch.device(request.param):
        yield request.param


def capture(device):
    return capture_graph(BACKENDS[device]())


class TwoLayerStack:
    """A layer stack with a dynamic op between its parts, as attention is."""

    def __init__(self, width=6):
        torch.manual_seed(0)
        self.weights = torch.randn(3, width, width)
        self.live_length = 0
        self.calls = []

    def dynamic(self, x, out):
        """Depends on live state, as an attention kernel does on lengths."""
        self.calls.append(self.live_length)
        out.zero_()
        out[: self.live_length] = x[: self.live_length].cumsum(0)

    def forward(self, x):
        hidden = torch.tanh(x @ self.weights[0])
        for weight in self.weights[1:]:
            mixed = torch.empty_like(hidden)
            eager_break(self.dynamic, hidden, mixed)
            hidden = torch.tanh(mixed @ weight) + hidden
        return hidden


def captured(stack, static_input):
    stack.forward(static_input)  # libraries initialise outside the capture
    with capture(static_input.device.type) as graph:
        graph.outputs = stack.forward(static_input)
    return graph


def test_replay_equals_eager_for_every_length(device):
    stack, static = TwoLayerStack(), torch.zeros(8, 6)
    stack.live_length = 8
    graph = captured(stack, static)
    assert graph.num_breaks == 2 and len(graph.steps) == 5
    for length in (0, 1, 5, 8, 3):
        fresh = torch.randn(8, 6)
        stack.live_length = length
        expected = stack.forward(fresh.clone())
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(graph.outputs, expected)
    assert graph.num_replays == 5


def test_order_of_breaks(device):
    stack, static = TwoLayerStack(), torch.zeros(4, 6)
    stack.live_length = 1
    graph = captured(stack, static)
    stack.calls.clear()
    stack.live_length = 2
    graph.replay()
    assert stack.calls == [2, 2]


def test_in_place_ops_and_views_replay_on_the_same_memory(device):
    static = torch.zeros(6)
    with capture(device) as graph:
        doubled = static * 2
        doubled[::2].add_(1)
        graph.outputs = doubled.view(2, 3)
    address = graph.outputs.data_ptr()
    static.copy_(torch.arange(6.0))
    graph.replay()
    assert graph.outputs.data_ptr() == address
    assert graph.outputs.tolist() == [[1, 2, 5], [6, 9, 10]]


def test_python_numbers_are_frozen_at_capture(device):
    """Stale scalars give wrong results in the recorder, as they would in a CUDA
    graph."""
    scale, static = 2.0, torch.ones(2)
    with capture(device) as graph:
        graph.outputs = static * scale
    scale = 5.0
    graph.replay()
    assert graph.outputs.tolist() == [2.0, 2.0]


def test_a_break_refuses_numbers_and_results():
    with (
        pytest.raises(TypeError, match="argument 1 .* 7.* stale"),
        capture_graph(RecordingBackend()),
    ):
        eager_break(lambda x, n: None, torch.zeros(1), 7)
    assert not is_capturing()
    with (
        pytest.raises(TypeError, match="returned Tensor"),
        capture_graph(RecordingBackend()),
    ):
        eager_break(lambda x: x + 1, torch.zeros(1))


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
    ],
)
def test_host_synchronisation_is_refused(sync):
    with (
        pytest.raises(RuntimeError, match="waits for the device"),
        capture_graph(RecordingBackend()),
    ):
        sync(torch.ones(3))
    assert not is_capturing()


def test_captures_do_not_nest():
    with (
        capture_graph(RecordingBackend()),
        pytest.raises(RuntimeError, match="do not nest"),
        capture_graph(RecordingBackend()),
    ):
        pass


def test_the_graph_owns_what_it_reads(device):
    static = torch.ones(3)
    reference = weakref.ref(static)
    with capture(device) as graph:
        graph.own(static)
        middle = static + 1
        out = torch.empty(3)
        eager_break(copy_into, middle, out)
        graph.outputs = out * 2
    del static, middle, out
    gc.collect()
    assert reference() is not None
    graph.replay()
    assert graph.outputs.tolist() == [4.0, 4.0, 4.0]


def copy_into(source, out):
    out.copy_(source)


def test_outside_a_capture_a_break_is_a_call():
    out = torch.zeros(2)
    eager_break(copy_into, torch.ones(2), out)
    assert out.tolist() == [1.0, 1.0]


class LoggedStream:
    """Records the streams that wait, and those they wait for."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, stream):
        self._log.append(f"{self.name} waits for {stream.name}")

    def __enter__(self):
        self._log.append(f"enter {self.name}")

    def __exit__(self, *error):
        self._log.append(f"leave {self.name}")


class LoggedBackend(RecordingBackend):
    def __init__(self, log):
        super().__init__()
        self._log = log

    def begin(self):
        self._log.append("begin")
        super().begin()

    def end(self):
        self._log.append("end")
        return super().end()


def test_a_break_joins_forked_streams_first():
    log = []
    main = LoggedStream("main", log)
    side = SideStream(
        LoggedStream("side", log), current=lambda: main, entering=lambda stream: stream
    )
    with capture_graph(LoggedBackend(log)):
        with side.fork():
            log.append("work")
        eager_break(lambda: log.append("break"))
        side.join()  # not a part of this segment any more
        log.append("next segment")
    fork = ["side waits for main", "enter side", "work", "leave side"]
    join = ["main waits for side"]
    assert log == [
        *("begin", *fork, *join, "end", "break"),
        *("begin", "next segment", "end"),
    ]
    log.clear()
    with side.fork():
        log.append("work")
    side.join()
    side.join()
    assert log == fork + join


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forked_stream_is_captured_with_its_segment():
    """Without the join the capture of the first segment could not end."""
    side = SideStream(torch.cuda.Stream())
    x = torch.ones(1024, device="cuda")
    beside, out = torch.zeros_like(x), torch.zeros_like(x)
    with capture_graph(CudaGraphBackend()) as graph:
        with side.fork():
            torch.add(x, 1, out=beside)
        eager_break(copy_into, beside, out)
        graph.outputs = out * 3
        side.join()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert graph.outputs.unique().tolist() == [3 * (value + 1)]


def test_an_error_in_a_break_ends_the_capture():
    def fails(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), capture_graph(RecordingBackend()):
        eager_break(fails, torch.zeros(1))
    assert not is_capturing()
    captured(TwoLayerStack(), torch.zeros(2, 6)).replay()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_garbage_of_others_does_not_spoil_a_capture():
    """Destroying a graph or page-locked memory is illegal while a stream captures."""

    class Cycle:
        def __init__(self) -> None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                torch.zeros(8, device="cuda")
            self.pinned = torch.zeros(4096, pin_memory=True)
            self.itself = self

    gc.collect()
    thresholds = gc.get_threshold()
    cycles = [Cycle() for _ in range(8)]
    try:
        gc.disable()
        del cycles
        gc.set_threshold(1)
        gc.enable()
        x = torch.ones(4, device="cuda")
        with capture_graph(CudaGraphBackend()) as graph:
            for _ in range(50):
                x = x + [1.0][0]
            graph.outputs = x
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert graph.outputs.tolist() == [51.0] * 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
