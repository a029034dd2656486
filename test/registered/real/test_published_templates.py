"""Prompts of published chat templates equal transformers', or are better ones.

Better is what transformers makes of a repaired conversation: each repair below is done
for a template that refuses the conversation as it was sent, or shows it wrongly.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from sglang.srt.managers.front.template_manager import TemplateManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="real")

MIN_TEMPLATES = 70
Messages = list[dict[str, Any]]
TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def says(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calls(*cities: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    made = []
    for number, city in enumerate(cities):
        arguments = json.dumps({"city": city, "days": 2})
        function = {"name": "get_weather", "arguments": arguments}
        made.append(
            {"id": f"call0000{number}", "type": "function", "function": function}
        )
    return says("assistant", content, tool_calls=made, **fields)


def tells(number: int, text: str) -> dict[str, Any]:
    return says("tool", text, tool_call_id=f"call0000{number}")


SYSTEM, USER = says("system", "You are terse."), says("user", "How is Paris?")
ANSWER, NEXT = says("assistant", "It is sunny."), says("user", "And Rome?")
CITY = {"type": "string", "description": "Name"}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
PARTS = [{"type": "text", "text": "How is "}, {"type": "text", "text": "Paris?"}]
THOUGHT = {"reasoning_content": "A thought."}
OFF = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "one question": ([USER], {}),
    "a system prompt": ([SYSTEM, USER, ANSWER, NEXT], {}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "a call": ([USER, calls("Paris"), tells(0, "sunny")], {"tools": TOOLS}),
    "a call, and on": (
        [USER, calls("Paris"), tells(0, "sunny"), ANSWER, NEXT],
        {"tools": TOOLS},
    ),
    "parallel calls": (
        [USER, calls("Paris", "Rome"), tells(0, "sunny"), tells(1, "rainy")],
        {"tools": TOOLS},
    ),
    "a call beside an empty text": (
        [USER, calls("Paris", content=""), tells(0, "sunny")],
        {"tools": TOOLS},
    ),
    "a call beside text": (
        [USER, calls("Paris", content="Let me see."), tells(0, "sunny")],
        {"tools": TOOLS},
    ),
    "null": ([USER, says("assistant", None), NEXT], {}),
    "reasoning": ([USER, {**ANSWER, **THOUGHT}, NEXT], {}),
    "reasoning and a call": (
        [USER, calls("Paris", **THOUGHT), tells(0, "sunny")],
        {"tools": TOOLS},
    ),
    "reasoning, text and a call": (
        [USER, calls("Paris", content="Let me see.", **THOUGHT), tells(0, "sunny")],
        {"tools": TOOLS},
    ),
    "parts of text": ([says("user", PARTS)], {}),
    "a developer": ([says("developer", "You are terse."), USER], {}),
    "no thinking": ([USER], OFF),
    "no prompt for an answer": ([USER, ANSWER], {"add_generation_prompt": False}),
}


def each(change: Callable[[dict[str, Any]], None]) -> Callable[[Messages], Messages]:
    """A repair that changes every message by itself."""

    def repair(messages: Messages) -> Messages:
        changed = copy.deepcopy(messages)
        for message in changed:
            change(message)
        return changed

    return repair


def _fill(message: dict[str, Any]) -> None:
    if message["content"] is None:
        message["content"] = ""


def _empty(message: dict[str, Any]) -> None:
    if message["content"] == "":
        message["content"] = None


def _join(message: dict[str, Any]) -> None:
    if isinstance(message["content"], list):
        message["content"] = "".join(part["text"] for part in message["content"])


def _system(message: dict[str, Any]) -> None:
    if message["role"] == "developer":
        message["role"] = "system"


def _name(message: dict[str, Any]) -> None:
    if message["role"] == "tool":
        message["name"] = "get_weather"


def _rename(name: str) -> Callable[[dict[str, Any]], None]:
    def change(message: dict[str, Any]) -> None:
        if "reasoning_content" in message:
            message[name] = message.pop("reasoning_content")

    return change


def split(messages: Messages) -> Messages:
    """Text and calls as two messages; reasoning comes before the text."""
    parts: Messages = []
    for message in copy.deepcopy(messages):
        made = message.pop("tool_calls", None)
        if made is None or message["content"]:
            parts.append(message)
        if made is not None:
            parts.append(says("assistant", None, tool_calls=made))
    return parts


# Reason -> the repair.
BETTER: dict[str, Callable[[Messages], Messages]] = {
    "null content, which the template adds to a text or writes down": each(_fill),
    "empty content, beside which the template drops calls": each(_empty),
    "text, beside which the template drops calls": split,
    "parts, which the template refuses, trims or writes down": each(_join),
    "a role that the template does not know": each(_system),
    "a tool's message without the name of its function": each(_name),
    "reasoning under the name `reasoning`": each(_rename("reasoning")),
    "reasoning under the name `thinking`": each(_rename("thinking")),
}


def theirs(source: str, messages: Messages, options: dict[str, Any]) -> list[str]:
    """Prompts by transformers, with arguments as objects and as text."""
    objects = copy.deepcopy(messages)
    for message in objects:
        for call in message.get("tool_calls", []):
            function = call["function"]
            function["arguments"] = json.loads(function["arguments"])
    prompts = []
    for given in (objects, messages):
        asked = {"tools": None, "add_generation_prompt": True, **options}
        try:
            prompts += render_jinja_template(
                conversations=[given],
                chat_template=source,
                documents=None,
                **asked,
                **TOKENS,
            )[0]
        except Exception:  # a template may fail in any way
            continue
    return prompts


def managed(name: str, source: str) -> TemplateManager:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<bos>": 0}, merges=[]))
    tokenizer = Tokenizer(backend, config=TOKENS, name=name, chat_template=source)
    return TemplateManager(tokenizer)


def ours(
    manager: TemplateManager, messages: Messages, options: dict[str, Any]
) -> str | None:
    asked = dict(options)
    known = {
        field: asked.pop(field)
        for field in ("tools", "add_generation_prompt")
        if field in asked
    }
    try:
        return manager.render(messages, variables=asked, **known)
    except BadRequest:
        return None


def repairs() -> Iterator[tuple[str, ...]]:
    for count in range(1, 4):
        yield from itertools.combinations(BETTER, count)


def why(
    prompt: str | None, source: str, messages: Messages, options: dict[str, Any]
) -> str:
    """How `prompt` relates to what transformers makes."""
    known = theirs(source, messages, options)
    if prompt in known:
        return "same"
    if prompt is None:
        return "WORSE: refused" if known else "refused by both"
    for reasons in repairs():
        repaired = messages
        for reason in reasons:
            repaired = BETTER[reason](repaired)
        if prompt in theirs(source, repaired, options):
            return "better: " + "; ".join(reasons)
    return "better: it is rendered at all" if not known else "WORSE: differs"


@pytest.fixture(scope="module")
def sources(published_templates: Path) -> dict[str, str]:
    found = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted(published_templates.glob("*.jinja"))
    }
    assert len(found) >= MIN_TEMPLATES
    return found


def test_prompts_equal_transformers_or_are_better(sources: dict[str, str]) -> None:
    counts: Counter[str] = Counter()
    worse = []
    for name, source in sources.items():
        manager = managed(name, source)
        for title, (messages, options) in CONVERSATIONS.items():
            prompt = ours(manager, messages, options)
            found = why(prompt, source, messages, options)
            counts[found] += 1
            if found.startswith("WORSE"):
                worse.append(f"{name}, {title}: {found}")
    for found, count in sorted(counts.items()):
        print(f"{count:5} {found}")
    assert not worse, worse


def test_images_are_refused_by_name(sources: dict[str, str]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for name, source in sources.items():
        with pytest.raises(BadRequest, match="of type 'image_url'") as refused:
            managed(name, source).render([says("user", [image])], variables={})
        assert refused.value.param == "messages[0].content[0]"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
