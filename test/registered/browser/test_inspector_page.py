"""The inspector's page in headless Chromium, over a server that runs and is damaged.

Skipped where there is no browser or no driver for it; `make test-browser` runs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang.srt.mem_cache.page_map import PageState
from sglang.test.browser import (
    SYNTHETIC,
    InspectorPage,
    why_no_browser,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.server_process import ServerProcess

register_cpu_ci(est_time=1, full_time=260, suite="cpu")

MISSING = why_no_browser()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KEY = "inspector-test-key"
FLAGS = (
    *("--api-key", KEY, "--page-size", "8", "--max-total-tokens", "4096"),
    *("--kv-canary", "heal", "--kv-canary-real-data", "all"),
    *("--kv-canary-heal-limit", "0", "--kv-canary-sweep-interval", "20"),
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
NUM_PAGES = 4096 // 8
STATES = [state.name.lower() for state in PageState]
MILLION = 1_000_000
# An hour at four snapshots a second.
HOUR = 14_400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    reports = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB", "0.01")
        patch.setenv("SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS", "50")
        made = ServerProcess(
            [
                *FLAGS,
                "--kv-canary-report-dir",
                str(reports),
                "--kv-canary-report-tokens",
            ]
        )
    yield made.wait_ready()
    made.stop()


@pytest.fixture
def page(browser: Any) -> Iterator[InspectorPage]:
    made = InspectorPage(browser)
    yield made
    assert made.errors == []
    made.close()


class Load:
    """Clients that ask one after the other until the end of the scope."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(i,)) for i in range(3)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        count = 0
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            while not self._stop.is_set():
                count += 1
                body = {
                    "text": "import os\nimport sys\n\n\ndef main():\n" * 4,
                    "rid": f"load-{number}-{count}",
                    "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
                }
                answer = client.post("/generate", json=body, headers=headers)
                assert answer.status_code == 200, answer.text


def drawn(page: InspectorPage) -> tuple[dict[str, int], list[int]]:
    """How many pixels of the map have each colour, and pages each state then."""
    colours, counts = page.run(
        """
        const canvas = document.getElementById("map");
        app.map.drawNow();
        const {width, height} = canvas;
        const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
        const digits = (value) => value.toString(16).padStart(2, "0");
        const counts = {};
        for (let i = 0; i < data.length; i += 4) {
          const hex = "#" + [0, 1, 2].map((c) => digits(data[i + c])).join("");
          counts[hex] = (counts[hex] ?? 0) + 1;
        }
        return [counts, [...app.pool.counts]];
        """
    )
    return colours, counts


def test_without_a_key_it_shows_nothing_and_asks_for_one(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url)
    dialog = page.tab.locator("#login")
    dialog.wait_for(state="visible")
    assert page.run("return [app.snapshots, app.hello];") == [0, None]
    page.tab.fill("#login-key", "wrong key")
    page.tab.click("#login-form button")
    page.tab.locator("#login-why", has_text="no key").wait_for(state="visible")
    page.tab.fill("#login-key", "wrong")
    page.tab.click("#login-form button")
    page.tab.locator("#login-why", has_text="missing or wrong").wait_for()
    page.tab.fill("#login-key", KEY)
    page.tab.click("#login-form button")
    page.wait_for_snapshots(2)
    assert not dialog.is_visible()
    # In the tab's own store alone; a new tab starts without.
    assert KEY not in page.tab.url
    page.tab.reload()
    page.wait_for_snapshots()
    page.tab.click("#forget-key")
    dialog.wait_for(state="visible")
    assert KEY not in server.log()


def test_it_draws_the_pool_and_follows_a_running_load(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    page.wait_for_snapshots()
    assert KEY not in page.tab.url
    assert page.run("return app.pool.numPages;") == NUM_PAGES
    with Load(server):
        page.wait("app.pool.counts[1] > 3 && app.requests.size === 3")
        page.wait_for_snapshots(8)
        shown = page.tab.locator("#requests tbody tr")
        assert shown.count() == 3
        # After the mark of the key that the requests came with.
        assert ":load-" in shown.first.locator("button").inner_text()
        page.wait("app.pool.counts[3] > 0 && app.runs.size > 1")
        colours, counts = drawn(page)
        css = page.run("return app.palette.css;")
        assert sum(counts) == NUM_PAGES
        # The pixels of pages: each state has the share that it has of the pages.
        pixels = {state: colours.get(css[state], 0) for state in STATES}
        assert sum(pixels.values()) > 0.5 * sum(colours.values())
        for state, number in zip(STATES, counts, strict=True):
            share = pixels[state] / sum(pixels.values())
            assert share == pytest.approx(number / NUM_PAGES, abs=0.05), state
        assert pixels["locked"] > 0
        tiles = page.tab.locator(".tile-value").all_inner_texts()
        assert len(tiles) == 8
        assert float(tiles[0].split("tok")[0].replace(",", "").replace("k", "")) > 0
        # The clients may all be between two requests.
        page.wait("app.counters.tiles[1].value.textContent === '3'")
        page.wait("app.counters.tiles.every((tile) => tile.isThere)")
    page.wait("app.requests.size === 0 && app.pool.counts[1] === 0")
    assert "Nothing" not in page.tab.locator("#tree-count").inner_text()


def test_a_click_follows_a_request_and_the_pointer_shows_its_record(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    with Load(server):
        page.wait("app.pool.counts[1] > 6")
        place = """
            const index = app.pool.cells.findIndex((cell) => (cell & 7) === 1);
            const box = document.getElementById("map").getBoundingClientRect();
            const {x, y, columns, scale} = app.map.view;
            return [box.x + x + (index % columns + 0.5) * scale,
                    box.y + y + (Math.floor(index / columns) + 0.5) * scale];
        """
        x, y = page.run(place)
        page.tab.mouse.move(x, y)
        page.tab.locator("#slot h3", has_text="Record of the target pool").wait_for()
        page.tab.locator("#slot h3", has_text="Record of the draft pool").wait_for()
        text = page.tab.locator("#slot").inner_text()
        assert "Lineage" in text and "load-" in text
        x, y = page.run(place)
        page.tab.mouse.click(x, y)
        page.wait("app.followed > 0")
        followed = page.tab.locator("#requests tr.followed")
        assert followed.count() == 1
        # Everything else fades.
        owners = page.run("return [...app.map.followed];")
        assert owners[0] > 0 and all(owner < 0 for owner in owners[1:])
        page.tab.click("#unfollow")
        page.wait("app.followed === 0 && app.map.followed === null")


def test_states_have_a_card_of_their_own(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    page.wait_for_snapshots()
    card = page.tab.locator("#states-card")
    assert not card.is_visible(), "this model has no states"
    colours, css = page.run(
        """
        app.stream.stop();
        const {readSlots} = await import("/canary/assets/states.js");
        const table = Int32Array.of(1, 40, 3, 0, 0, 0, 2, 64, -5, 4, 0, 0);
        app.states.update(readSlots(table), 2);
        app.states.drawNow();
        const canvas = document.getElementById("states");
        const ratio = window.devicePixelRatio || 1;
        const digits = (value) => value.toString(16).padStart(2, "0");
        const colours = [0, 1, 2, 3].map((slot) => {
          const place = [(slot * 16 + 7) * ratio, 7 * ratio, 1, 1];
          const {data} = canvas.getContext("2d").getImageData(...place);
          return "#" + [0, 1, 2].map((c) => digits(data[c])).join("");
        });
        return [colours, app.palette.css];
        """
    )
    assert colours == [css[n] for n in ("running", "free", "cached", "quarantined")]
    assert card.is_visible()
    count = page.tab.locator("#states-count").inner_text()
    assert count.startswith("1 of 2 request states in use · 2 checkpoints: 1 cached")
    page.tab.focus("#states")
    for key in ["ArrowRight"] * 3:
        page.tab.keyboard.press(key)
    note = page.tab.locator("#states-note")
    assert "slot 3: checkpoint of the prefix cache · after 64 tokens" in (
        note.inner_text()
    )


def test_the_keyboard_does_what_the_pointer_does(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    page.wait_for_snapshots()
    page.tab.focus("#map")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.tab.keyboard.press(key)
    columns = page.run("return app.map.view.columns;")
    assert page.run("return app.map.cursor;") == (2 + columns) * 8
    page.tab.locator("#slot-name", has_text=f"page {2 + columns},").wait_for()
    for _ in range(10):
        page.tab.keyboard.press("+")
    scale, least = page.run("return [app.map.view.scale, app.map.view.least];")
    assert scale > 4 * least
    page.tab.keyboard.press("0")
    assert page.run("return app.map.view.scale;") == least
    page.tab.fill("#go-slot", "801")
    page.tab.keyboard.press("Enter")
    page.tab.locator("#slot-name", has_text="page 100, offset 1").wait_for()
    # Zooming keeps the slot in view.
    for _ in range(6):
        page.tab.click("#zoom-in")
    x, y = page.run("return app.map.view.centreOf(99);")
    width, height = page.run("return [app.map.view.width, app.map.view.height];")
    assert 0 < x < width and 0 < y < height
    for wrong in ("7", "4104", "1.5", "x"):
        page.tab.fill("#go-slot", wrong)
        page.tab.keyboard.press("Enter")
        message = page.tab.locator("#go-slot").evaluate("one => one.validationMessage")
        assert message == "This pool has the slots 8 to 4,103."
    assert page.run("return app.map.marked;") == 801


def test_a_planted_incident_is_seen_in_one_click(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    with Load(server):
        page.tab.locator(".incident-list button").first.wait_for(timeout=120_000)
        # The first of its kind is recorded.
        page.tab.locator(".incident-list button").last.click()
        shown = page.tab.locator("#incident")
        shown.locator(".compare").wait_for()
    heads = shown.locator("h3").all_inner_texts()
    assert any("Expected and found" in head for head in heads)
    assert any("Time line of page" in head for head in heads)
    text = shown.inner_text()
    assert "verify_real_kv" in text and "Last writer" in text
    assert re.search(r"healed: [1-9]\d* requests? recomputed", text)
    differing = shown.locator("tr.differs")
    assert differing.count() == 1
    assert len(set(differing.locator("mark").all_inner_texts())) == 2
    page.tab.locator("#status.trouble", has_text="in the last minute").wait_for()
    page.tab.locator("#incidents-card.alarm .healed").first.wait_for()
    current = page.run("return app.incidents.current;")
    # Its slot is marked on the map, and its file is what the server has.
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/canary/incidents/{current}"
    incident = httpx.get(url, headers=headers).json()
    assert page.run("return app.map.marked;") == incident["violations"][0]["slot"]
    assert "sglang.srt.kv_canary.replay" in incident["replay"]
    assert incident["replay"] in text
    with page.tab.expect_download() as saving:
        shown.locator("button", has_text="Save incident").click()
    with open(saving.value.path(), "rb") as saved:
        assert httpx.Response(200, content=saved.read()).json() == incident
    shown.locator("button", has_text="Close").click()
    assert not shown.is_visible()
    assert page.run("return app.map.marked;") == -1


def test_it_says_that_the_server_is_gone_and_comes_back(
    server: ServerProcess, page: InspectorPage
) -> None:
    page.open(server.url, key=KEY)
    page.wait_for_snapshots()
    page.tab.context.set_offline(True)
    page.run("app.stream.abort.abort();")
    page.tab.locator("#status.trouble", has_text="Trying again").wait_for()
    page.tab.context.set_offline(False)
    page.wait_for_snapshots(2)
    page.tab.locator("#status", has_text="live ·").wait_for()
    page.errors.clear()  # The browser itself reports a lost network.


def synthetic_page(server: ServerProcess, page: InspectorPage) -> None:
    """A page that has left its server, to be fed by the test."""
    page.open(server.url, key=KEY)
    page.wait_for_snapshots()
    page.run("app.stream.stop();")


def test_a_million_slots_are_drawn(server: ServerProcess, page: InspectorPage) -> None:
    synthetic_page(server, page)
    page.run(
        SYNTHETIC
        + "await app.take(...synthetic(argument, 1));"
        + "await app.take(...synthetic(argument, 2, {seed: 5, changes: 20000}));",
        MILLION,
    )
    assert page.run("return app.pool.numPages;") == MILLION
    states = page.run("return [...app.pool.counts];")
    assert sum(states) == MILLION and min(states[:3]) > 100_000
    # Every pixel of the bitmap is the colour of its page.
    wrong = page.run(
        """
        const {pixels, palette, pool} = app.map;
        let wrong = 0;
        for (let i = 0; i < pool.numPages; i += 1) {
          if (pixels[i] !== palette.states.full[pool.cells[i] & 7]) wrong += 1;
        }
        return wrong;
        """
    )
    assert wrong == 0
    assert len(drawn(page)[0]) > 3


@pytest.mark.parametrize("mode", ["state", "owner", "age", "group"])
def test_changes_alone_give_the_picture_of_all_pages(
    server: ServerProcess, page: InspectorPage, mode: str
) -> None:
    synthetic_page(server, page)
    differing = page.run(
        SYNTHETIC
        + """
        app.map.setMode(argument);
        await app.take(...synthetic(5000, 1));
        for (let seq = 2; seq < 12; seq += 1) {
          await app.take(...synthetic(5000, seq, {seed: seq, changes: 40 * seq}));
        }
        const piecemeal = app.map.pixels.slice();
        app.map.refresh();
        return piecemeal.filter((pixel, i) => pixel !== app.map.pixels[i]).length;
        """,
        mode,
    )
    assert differing == 0


def test_a_page_that_is_open_for_an_hour_keeps_its_memory(
    server: ServerProcess, page: InspectorPage
) -> None:
    synthetic_page(server, page)
    session = page.tab.context.new_cdp_session(page.tab)

    def used_after(first: int, last: int) -> int:
        page.run(
            SYNTHETIC
            + """
            const [first, last] = argument;
            if (first === 1) await app.take(...synthetic(4000, 1));
            for (let seq = Math.max(first, 2); seq <= last; seq += 1) {
              await app.take(...synthetic(4000, seq, {seed: seq, changes: 100}));
              if (seq % 500 === 0) await new Promise((done) => setTimeout(done));
            }
            """,
            [first, last],
        )
        session.send("HeapProfiler.collectGarbage")
        used: int = session.send("Runtime.getHeapUsage")["usedSize"]
        return used

    early = used_after(1, HOUR // 4)
    late = used_after(HOUR // 4 + 1, HOUR)
    assert page.run("return app.pool.seq;") == HOUR
    assert page.tab.locator("#requests tbody tr").count() == 20
    assert late < early + 1_000_000, (early, late)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
