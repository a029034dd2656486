"""Switches of the reasoning, in the ways that providers write them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_world import ChatWorld, body

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

OPEN, CLOSED, UNSAID = "<think>\n", "<think>\n\n</think>\n\n", "assistant\n"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, UNSAID),
        ({"enable_thinking": True}, OPEN),
        ({"enable_thinking": False}, CLOSED),
        ({"thinking": True}, OPEN),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, OPEN),
        ({"thinking": {"type": "disabled"}}, CLOSED),
        ({"reasoning": {"enabled": True}}, OPEN),
        ({"reasoning": {"enabled": False, "effort": "high"}}, CLOSED),
        ({"reasoning": {"effort": "none"}}, CLOSED),
        ({"reasoning_effort": "none"}, CLOSED),
        ({"reasoning_effort": "high"}, UNSAID),
        ({"reasoning_effort": None, "thinking": None, "reasoning": None}, UNSAID),
        ({"chat_template_kwargs": {"enable_thinking": True}}, OPEN),
        # What is said about the template itself wins.
        (
            {
                "enable_thinking": False,
                "chat_template_kwargs": {"enable_thinking": True},
            },
            OPEN,
        ),
    ],
)
def test_a_switch_reaches_the_template(fields: dict[str, Any], end: str) -> None:
    world = ChatWorld("Yes.")
    assert world.ask(body(**fields)).status_code == 200
    assert world.prompt.endswith("<|im_start|>assistant\n" + end.removeprefix(UNSAID))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "sometimes"}}, "of type 'sometimes'"),
        ({"thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
        ({"thinking": 5}, "thinking"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"exclude": "yes"}}, "reasoning.exclude"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
    ],
)
def test_a_value_that_is_no_switch_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    answer = ChatWorld("Yes.", strict_fields=True).ask(body(**fields))
    assert answer.status_code == 400 and param in answer.json()["error"]["message"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
