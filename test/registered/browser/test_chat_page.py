"""The chat page in headless Chromium: a server that answers, and one that is played.

Skipped where there is no browser or no driver for it; `make test-browser` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.test.browser import ChatTab, why_no_browser
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.server_process import ServerProcess

register_cpu_ci(est_time=1, full_time=60, suite="cpu")

MISSING = why_no_browser()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KEY = "chat-test-key"
CALLS = (
    {"name": "look_up", "arguments": '{"city": "Paris", "days": 2}'},
    {"name": "look_up", "arguments": '{"city": "Rome", "days": 1}'},
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    made = ServerProcess(["--api-key", KEY])
    yield made.wait_ready()
    made.stop()


@pytest.fixture
def chat(browser: Any) -> Iterator[ChatTab]:
    made = ChatTab(browser)
    yield made
    assert made.errors == []
    made.close()


def say(chat: ChatTab, text: str) -> None:
    chat.tab.fill("#prompt", text)
    chat.tab.press("#prompt", "Enter")


def wait_for_answer(chat: ChatTab) -> str:
    """The latest answer's text, once it has ended."""
    again = chat.tab.locator(".assistant").last.locator("button", has_text="again")
    again.wait_for()
    text: str = chat.tab.locator(".assistant").last.inner_text()
    return text


def play(chat: ChatTab, *deltas: dict[str, Any], finish: str = "stop") -> list[Any]:
    """Answer chats with `deltas` instead of the server; returns what was asked."""
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        chunks = [{"choices": [{"delta": delta, "index": 0}]} for delta in deltas]
        last = {"choices": [{"delta": {}, "finish_reason": finish, "index": 0}]}
        usage = {"choices": [], "usage": {"completion_tokens": 7}}
        lines = [f"data: {json.dumps(one)}\n\n" for one in (*chunks, last, usage)]
        body = "".join(lines) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    chat.tab.route("**/v1/chat/completions", answer)
    return asked


def test_it_asks_for_a_key_and_answers(server: ServerProcess, chat: ChatTab) -> None:
    chat.open(server.url)
    chat.tab.locator("#login").wait_for(state="visible")
    chat.tab.fill("#login-key", "wrong")
    chat.tab.click("#login-form button")
    chat.tab.locator("#login-why", has_text="missing or wrong").wait_for()
    chat.tab.fill("#login-key", KEY)
    chat.tab.click("#login-form button")
    chat.tab.locator("#facts", has_text="demo").wait_for()
    chat.tab.locator("#inspector").wait_for(state="visible")
    chat.tab.fill("[name=temperature]", "0")
    chat.tab.fill("[name=max_tokens]", "40")
    say(chat, "Write a Python function that reverses a string.")
    first = wait_for_answer(chat)
    assert "def " in first and "tokens/s" in first
    chat.tab.locator("button", has_text="Answer again").click()
    assert wait_for_answer(chat).partition(" · ")[0] == first.partition(" · ")[0]
    say(chat, "Once more.")
    wait_for_answer(chat)
    roles = chat.run("return app.messages.map((one) => one.role);")
    assert roles == ["user", "assistant"] * 2
    # The key and the settings stay in this tab.
    chat.tab.reload()
    chat.tab.locator("#facts", has_text="demo").wait_for()
    assert chat.tab.input_value("[name=max_tokens]") == "40"
    assert KEY not in server.log() and KEY not in chat.tab.url


def test_an_answer_can_be_stopped(server: ServerProcess, chat: ChatTab) -> None:
    chat.open(server.url, key=KEY)
    chat.run("app.settings.fields = () => ({max_tokens: 1500, ignore_eos: true});")
    say(chat, "Go on for ever.")
    chat.tab.locator(".assistant .foot", has_text="token").wait_for()
    chat.tab.click("#stop")
    assert "stopped" in wait_for_answer(chat)
    chat.tab.click("#new-chat")
    assert chat.run("return app.messages.length;") == 0
    chat.tab.locator(".examples button").first.wait_for()


def test_reasoning_code_and_markup_are_shown_as_text(
    server: ServerProcess, chat: ChatTab
) -> None:
    chat.open(server.url, key=KEY)
    answer = "Like `this`:\n```py\nprint('<b>')\n```\n<img src=x onerror=alert(1)>"
    asked = play(
        chat,
        {"role": "assistant", "content": None, "reasoning_content": "I think "},
        {"reasoning_content": "so.", "content": None},
        *({"content": letter} for letter in answer),
    )
    chat.tab.fill("[name=system]", "Be brief.")
    chat.tab.fill("[name=stop]", "END")
    say(chat, "hello")
    wait_for_answer(chat)
    turn = chat.tab.locator(".assistant")
    assert turn.locator(".reasoning .text").text_content() == "I think so."
    assert turn.locator("pre").inner_text() == "print('<b>')"
    assert turn.locator(".text code").inner_text() == "this"
    assert "<img src=x onerror=alert(1)>" in turn.inner_text()
    assert turn.locator("img").count() == 0
    assert [one["role"] for one in asked[0]["messages"]] == ["system", "user"]
    assert asked[0]["stop"] == ["END"] and "temperature" not in asked[0]
    message = chat.run("return app.messages.at(-1);")
    assert message["content"] == answer
    assert message["reasoning_content"] == "I think so."


def test_calls_are_shown_and_their_results_go_back(
    server: ServerProcess, chat: ChatTab
) -> None:
    chat.open(server.url, key=KEY)
    pieces = [
        {"tool_calls": [{"index": i, "id": f"c{i}", "function": {**call, **part}}]}
        for i, call in enumerate(CALLS)
        for part in ({"arguments": ""}, {"name": None})
    ]
    asked = play(chat, *pieces, finish="tool_calls")
    tool = {"type": "function", "function": {"name": "look_up"}}
    chat.tab.fill("[name=tools]", json.dumps([tool]))
    say(chat, "weather?")
    wait_for_answer(chat)
    cards = chat.tab.locator(".call")
    assert cards.count() == 2
    for i, call in enumerate(CALLS):
        assert cards.nth(i).locator(".name").inner_text() == call["name"]
        shown = cards.nth(i).locator("pre").inner_text()
        assert json.loads(shown) == json.loads(call["arguments"])
        cards.nth(i).locator("textarea").fill(f"sunny {i}")
    chat.tab.unroute("**/v1/chat/completions")
    again = play(chat, {"content": "It is sunny."})
    chat.tab.click("text=Send results")
    assert "It is sunny." in wait_for_answer(chat)
    assert asked[0]["tools"] == [tool]
    sent = again[0]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool", "tool"]
    assert [one["id"] for one in sent[1]["tool_calls"]] == ["c0", "c1"]
    assert sent[3] == {"role": "tool", "tool_call_id": "c1", "content": "sunny 1"}


def test_what_goes_wrong_is_said(server: ServerProcess, chat: ChatTab) -> None:
    chat.open(server.url, key=KEY)
    chat.tab.fill("[name=tools]", "{")
    say(chat, "hello")
    chat.tab.locator("#settings-wrong", has_text="Tools are not JSON").wait_for()
    assert "Tools are not JSON" in wait_for_answer(chat)
    chat.tab.fill("[name=tools]", "")
    chat.tab.fill("[name=top_k]", "-5")
    chat.tab.click("text=Answer again")
    assert "Top k" in wait_for_answer(chat)
    chat.tab.fill("[name=top_k]", "")
    chat.tab.context.set_offline(True)
    chat.tab.click("text=Answer again")
    chat.tab.locator("#status.trouble").wait_for()
    chat.tab.context.set_offline(False)
    chat.tab.fill("[name=max_tokens]", "4")
    chat.tab.click("text=Answer again")
    wait_for_answer(chat)
    chat.tab.locator("#status.live").wait_for()
    assert chat.run("return app.messages.length;") == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
