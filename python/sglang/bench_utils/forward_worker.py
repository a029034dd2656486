"""The bare model as a worker: `python -m sglang.bench_utils.forward_worker`.

Commands: `load` (flags of the engine), `prefill` (one prompt), `floor`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sglang.bench_utils.floor import (
    floor_report,
    measure_bandwidth,
    weight_bytes_per_step,
)
from sglang.bench_utils.forward_runner import ForwardRunner
from sglang.bench_utils.report import Json
from sglang.bench_utils.worker import serve
from sglang.srt.server_args import ServerArgs


@dataclass
class ForwardSide:
    """The bare model as one side of a comparison; `load` creates it."""

    runner: ForwardRunner | None = None

    def load(self, **flags: Any) -> None:
        self.runner = ForwardRunner(ServerArgs(log_level="error", **flags))

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds of the forward over `prompt`, the first token included."""
        runner = self._loaded()
        began = time.perf_counter()
        runner.prefill([prompt])
        runner.synchronize()
        seconds = time.perf_counter() - began
        runner.release()
        return seconds

    def floor(self) -> Json:
        """Return the floor of a decode step; see `floor_report`."""
        weight_bytes = weight_bytes_per_step(self._loaded().runner.model)
        return floor_report(weight_bytes, measure_bandwidth(weight_bytes))

    def _loaded(self) -> ForwardRunner:
        if self.runner is None:
            raise ValueError("call load first")
        return self.runner


if __name__ == "__main__":
    side = ForwardSide()
    serve({"load": side.load, "prefill": side.prefill, "floor": side.floor})
