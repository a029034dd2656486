"""`litellm`, `anthropic` and `instructor`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from openai_trials import openai_client
from trial_world import (
    ANTHROPIC_TOOLS,
    ASKED,
    CALL,
    CALLS,
    FUNCTIONS,
    OPENAI_TOOLS,
    SHORT,
    SYSTEM,
    TOO_LONG,
    Site,
    Trial,
    Trialled,
    Weather,
    check,
    joined,
    named,
    refused,
    run_tool,
)

# litellm


def litellm_asked(site: Site, route: str) -> dict[str, Any]:
    options = {"api_base": site.v1, "api_key": site.key, "max_retries": 0}
    return {"model": f"{route}/{site.model}", **options}


def litellm_chat(route: str) -> Trialled:
    def run(litellm: ModuleType, site: Site) -> None:
        asked = litellm_asked(site, route) | SHORT | {"messages": ASKED}
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True))
        text = joined(chunk.choices[0].delta.content for chunk in chunks)
        check(text == whole.choices[0].message.content, "stream and whole differ")
        built = litellm.stream_chunk_builder(chunks)
        check(built.choices[0].message.content == text, "the built answer differs")

    return run


def litellm_tools(route: str) -> Trialled:
    def run(litellm: ModuleType, site: Site) -> None:
        for is_stream in (False, True):
            messages = list(ASKED)
            for name in CALLS:
                asked = litellm_asked(site, route) | CALL | {"messages": messages}
                asked |= {"tools": OPENAI_TOOLS, "tool_choice": named(name)}
                answer = litellm.completion(**asked, stream=is_stream)
                if is_stream:
                    answer = litellm.stream_chunk_builder(list(answer))
                message = answer.choices[0].message
                (call,) = message.tool_calls
                check(call.function.name == name, f"called {call.function.name}")
                result = run_tool(name, call.function.arguments)
                messages += [
                    message,
                    {"role": "tool", "tool_call_id": call.id, "content": result},
                ]
            asked = litellm_asked(site, route) | SHORT | {"messages": messages}
            last = litellm.completion(**asked, tools=OPENAI_TOOLS, tool_choice="none")
            check(last.choices[0].message.content is not None, "no text at the end")

    return run


def litellm_overflow(route: str) -> Trialled:
    def run(litellm: ModuleType, site: Site) -> None:
        asked = litellm_asked(site, route) | {"messages": TOO_LONG}
        error = litellm.ContextWindowExceededError
        refused(error, lambda: litellm.completion(**asked))

    return run


# anthropic


def anthropic_client(anthropic: ModuleType, site: Site) -> Any:
    return anthropic.Anthropic(base_url=site.url, api_key=site.key, max_retries=0)


def anthropic_asked(site: Site) -> dict[str, Any]:
    # The client has no argument for the temperature.
    asked = {"model": site.model, "system": SYSTEM, "extra_body": {"temperature": 0}}
    return asked | {"messages": ASKED[1:], "max_tokens": 24}


def anthropic_chat(anthropic: ModuleType, site: Site) -> None:
    with anthropic_client(anthropic, site) as client:
        asked = anthropic_asked(site)
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = joined(stream.text_stream)
            final = stream.get_final_message()
        check(text == whole.content[0].text, "stream and whole answer differ")
        check(final.usage == whole.usage, "the usages differ")
        del asked["extra_body"], asked["max_tokens"]
        counted = client.messages.count_tokens(**asked)
        check(counted.input_tokens == whole.usage.input_tokens, "the counts differ")


def anthropic_tools(anthropic: ModuleType, site: Site) -> None:
    with anthropic_client(anthropic, site) as client:
        for is_stream in (False, True):
            messages: list[Any] = ASKED[1:]
            for name in CALLS:
                asked = anthropic_asked(site) | {"messages": messages}
                asked |= {"tools": ANTHROPIC_TOOLS, "max_tokens": CALL["max_tokens"]}
                asked |= {"tool_choice": {"type": "tool", "name": name}}
                if is_stream:
                    with client.messages.stream(**asked) as stream:
                        answer = stream.get_final_message()
                else:
                    answer = client.messages.create(**asked)
                (call,) = answer.content
                check(answer.stop_reason == "tool_use", answer.stop_reason)
                check(call.name == name, f"called {call.name}")
                result = {"type": "tool_result", "tool_use_id": call.id}
                result["content"] = run_tool(name, call.input)
                messages = [
                    *messages,
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": [result]},
                ]
            asked = anthropic_asked(site) | {"messages": messages}
            asked |= {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "none"}}
            last = client.messages.create(**asked)
            check([block.type for block in last.content] == ["text"], "no text")


def anthropic_runner(anthropic: ModuleType, site: Site) -> None:
    """The client's own loop: it calls the tools and sends their results."""
    tools = [anthropic.beta_tool(function) for function in FUNCTIONS.values()]
    asked = anthropic_asked(site) | {"tools": tools, "max_tokens": CALL["max_tokens"]}
    asked |= {"tool_choice": {"type": "any"}, "max_iterations": 4}
    with anthropic_client(anthropic, site) as client:
        reasons = [
            message.stop_reason for message in client.beta.messages.tool_runner(**asked)
        ]
    check(reasons == ["tool_use"] * 4, f"stopped by {reasons}")


def anthropic_errors(anthropic: ModuleType, site: Site) -> None:
    asked = anthropic_asked(site) | {"messages": TOO_LONG}
    with anthropic_client(anthropic, site) as client:
        create = client.messages.create
        error = refused(anthropic.BadRequestError, lambda: create(**asked))
    check("prompt is too long" in str(error), str(error))


# instructor


def instructor_mode(mode: str) -> Trialled:
    def run(instructor: ModuleType, site: Site) -> None:
        openai = importlib.import_module("openai")
        with openai_client(openai, site) as plain:
            client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
            asked: dict[str, Any] = {"messages": ASKED, "response_model": Weather}
            asked |= {"model": site.model, "max_retries": 0} | CALL
            whole = client.chat.completions.create(**asked)
            check(isinstance(whole, Weather), f"got {whole!r}")
            if mode.startswith("RESPONSES"):
                return
            # The client asks for another schema here: the answers may differ.
            *_, last = client.chat.completions.create_partial(**asked)
            Weather.model_validate(last.model_dump())

    return run


TRIALS = (
    *(
        Trial(f"{name}, {route}", "litellm", "litellm", make(route))
        for route in ("openai", "hosted_vllm")
        for name, make in (
            ("chat", litellm_chat),
            ("tools, three turns", litellm_tools),
            ("overflow", litellm_overflow),
        )
    ),
    Trial("chat", "anthropic", "anthropic", anthropic_chat),
    Trial("tools, three turns", "anthropic", "anthropic", anthropic_tools),
    Trial("tool runner", "anthropic", "anthropic", anthropic_runner),
    Trial("overflow", "anthropic", "anthropic", anthropic_errors),
    *(
        Trial(mode, "instructor", "instructor", instructor_mode(mode))
        for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
    ),
)
