"""The inspector's cards of tiers, transfers and states in headless Chromium, over a
decode engine that keeps states, host memory and files.

Skipped where there is no browser or no driver for it; `make test-browser` runs it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from sglang.srt.managers.messages.tier_snapshot import PlaceState
from sglang.test.browser import InspectorPage, why_no_browser
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.server_process import ServerProcess
from sglang.test.tiny_models import MOCK_STATE, write_mock_model

register_cpu_ci(est_time=1, full_time=60, suite="cpu")

MISSING = why_no_browser()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

VOCAB, UNIT, NUM_PROMPTS, PROMPT = 1000, 64, 4, 200
ROWS, STATES = 4, 24
# A page knows numbers of 53 bits.
ROOM = (1 << 62) + 1
PLACE_STATES = [state.name.lower() for state in PlaceState]
# Colours of the pool's map that say the like.
PLACE_COLOURS = ["free", "cached", "running", "draft"]
STATE_COLOURS = {"taken": "locked"}
HOSTILE = (
    '<img src=x onerror="window.hacked = true">',
    "<script>window.hacked = true</script>",
    '"><svg onload=window.hacked=true>',
    "${window.hacked = true}",
    "constructor",
    "__proto__",
    "\u202egnp.exe",
    "x" * 2000,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tiers")
    model = write_mock_model(
        folder / "model", vocab_size=VOCAB, max_position_embeddings=512, **MOCK_STATE
    )
    files = {"dir": str(folder / "files")}
    made = ServerProcess(
        [
            *("--model-path", str(model), "--skip-tokenizer-init"),
            *("--max-total-tokens", "4096", "--max-running-requests", str(ROWS)),
            *("--max-mamba-cache-size", str(STATES), "--mamba-track-interval", "64"),
            *("--kv-canary", "raise", "--enable-hierarchical-cache"),
            *("--hicache-storage-backend", "file"),
            *("--hicache-storage-backend-extra-config", json.dumps(files)),
            *("--disaggregation-mode", "decode"),
            *("--disaggregation-transfer-backend", "tcp"),
        ],
        environment={"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "60"},
    )
    yield made.wait_ready()
    made.stop()


@pytest.fixture
def page(server: ServerProcess, browser: Any) -> Iterator[InspectorPage]:
    made = InspectorPage(browser)
    made.open(server.url)
    made.wait_for_snapshots()
    yield made
    assert made.errors == []
    made.close()


def ask(server: ServerProcess, first: int, **fields: Any) -> None:
    """Have a prompt served that begins with the token `first`."""
    body = {
        "input_ids": [first, *(i % VOCAB for i in range(PROMPT - 1))],
        "sampling_params": {"max_new_tokens": 4},
        **fields,
    }
    answer = httpx.post(server.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def colours_of(page: InspectorPage, canvas: str, points: list[list[float]]) -> Any:
    """Return the colours of points of a canvas, which is an expression."""
    return page.run(
        """
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        const canvas = """
        + canvas
        + """;
        const x = canvas.width / canvas.clientWidth;
        const y = canvas.height / canvas.clientHeight;
        const digits = (value) => value.toString(16).padStart(2, "0");
        return argument.map(([left, top]) => {
          const place = [Math.floor(left * x), Math.floor(top * y), 1, 1];
          const {data} = canvas.getContext("2d").getImageData(...place);
          return "#" + [0, 1, 2].map((c) => digits(data[c])).join("");
        });
        """,
        points,
    )


def test_host_memory_and_files_are_drawn_as_they_are(
    server: ServerProcess, page: InspectorPage
) -> None:
    for number in range(NUM_PROMPTS):
        ask(server, number)
    # Until what was stored is written, and the page has seen it.
    at_rest = "app.tiers.cells.every((cells) => cells.every((cell) => cell < 2))"
    written = f"{NUM_PROMPTS * (PROMPT // UNIT)} units"
    page.tab.locator("#tier-files", has_text=f"files, full: {written}").wait_for()
    page.wait(f"app.tiers.cells[0].some((cell) => cell === 1) && {at_rest}")
    told = httpx.get(server.url + "/canary/tiers").json()
    assert page.tab.locator("#tiers-size").inner_text() == f"units of {UNIT} tokens"
    groups = page.run("return [...app.tiers.maps.keys()];")
    assert groups == ["full", "state"] == [view["group"] for view in told["host"]]
    css = page.run("return app.palette.css;")
    for number, view in enumerate(told["host"]):
        cells = page.run("return [...app.tiers.cells[argument]];", number)
        counted = Counter(PLACE_STATES[cell] for cell in cells)
        assert counted == Counter({s: view[s] for s in PLACE_STATES if view[s]})
        canvas = f"[...app.tiers.maps.values()][{number}].canvas"
        width, height = page.run(
            f"return [{canvas}.clientWidth, {canvas}.clientHeight];"
        )
        columns = -int(-((len(cells) * width / height) ** 0.5) // 1)
        rows = -(-len(cells) // columns)
        middles = [
            [
                (i % columns + 0.5) * width / columns,
                (i // columns + 0.5) * height / rows,
            ]
            for i in range(len(cells))
        ]
        expected = [css[PLACE_COLOURS[cell]] for cell in cells]
        assert colours_of(page, canvas, middles) == expected
        legend = page.tab.locator("#tier-maps .legend").nth(number).inner_text()
        assert legend.split("\n") == [f"{s} {view[s]:,}" for s in PLACE_STATES]


def test_states_and_checkpoints_are_drawn_as_they_are(
    server: ServerProcess, page: InspectorPage
) -> None:
    for number in range(NUM_PROMPTS):
        ask(server, number)
    page.wait("app.requests.size === 0")
    page.wait_for_snapshots(2)
    slots = page.run("app.stream.stop(); return app.states.slots;")
    states = [slot["state"] for slot in slots]
    assert len(slots) == STATES and set(states[:ROWS]) == {"free"}
    checkpoints = [slot for slot in slots[ROWS:] if slot["state"] == "cached"]
    assert len(checkpoints) >= NUM_PROMPTS
    assert all(slot["position"] > 0 and slot["holder"] < 0 for slot in checkpoints)
    css = page.run("return app.palette.css;")
    columns = page.run("return Math.floor(app.states.canvas.clientWidth / 16);")
    middles = [[i % columns * 16 + 7, i // columns * 16 + 7] for i in range(len(slots))]
    assert colours_of(page, "app.states.canvas", middles) == [
        css[STATE_COLOURS.get(state, state)] for state in states
    ]
    text = page.tab.locator("#states-count").inner_text()
    assert text.startswith(f"0 of {ROWS} request states in use · ")
    assert f"{STATES - ROWS} checkpoints: {len(checkpoints)} cached" in text
    # A click on a checkpoint follows the run of the cache that it belongs to.
    slot = checkpoints[0]
    x, y = middles[slot["slot"] - 1]
    page.tab.locator("#states").click(position={"x": x, "y": y})
    assert page.run("return app.followed;") == slot["holder"]
    note = page.tab.locator("#states-note").inner_text()
    assert f"after {slot['position']} tokens" in note


@contextmanager
def silent_engine() -> Iterator[int]:
    """The port of a prefill engine that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_transfers_are_listed_until_they_end(
    server: ServerProcess, page: InspectorPage
) -> None:
    assert not page.tab.locator("#transfers").is_visible()
    with silent_engine() as port:
        address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        asking = threading.Thread(
            target=ask,
            args=(server, 900),
            kwargs={**address, "bootstrap_room": ROOM, "rid": HOSTILE[0]},
        )
        asking.start()
        row = page.tab.locator("#transfers tbody tr")
        row.wait_for()
        cells = row.locator("td").all_inner_texts()
        assert cells[:3] == [str(ROOM), f"from 127.0.0.1:{port}", "asked"]
        assert cells[3].startswith("0 MB of ") and cells[4].endswith(" s")
        assert row.count() == 1
        shown = page.tab.locator("#requests tbody tr button")
        assert HOSTILE[0] in shown.first.inner_text()
    # Its connection ends, and it goes on alone.
    asking.join()
    page.wait("document.getElementById('transfers').hidden")
    assert not page.run("return Boolean(window.hacked);")


def test_hostile_names_are_shown_and_do_nothing(page: InspectorPage) -> None:
    page.run("app.stream.stop();")
    page.run(
        """
        const packed = new Blob([Uint8Array.of(0, 1, 2, 3)]).stream()
          .pipeThrough(new CompressionStream("deflate"));
        const bytes = new Uint8Array(await new Response(packed).arrayBuffer());
        const cells = btoa(String.fromCharCode(...bytes));
        await app.tiers.update({
          unit_tokens: 64,
          host: argument.map((group) => ({
            group, unit_bytes: 100, free: 1, holding: 1, loading: 1, writing: 1, cells,
          })),
          files: argument.map((group) => ({
            group, units: 1, bytes: 1, max_bytes: 2, oldest_seconds: 0, waiting: 1,
          })),
          transfers: argument.map((name) => ({
            room: name, peer: name, is_sent: true, state: name, bytes: 1,
            total_bytes: 2, seconds: 1,
          })),
          num_transfers: 250,
        });
        await new Promise((done) => setTimeout(done, 100));
        """,
        list(HOSTILE),
    )
    card = page.tab.locator("#tiers-card")
    assert card.locator("img, script, svg").count() == 0
    assert not page.run("return Boolean(window.hacked);")
    text = card.evaluate("one => one.textContent")
    for name in HOSTILE:
        assert text.count(name) >= 5, name
    rows = page.tab.locator("#transfers tbody tr")
    assert rows.count() == len(HOSTILE)
    rest = page.tab.locator("#transfers-rest").inner_text()
    assert rest == f"and {250 - len(HOSTILE)} more transfers"
    wide, shown = page.run(
        "return [document.documentElement.scrollWidth, window.innerWidth];"
    )
    assert wide <= shown


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
