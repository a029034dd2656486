"""Takes pictures of the server's pages: the chat, and the inspector under load.

python -m scripts.page_screenshots [FOLDER]

Has the requirements of `make test-browser`; fetches SmolLM2 if missing. Bytes of the
inspected KV cache are flipped occasionally, so that there are incidents to show. Writes
`chat.png`, `canary_map.png` and `canary_incident.png`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from pathlib import Path
from random import Random

import httpx

from scripts.real_models import fetch
from sglang.test.browser import ChatTab, InspectorPage, open_browser, why_no_browser
from sglang.test.server_process import ServerProcess

REPO = Path(__file__).resolve().parent.parent
FAULTS = {
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB": "0.004",
    "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "150",
}
FLAGS = (
    *("--kv-canary", "heal", "--kv-canary-sweep-interval", "20"),
    *("--page-size", "16", "--max-total-tokens", "24576"),
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "class Queue:\n    def __init__(self, size=0):\n        self.maxsize = size\n",
    '"""A parser of configuration files."""\n\nimport re\n',
)
CLIENTS = 7
NUM_INCIDENTS = 3
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
)
SNAPSHOTS = 150


def ask_until(stop: threading.Event, url: str, number: int) -> None:
    """Ask repeatedly as one client."""
    random, count = Random(number), 0
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            count += 1
            head = random.choice(PROMPTS) * 3
            params = {
                "max_new_tokens": random.randint(150, 600),
                "temperature": 0.7,
                "ignore_eos": True,
            }
            body = {
                "text": f"{head}# variant {random.randint(0, 9)}\n",
                "rid": f"client-{number}-{count}",
                "sampling_params": params,
            }
            client.post("/generate", json=body)


def take_pictures(url: str, folder: Path) -> None:
    with open_browser() as browser:
        page = InspectorPage(browser, viewport={"width": 1280, "height": 900})
        page.open(url)
        page.wait_for_snapshots(SNAPSHOTS)
        page.wait("app.pool.counts[1] > 30 && app.requests.size > 4")
        page.run(
            "const index = app.pool.cells.findIndex((cell) => (cell & 7) === 1);"
            "app.map.cursor = (index + 1) * app.pool.pageSize;"
            "app.slotPanel.show(app.map.cursor); app.map.draw();"
        )
        page.tab.locator("#slot h3").first.wait_for()
        page.tab.screenshot(path=folder / "canary_map.png", full_page=True)
        page.tab.set_default_timeout(300_000)
        incidents = page.tab.locator(".incident-list button")
        incidents.nth(NUM_INCIDENTS - 1).wait_for()
        # The first incident of a kind is recorded, so that it can be replayed.
        incidents.last.click()
        shown = page.tab.locator("#incident")
        shown.locator(".timeline").wait_for()
        shown.screenshot(path=folder / "canary_incident.png")


def take_chat_picture(folder: Path) -> None:
    """Ask a small real model two questions."""
    model = ("--model-path", str(fetch("smollm2")), "--served-model-name", "smollm2")
    server = ServerProcess((*model, "--kv-canary", "heal"))
    try:
        with open_browser() as browser:
            chat = ChatTab(browser, viewport={"width": 1180, "height": 720})
            chat.open(server.wait_ready().url)
            chat.tab.locator("#status.live").wait_for()
            chat.tab.fill("[name=temperature]", "0")
            for question in QUESTIONS:
                chat.tab.fill("#prompt", question)
                chat.tab.press("#prompt", "Enter")
                answer = chat.tab.locator(".assistant").last
                answer.locator("button", has_text="Answer again").wait_for()
            chat.tab.screenshot(path=folder / "chat.png")
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=REPO / "docs/images")
    folder: Path = parser.parse_args().folder
    missing = why_no_browser()
    if missing is not None:
        raise SystemExit(missing)
    take_chat_picture(folder)
    os.environ.update(FAULTS)
    with tempfile.TemporaryDirectory() as reports:
        recorded = ("--kv-canary-report-dir", reports, "--kv-canary-report-tokens")
        run((*FLAGS, *recorded), folder)
    for name in ("chat.png", "canary_map.png", "canary_incident.png"):
        print(f"{folder / name}: {(folder / name).stat().st_size // 1024} KiB")


def run(flags: tuple[str, ...], folder: Path) -> None:
    """Take the pictures of a server with `flags` under load."""
    server = ServerProcess(flags).wait_ready()
    stop = threading.Event()
    clients = [
        threading.Thread(target=ask_until, args=(stop, server.url, i))
        for i in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        take_pictures(server.url, folder)
    finally:
        stop.set()
        for client in clients:
            client.join()
        server.stop()


if __name__ == "__main__":
    main()
