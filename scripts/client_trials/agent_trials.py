"""LangChain and OpenAI's agents."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trial_world import (
    CALLS,
    FUNCTIONS,
    NUM_AGENT_CALLS,
    QUESTION,
    SYSTEM,
    TOO_LONG,
    Site,
    Trial,
    Trialled,
    Weather,
    check,
    get_place,
    joined,
    refused,
    run_tool,
)

# langchain


def langchain_openai(package: ModuleType, site: Site, **options: Any) -> Any:
    fixed = {"model": site.model, "temperature": 0, "max_retries": 0}
    options = {"max_tokens": 400} | options
    return package.ChatOpenAI(base_url=site.v1, api_key=site.key, **(fixed | options))


def langchain_anthropic(package: ModuleType, site: Site, **options: Any) -> Any:
    fixed = {"model": site.model, "temperature": 0, "max_retries": 0}
    options = {"max_tokens": 400} | options
    return package.ChatAnthropic(
        base_url=site.url, api_key=site.key, **(fixed | options)
    )


def langchain_chat(make: Callable[..., Any]) -> Trialled:
    def run(package: ModuleType, site: Site) -> None:
        chat = make(package, site, max_tokens=24)
        turns = [("system", SYSTEM), ("human", QUESTION)]
        whole = chat.invoke(turns)
        text = joined(chunk.text for chunk in chat.stream(turns))
        check(text == whole.text, "stream and whole answer differ")
        check(whole.usage_metadata["output_tokens"], "no usage")

    return run


def langchain_tools(make: Callable[..., Any]) -> Trialled:
    def run(package: ModuleType, site: Site) -> None:
        core = importlib.import_module("langchain_core.messages")
        tool = importlib.import_module("langchain_core.tools").tool
        tools = [tool(function) for function in FUNCTIONS.values()]
        chat = make(package, site)
        for is_stream in (False, True):
            turns = [core.SystemMessage(SYSTEM), core.HumanMessage(QUESTION)]
            for name in CALLS:
                bound = chat.bind_tools(tools, tool_choice=name)
                if is_stream:
                    chunks = list(bound.stream(turns))
                    message = sum(chunks[1:], chunks[0])
                else:
                    message = bound.invoke(turns)
                (call,) = message.tool_calls
                check(call["name"] == name, f"called {call['name']}")
                result = run_tool(name, call["args"])
                turns += [message, core.ToolMessage(result, tool_call_id=call["id"])]
            last = make(package, site, max_tokens=24).invoke(turns)
            check(isinstance(last.content, str | list), "no text at the end")

    return run


def langchain_structured(package: ModuleType, site: Site) -> None:
    for method in ("function_calling", "json_schema"):
        chat = langchain_openai(package, site)
        answer = chat.with_structured_output(Weather, method=method).invoke(QUESTION)
        check(isinstance(answer, Weather), f"{method}: {answer!r}")


def langchain_overflow(package: ModuleType, site: Site) -> None:
    errors = importlib.import_module("langchain_core.exceptions")
    chat = langchain_openai(package, site)
    refused(errors.ContextOverflowError, lambda: chat.invoke(TOO_LONG))


def langchain_agent(langchain: ModuleType, site: Site) -> None:
    """`create_agent`: three calls requested by a middleware, then a text."""
    agents = importlib.import_module("langchain.agents")
    wrap = importlib.import_module("langchain.agents.middleware").wrap_model_call

    @wrap
    def choose(request: Any, handler: Callable[[Any], Any]) -> Any:
        num_results = sum(message.type == "tool" for message in request.messages)
        choice = "required" if num_results < 3 else "none"
        return handler(request.override(tool_choice=choice))

    chat = langchain_openai(importlib.import_module("langchain_openai"), site)
    agent = agents.create_agent(
        chat, tools=list(FUNCTIONS.values()), system_prompt=SYSTEM, middleware=[choose]
    )
    final = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    kinds = [message.type for message in final["messages"]]
    check(kinds.count("tool") >= 3, f"the messages are {kinds}")
    check(kinds[-1] == "ai", f"the last message is {kinds[-1]}")


def langchain_typed(langchain: ModuleType, site: Site) -> None:
    """Tools and the schema of the last answer in one request."""
    agents = importlib.import_module("langchain.agents")
    ways = importlib.import_module("langchain.agents.structured_output")
    chat = langchain_openai(importlib.import_module("langchain_openai"), site)
    for way in (ways.ProviderStrategy, ways.ToolStrategy):
        agent = agents.create_agent(
            chat, tools=[get_place], response_format=way(Weather)
        )
        final = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
        answer = final["structured_response"]
        check(isinstance(answer, Weather), f"{way.__name__}: {answer!r}")


# openai-agents


def agents_typed(api: str) -> Trialled:
    def run(agents: ModuleType, site: Site) -> None:
        client = importlib.import_module("openai").AsyncOpenAI(
            base_url=site.v1, api_key=site.key, max_retries=0
        )
        agents.set_tracing_disabled(True)
        agent = agents.Agent(
            name="Weather",
            instructions=SYSTEM,
            tools=[agents.function_tool(get_place)],
            output_type=Weather,
            model=getattr(agents, api)(model=site.model, openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=400),
        )
        final = asyncio.run(agents.Runner.run(agent, QUESTION)).final_output
        check(isinstance(final, Weather), f"the final output is {final!r}")

    return run


def agents_loop(api: str, *, is_stream: bool) -> Trialled:
    def run(agents: ModuleType, site: Site) -> None:
        client = importlib.import_module("openai").AsyncOpenAI(
            base_url=site.v1, api_key=site.key, max_retries=0
        )
        results: list[Any] = []

        def enough(_context: Any, latest: list[Any]) -> Any:
            results.extend(latest)
            is_final = len(results) >= NUM_AGENT_CALLS
            return agents.ToolsToFinalOutputResult(
                is_final_output=is_final, final_output="done"
            )

        agents.set_tracing_disabled(True)
        agent = agents.Agent(
            name="Weather",
            instructions=SYSTEM,
            tools=[agents.function_tool(function) for function in FUNCTIONS.values()],
            model=getattr(agents, api)(model=site.model, openai_client=client),
            model_settings=agents.ModelSettings(
                tool_choice="required", temperature=0, max_tokens=400
            ),
            tool_use_behavior=enough,
            reset_tool_choice=False,
        )

        async def all_turns() -> Any:
            limit = {"max_turns": NUM_AGENT_CALLS + 2}
            if not is_stream:
                return (await agents.Runner.run(agent, QUESTION, **limit)).final_output
            streamed = agents.Runner.run_streamed(agent, QUESTION, **limit)
            async for _ in streamed.stream_events():
                pass
            return streamed.final_output

        final = asyncio.run(all_turns())
        check(final == "done", f"the final output is {final!r}")
        check(len(results) >= NUM_AGENT_CALLS, f"{len(results)} calls")

    return run


TRIALS = (
    *(
        Trial(name, package, package.replace("-", "_"), make(chat))
        for package, chat in (
            ("langchain-openai", langchain_openai),
            ("langchain-anthropic", langchain_anthropic),
        )
        for name, make in (
            ("chat", langchain_chat),
            ("tools, three turns", langchain_tools),
        )
    ),
    Trial("structured", "langchain-openai", "langchain_openai", langchain_structured),
    Trial("overflow", "langchain-openai", "langchain_openai", langchain_overflow),
    Trial("create_agent", "langchain", "langchain", langchain_agent),
    Trial("create_agent, typed answer", "langchain", "langchain", langchain_typed),
    *(
        Trial(
            f"20 calls in a row, {api}{', streamed' if is_stream else ''}",
            "openai-agents",
            "agents",
            agents_loop(f"OpenAI{api}Model", is_stream=is_stream),
        )
        for api in ("ChatCompletions", "Responses")
        for is_stream in (False, True)
    ),
    *(
        Trial(
            f"typed answer, {api}",
            "openai-agents",
            "agents",
            agents_typed(f"OpenAI{api}Model"),
        )
        for api in ("ChatCompletions", "Responses")
    ),
)
