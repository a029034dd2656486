"""Cost of the inspector: decode steps with and without a page that looks, and frames.

python benchmark/e2e/bench_inspector.py [--pairs 60] [--frames 200]

`decode`: a request decodes on the demo model on the CPU, under `--kv-canary raise`;
blocks of steps without a viewer and with one page open (a snapshot every quarter of a
second) take turns, and the paired differences of CPU time count. Compare trees with
`benchmark/compare_trees.py` for the cost without a viewer.

`snapshot`: time of one snapshot of a pool of a million slots, pages of 1 and of 16.

`frames`: headless Chromium draws a million cells, where it is installed with a driver
(`make test-browser`). `repaint`: every cell gets its colour anew in every frame.
`zoom`: the map is zoomed and moved in every frame, and 25,000 cells change four times a
second.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from served import build_served

from sglang.srt.managers.front.snapshot_feed import INTERVAL
from sglang.srt.managers.messages.io_struct import (
    GenerateReq,
    GetSnapshotReq,
    GetSnapshotRsp,
)
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import page_folders
from sglang.test.browser import SYNTHETIC, InspectorPage, open_browser, why_no_browser
from sglang.test.tiny_models import write_mock_model

MILLION = 1 << 20
PROMPT = list(range(5, 149))
BLOCK = 64
FRAMES = """
async function framesOf(count, work) {
  await new Promise(requestAnimationFrame);
  const began = performance.now();
  const drawn = app.map.frames;
  for (let i = 0; i < count; i += 1) {
    await work(i);
    app.map.draw();
    await new Promise(requestAnimationFrame);
    // Reading a pixel waits until the picture is there.
    document.getElementById("map").getContext("2d").getImageData(0, 0, 1, 1);
  }
  const seconds = (performance.now() - began) / 1000;
  const frames = app.map.frames - drawn;
  return {fps: frames / seconds, ms_per_frame: 1000 * seconds / frames};
}
app.greet({model: "", kv_canary: "none", speculative_algorithm: null});
await app.take(...synthetic(argument.cells, 1));
app.map.setMode("owner");
"""
REPAINT = "return framesOf(argument.frames, () => app.map.refresh());"
ZOOM = """
let seq = 1, due = 0;
return framesOf(argument.frames, async (i) => {
  app.map.view.zoom(i % 40 < 20 ? 1.1 : 1 / 1.1, 400, 300);
  app.map.view.pan(3, 2);
  if (performance.now() >= due) {
    due = performance.now() + 250;
    seq += 1;
    await app.take(...synthetic(argument.cells, seq, {seed: seq, changes: 25000}));
  }
});
"""
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class Decoding:
    """A scheduler with one decoding request, and a page that may be open."""

    def __init__(self) -> None:
        self.io = ListIO()
        args = ServerArgs(
            device="cpu",
            skip_tokenizer_init=True,
            kv_canary="raise",
            max_total_tokens=8192,
        )
        self.scheduler: Scheduler = build_served(args, self.io)
        self._number = 0
        self._due = 0.0
        self.num_snapshots = 0

    def block(self, *, looks: bool) -> float:
        """Return CPU milliseconds per step of a block."""
        self._keep_busy()
        self._due = 0.0
        began = time.process_time()
        for _ in range(BLOCK):
            if looks and time.monotonic() >= self._due:
                self._due = time.monotonic() + INTERVAL
                self.io.requests.append(GetSnapshotReq(call_id=0))
                self.num_snapshots += 1
            self.scheduler.step()
        seconds = time.process_time() - began
        self.io.responses.clear()
        return seconds * 1e3 / BLOCK

    def _keep_busy(self) -> None:
        running = self.scheduler.running
        if running is not None and running.reqs[0].remaining_new_tokens > 2 * BLOCK:
            return
        while self.scheduler.has_work():
            self.scheduler.step()
        self._number += 1
        params = SamplingParams(max_new_tokens=1500, temperature=0.0, ignore_eos=True)
        self.io.requests.append(
            GenerateReq(rid=str(self._number), input_ids=PROMPT, sampling_params=params)
        )
        for _ in range(16):
            self.scheduler.step()


def measure_decode(pairs: int) -> dict[str, Any]:
    decoding = Decoding()
    for looks in (True, False):
        decoding.block(looks=looks)
    decoding.num_snapshots = 0
    alone, looked = [], []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        for looks in order:
            (looked if looks else alone).append(decoding.block(looks=looks))
    differences = sorted(b - a for a, b in zip(alone, looked, strict=True))
    # 95 % interval of the median, by order statistics.
    margin = int(0.98 * pairs**0.5)
    low, high = pairs // 2 - margin, min(pairs // 2 + margin, pairs - 1)
    base = statistics.median(alone)
    return {
        "ms_per_step": base,
        "snapshots_per_block": decoding.num_snapshots / pairs,
        "added_percent": 100 * statistics.median(differences) / base,
        "added_percent_low": 100 * differences[low] / base,
        "added_percent_high": 100 * differences[high] / base,
    }


def measure_snapshots(page_size: int) -> dict[str, Any]:
    """Measure milliseconds of a snapshot of a large pool, with all pages and with
    changes only.
    """
    io = ListIO()
    with tempfile.TemporaryDirectory() as folder:
        model = write_mock_model(
            Path(folder), vocab_size=1000, max_position_embeddings=2048
        )
        args = ServerArgs(
            model_path=str(model),
            device="cpu",
            skip_tokenizer_init=True,
            kv_canary="raise",
            max_total_tokens=MILLION,
            page_size=page_size,
        )
        scheduler = build_served(args, io)
    params = SamplingParams(max_new_tokens=1000, temperature=0.0, ignore_eos=True)
    for i in range(32):
        ids = [(i * 37 + j) % 1000 for j in range(500)]
        io.requests.append(
            GenerateReq(rid=str(i), input_ids=ids, sampling_params=params)
        )
    for _ in range(8):
        scheduler.step()
    found: dict[str, list[float]] = {"whole": [], "changes": []}
    for name in ("whole", "changes") * 8:
        scheduler.step()
        io.requests.append(GetSnapshotReq(call_id=0, is_whole=name == "whole"))
        scheduler.step()
        (answer,) = [m for m in io.responses if isinstance(m, GetSnapshotRsp)]
        io.responses.clear()
        found[name].append(answer.snapshot.seconds * 1e3)
    medians = {f"ms_{name}": statistics.median(times) for name, times in found.items()}
    return {"page_size": page_size, "slots": MILLION} | medians


def measure_frames(frames: int) -> dict[str, Any]:
    with open_browser() as browser:
        page = InspectorPage(browser)
        page.tab.route("**/*", _serve)
        page.open("http://inspector")
        argument = {"cells": MILLION, "frames": frames}
        return {
            name: page.run(SYNTHETIC + FRAMES + work, argument)
            for name, work in (("repaint", REPAINT), ("zoom", ZOOM))
        }


def _serve(route: Any) -> None:
    """Serve the page's files, without a server for data."""
    name = route.request.url.rpartition("/")[2]
    name = "index.html" if name == "canary" else name
    places = [folder / name for folder in page_folders("inspector")]
    file = next(filter(Path.is_file, places), None)
    if file is not None:
        kind = MEDIA.get(file.suffix, "image/svg+xml")
        route.fulfill(body=file.read_bytes(), content_type=kind)
    else:
        route.fulfill(status=404, body="{}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    document: dict[str, Any] = {"benchmark": "bench_inspector"}
    decode = document["decode"] = measure_decode(args.pairs)
    print(
        f"decode: {decode['ms_per_step']:.3f} ms a step; a page that looks adds "
        f"{decode['added_percent']:.2f} % ({decode['added_percent_low']:.2f} to "
        f"{decode['added_percent_high']:.2f})"
    )
    document["snapshot"] = [measure_snapshots(size) for size in (1, 16)]
    for row in document["snapshot"]:
        print(
            f"snapshot of {row['slots']} slots, pages of {row['page_size']}: "
            f"{row['ms_changes']:.1f} ms, with all pages {row['ms_whole']:.1f} ms"
        )
    missing = why_no_browser()
    document["frames"] = None if missing else measure_frames(args.frames)
    for name, row in (document["frames"] or {}).items():
        print(
            f"{name}: {row['fps']:.1f} frames/s of {MILLION} cells, "
            f"{row['ms_per_frame']:.1f} ms each"
        )
    if missing:
        print(f"frames: not measured: {missing}")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
