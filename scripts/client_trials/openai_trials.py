"""The `openai` package: calls by hand, errors, and clients that leave."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from trial_world import (
    ASKED,
    CALL,
    CALLS,
    NO_KEY,
    NUM_AGENT_CALLS,
    OPENAI_TOOLS,
    QUESTION,
    SHORT,
    SYSTEM,
    TOO_LONG,
    Site,
    Skipped,
    Trial,
    check,
    named,
    refused,
    run_tool,
)


def openai_client(openai: ModuleType, site: Site, **options: Any) -> Any:
    options = {"api_key": site.key, "max_retries": 0} | options
    return openai.OpenAI(base_url=site.v1, **options)


def openai_chat(openai: ModuleType, site: Site) -> None:
    asked: dict[str, Any] = {"model": site.model, "messages": ASKED} | SHORT
    with openai_client(openai, site) as client:
        whole = client.chat.completions.create(**asked)
        text, usage, finish = "", None, None
        options = {"include_usage": True}
        for chunk in client.chat.completions.create(
            **asked, stream=True, stream_options=options
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                # Not a field of the client, but it must be there.
                check(choice.delta.reasoning_content is None, "reasoning in a chunk")
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    check(text == whole.choices[0].message.content, "stream and whole answer differ")
    check(finish == whole.choices[0].finish_reason, "the finish reasons differ")
    check(usage == whole.usage, "the usages differ")


def openai_responses(openai: ModuleType, site: Site) -> None:
    asked = {"model": site.model, "input": QUESTION, "instructions": SYSTEM}
    asked |= {"temperature": 0, "max_output_tokens": 24}
    with openai_client(openai, site) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    check(whole.output_text == final.output_text, "stream and whole answer differ")
    check(kinds[0] == "response.created", f"the first event is {kinds[0]}")


def complete_message(client: Any, asked: dict[str, Any], *, is_stream: bool) -> Any:
    """Return a chat's message, as built by the client's own stream helper."""
    if not is_stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def openai_loop(
    client: Any, site: Site, choices: Iterable[Any], *, is_stream: bool | None = None
) -> list[str]:
    """Make one call after another, each with one of `choices`, then a final text;
    returns the calls.

    is_stream None streams every other one.
    """
    messages, called = list(ASKED), []
    for number, choice in enumerate(choices):
        asked: dict[str, Any] = {"model": site.model, "messages": messages} | CALL
        asked |= {"tools": OPENAI_TOOLS, "tool_choice": choice}
        streams = bool(number % 2) if is_stream is None else is_stream
        message = complete_message(client, asked, is_stream=streams)
        check(message.tool_calls, f"turn {number} has no call")
        # As documented, the message is sent back unchanged.
        messages.append(message)
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            called.append(call.function.name)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )
    asked = {"model": site.model, "messages": messages} | SHORT
    asked |= {"tools": OPENAI_TOOLS, "tool_choice": "none"}
    last = client.chat.completions.create(**asked).choices[0]
    check(last.message.tool_calls is None, "a call where none was allowed")
    check(last.message.content is not None, "no text at the end")
    return called


def openai_tools(openai: ModuleType, site: Site) -> None:
    with openai_client(openai, site) as client:
        for is_stream in (False, True):
            choices = map(named, CALLS)
            called = openai_loop(client, site, choices, is_stream=is_stream)
            check(called == list(CALLS), f"called {called}")


def openai_agent(openai: ModuleType, site: Site) -> None:
    with openai_client(openai, site) as client:
        called = openai_loop(client, site, ["required"] * NUM_AGENT_CALLS)
    check(len(called) >= NUM_AGENT_CALLS, f"{len(called)} calls")


def openai_auto(openai: ModuleType, site: Site) -> None:
    """The model may or may not call a tool; both shapes must be right."""
    asked: dict[str, Any] = {"model": site.model, "messages": ASKED} | CALL
    with openai_client(openai, site) as client:
        for is_stream in (False, True):
            message = complete_message(
                client, asked | {"tools": OPENAI_TOOLS}, is_stream=is_stream
            )
            check(message.content or message.tool_calls, "neither text nor call")


def openai_errors(openai: ModuleType, site: Site) -> None:
    with openai_client(openai, site) as client:
        create = client.chat.completions.create
        error = refused(
            openai.BadRequestError, lambda: create(model=site.model, messages=TOO_LONG)
        )
        check(error.code == "context_length_exceeded", f"the code is {error.code}")
        refused(
            openai.NotFoundError, lambda: client.models.retrieve("such-a-model-is-not")
        )
        refused(
            openai.BadRequestError,
            lambda: create(model=site.model, messages=ASKED, temperature=-1),
        )
    if site.key == NO_KEY:
        raise Skipped("a server without a key refuses nobody")
    with openai_client(openai, site, api_key="wrong") as client:
        error = refused(openai.AuthenticationError, client.models.list)
        check(error.code == "invalid_api_key", f"the code is {error.code}")


def openai_leaves(openai: ModuleType, site: Site) -> None:
    """A time-out, and a stream that is closed: the server ends both requests."""
    asked: dict[str, Any] = {"model": site.model, "messages": ASKED}
    asked |= {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with openai_client(openai, site) as client:
        hasty = client.with_options(timeout=0.5)
        refused(openai.APITimeoutError, lambda: hasty.chat.completions.create(**asked))
        site.wait_idle()
        stream = client.chat.completions.create(**asked, stream=True)
        next(iter(stream))
        stream.close()
    site.wait_idle()


TRIALS = (
    Trial("chat", "openai", "openai", openai_chat),
    Trial("responses", "openai", "openai", openai_responses),
    Trial("tools, three turns", "openai", "openai", openai_tools),
    Trial("auto", "openai", "openai", openai_auto),
    Trial("20 calls in a row", "openai", "openai", openai_agent),
    Trial("errors", "openai", "openai", openai_errors),
    Trial("leaving", "openai", "openai", openai_leaves),
)
