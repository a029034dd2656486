"""Headless Chromium for tests of the server's pages, where there is one."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
# Tests run as root in containers, and the browser needs no other hosts.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def why_no_browser() -> str | None:
    """Return a description of the missing part, or None if nothing is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright; `make test-browser` installs it"
    if _chromium() is None:
        return f"none of {', '.join(CHROMIUMS)} is installed"
    return None


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUMS)), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A `playwright.sync_api.Browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class PageTab:
    """A tab with a page of the server.

    Class attributes:
        path: path of the page. script: its main module, which exports `app`.

    Attributes:
        tab: `playwright.sync_api.Page`.
        errors: script errors and policy violations so far.
    """

    path: ClassVar[str]
    script: ClassVar[str]

    def __init__(self, browser: Any, **options: Any) -> None:
        options = {"viewport": {"width": 1440, "height": 1000}} | options
        self.tab = browser.new_context(**options).new_page()
        self.errors: list[str] = []
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._on_console)
        self.tab.set_default_timeout(30_000)

    def _on_console(self, message: Any) -> None:
        # An error status is also reported as a message; tests check those themselves.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, url: str, *, key: str | None = None) -> None:
        self.tab.goto(url + self.path + ("" if key is None else f"#key={key}"))

    def run(self, body: str, argument: Any = None) -> Any:
        """Return the value of a JavaScript function body with `app` and `argument` in
        scope.
        """
        return self.tab.evaluate(
            "async (argument) => {"
            f"const {{app}} = await import('{self.script}');"
            f"{body}}}",
            argument,
        )

    def wait(self, condition: str) -> None:
        """Wait until an expression over `app` is true."""
        self.run(
            "const holds = () => (" + condition + ");"
            "const end = Date.now() + 60000;"
            "while (!holds()) {"
            f"  if (Date.now() > end) throw new Error({json.dumps(condition)});"
            "  await new Promise((done) => setTimeout(done, 50));"
            "}"
        )

    def close(self) -> None:
        self.tab.context.close()


class ChatTab(PageTab):
    """A tab of the chat page."""

    path = "/"
    script = "/chat/assets/main.js"


class InspectorPage(PageTab):
    """A tab of the inspector."""

    path = "/canary"
    script = "/canary/assets/main.js"

    def wait_for_snapshots(self, count: int = 1) -> None:
        """Wait until `count` more snapshots have been shown."""
        before = self.run("return app.snapshots;")
        self.wait(f"app.snapshots >= {before + count}")


# A function of the page that makes a snapshot as the server does, of `numPages` pages:
# requests own runs of pages, the rest is cached or free. `seed` moves them.
SYNTHETIC = """
function synthetic(numPages, seq, {seed = 0, changes = null} = {}) {
  const cellOf = (page) => {
    const owner = 1 + ((page * 7 + seed * 13) >> 9) % 200;
    return page % 5 === 0 ? 0 : page % 3 === 0 ? (-owner << 4) | 2 : (owner << 4) | 1;
  };
  const at = changes === null ? null : Int32Array.from(
    {length: changes}, (_, i) => Math.floor((i * numPages) / changes));
  const length = at === null ? numPages : at.length;
  const cells = new Int32Array(length), written = new Int32Array(length);
  for (let i = 0; i < length; i += 1) {
    const page = at === null ? i : at[i];
    cells[i] = cellOf(page);
    written[i] = 1 + ((page + seed) % 5000);
  }
  const frame = {seq, base: at === null ? null : seq - 1, at, cells, written};
  const request = (serial) => ({
    serial, rid: `request-${serial}`, phase: "decode", prompt_len: 100,
    output_len: seq % 900, max_total_len: 1000, committed_len: 100 + seq % 900,
    allocated_len: 1000, cached_len: 0, node: 0, tail_page: 1, tail_fill: 1,
    verify_ct: seq, accept_tokens: 2 * seq, num_heals: 0,
  });
  const snapshot = {
    seq, time: seq / 4, pool: {num_pages: numPages, page_size: 1}, frames: [],
    requests: Array.from({length: 20}, (_, i) => request(1 + i + (seq >> 8))),
    num_requests: 20, tree: "", num_nodes: 0, forwards: seq, clocks: [5000 + seq],
    seconds: 0.001, stats: {
      num_running_reqs: 20, num_queue_reqs: seq % 7, cache_hit_rate: 0.5,
      spec_accept_length: 2, generation_tokens_total: seq * 100,
      prompt_tokens_total: seq * 10, cached_tokens_total: seq * 5,
      kv_canary_protected_tokens_total: seq * 1000,
      kv_canary_swept_tokens_total: seq * 100, kv_canary_heals_total: {},
    },
  };
  return [snapshot, [frame]];
}
"""
