"""Chat templates that loop, recurse or grow without end, and honest ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang.srt.utils import template_limits
from sglang.srt.utils.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="cpu")

GROWING = "{% set ns = namespace(x=START) %}{% for i in range(99) %}STEP{% endfor %}"


def growing(start: str, step: str, end: str = "") -> str:
    step = "{% set ns.x = " + step + " %}"
    return GROWING.replace("START", start).replace("STEP", step) + end


DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
STEPS = "it takes more than 500000 steps"
CHARS = "it makes more than 67108864 characters"
HOSTILE = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}",
        STEPS,
    ),
    "a recursive loop": (
        "{% for x in [[[]] * 9999] * 9999 recursive %}{{ loop(x) }}{% endfor %}",
        STEPS,
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(40) }}",
        STEPS,
    ),
    "long text in a loop": (
        "{% set x %}{% for i in range(99999) %}"
        + "y" * 9999
        + "{% endfor %}{% endset %}",
        STEPS,
    ),
    "doubling by ~": (growing("'a'", "ns.x ~ ns.x"), CHARS),
    "doubling by +": (growing("'a'", "ns.x + ns.x"), CHARS),
    "doubling a list": (growing("['a']", "ns.x + ns.x"), CHARS),
    "doubling what is shown": (growing("['a']", "[ns.x, ns.x]", "{{ ns.x }}"), CHARS),
    "doubling JSON": (growing("['a']", "[ns.x, ns.x]", "{{ ns.x|tojson }}"), CHARS),
    "comparing what doubles": (DOUBLED + "{{ ns.x == ns.y }}", CHARS),
    "less than": (DOUBLED + "{{ ns.x < ns.y }}", CHARS),
    "searching": (DOUBLED + "{{ ns.x in [ns.y] }}", CHARS),
    "not in": (DOUBLED + "{{ ns.x not in [ns.y] }}", CHARS),
    "a test": (DOUBLED + "{{ ns.x is eq(ns.y) }}", CHARS),
    "a test of filters": (DOUBLED + "{{ [ns.x]|select('in', [ns.y])|list }}", CHARS),
    "an attribute's test": (
        DOUBLED + "{{ [{'a': ns.x}]|selectattr('a', 'equalto', ns.y)|list }}",
        CHARS,
    ),
    "sort": (DOUBLED + "{{ [ns.x, ns.y]|sort|length }}", CHARS),
    "unique": (DOUBLED + "{{ [ns.x, ns.y]|unique|list|length }}", CHARS),
    "min": (DOUBLED + "{{ [ns.x, ns.y]|min|length }}", CHARS),
    "max by attribute": (
        DOUBLED + "{{ [{'a': ns.x}, {'a': ns.y}]|max(attribute='a')|length }}",
        CHARS,
    ),
    "groupby": (
        DOUBLED + "{{ [{'a': ns.x}, {'a': ns.y}]|groupby('a')|length }}",
        CHARS,
    ),
    "dictsort": (
        DOUBLED + "{{ {'a': ns.x, 'b': ns.y}|dictsort(by='value')|length }}",
        CHARS,
    ),
    "sum of lists": ("{{ ([[0]] * 60000)|sum(start=[])|length }}", CHARS),
    "a list's method": (DOUBLED + "{{ [ns.x].index(ns.y) }}", CHARS),
    "a generator's JSON": (DOUBLED + "{{ [ns.x]|map('list')|tojson }}", CHARS),
    "a key": (growing("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1}|length }}"), CHARS),
    "a subscript": (growing("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"), CHARS),
    "a dictionary's method": (
        growing("(1,)", "(ns.x, ns.x)", "{{ {}.get(ns.x) }}"),
        CHARS,
    ),
    "loop.changed": (
        DOUBLED + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
        CHARS,
    ),
    "a namespace": (growing("[1]", "[ns.x, ns.x]", "{{ ns }}"), CHARS),
    "a view": (growing("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x.values() }}"), CHARS),
    "nesting": (
        "{% set ns = namespace(x=()) %}{% for i in range(99999) %}"
        "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1}|length }}",
        "more than 500 deep",
    ),
    "itself": (
        "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns }}",
        "more than 500 deep",
    ),
    "long texts compared": (
        "{% set a = 'a' * 60000000 %}{% set b = 'a' * 60000000 %}"
        "{% for i in range(9999) %}{{ a == b }}{% endfor %}",
        STEPS,
    ),
    "squaring": (growing("10", "ns.x * ns.x"), "65536 bits"),
    "power": ("{{ 9 ** (9 ** 9) }}", "65536 bits"),
    "text times": ("{{ 'a' * 10**10 }}", CHARS),
    "times text": ("{{ 10**10 * 'a' }}", CHARS),
    "list times": ("{{ ([0] * 10**10)|length }}", CHARS),
    "ljust": ("{{ 'a'.ljust(10**10) }}", CHARS),
    "center": ("{{ 'a'|center(width=10**10) }}", CHARS),
    "map": ("{{ ['a']|map('center', 10**10)|list }}", CHARS),
    "%": ("{{ '%10000000000d' % 1 }}", "too wide"),
    "% *": ("{{ '%*d' % (10**10, 1) }}", CHARS),
    "format": ("{{ '{:>10000000000}'.format(1) }}", "too wide"),
    "format width": ("{{ '{:>{w}}'.format(1, w=10**10) }}", CHARS),
    "format filter": ("{{ '%*d'|format(10**10, 1) }}", CHARS),
    "replace": ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", CHARS),
    "replace filter": ("{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}", CHARS),
    "translate": ("{{ ('a' * 99).translate({97: 'b' * 10**7}) }}", CHARS),
    "join": ("{{ ('a' * 10**6).join(['a'] * 10**5) }}", CHARS),
    "join filter": ("{{ (['a'] * 10**5)|join('a' * 10**6) }}", CHARS),
    "join of a text": ("{{ ('a' * 10**6)|join('a' * 10**6) }}", CHARS),
    "join of a generator": (
        "{{ range(99999)|map('string')|join('a' * 10**6) }}",
        CHARS,
    ),
    "indent": ("{{ ('a\n' * 10**5)|indent(10**5) }}", CHARS),
    "tojson indent": ("{{ {'a': 1}|tojson(indent=10**10) }}", CHARS),
    "expandtabs": ("{{ '\t'.expandtabs(10**10) }}", CHARS),
    "slice": ("{{ [1]|slice(10**10)|list }}", CHARS),
    "parentheses": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
    "minus signs": ("{{ " + "-" * 100_000 + "1 }}", "recursion"),
    "ifs": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "recursion"),
    "fors": ("{% for i in x %}" * 50 + "{% endfor %}" * 50, "nested"),
    "the source": (" " * (MAX_SOURCE_CHARS + 1), "1048577 characters, more than"),
}


@pytest.mark.parametrize(("source", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused_at_load(source: str, words: str) -> None:
    began = time.thread_time()
    with pytest.raises(ValueError, match="^chat template of /x: ") as refused:
        ChatTemplate(source, origin="/x", variables={})
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert time.thread_time() - began < 10.0


def test_processor_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.01)
    slow = "{% for i in range(99999) %}{{ i }}{% endfor %}"
    with pytest.raises(ValueError, match="it takes more than 0.01 s"):
        ChatTemplate(slow, origin="/x", variables={})


def rendered(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    template = ChatTemplate(source, origin="/x", variables={})
    return template.render(
        messages, add_generation_prompt=True, tools=None, variables=variables
    )


def test_a_request_cannot_turn_a_harmless_template_into_a_loop() -> None:
    source = (
        "{% for i in range(n or 0) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok"
    )
    assert rendered(source, [], n=3) == "ok"
    with pytest.raises(ValueError, match="refused the messages: it takes more than"):
        rendered(source, [], n=99_999)


def test_a_comparison_that_only_some_conversations_reach() -> None:
    source = (
        DOUBLED + "{% if messages|length == 9 %}{{ ns.x == ns.y }}{% endif %}"
        "{% for m in messages %}{{ m == messages[-1] }}{% endfor %}"
    )
    user = {"role": "user", "content": "hi"}
    assert rendered(source, [user] * 8) == "True" * 8
    with pytest.raises(ValueError, match="refused the messages: it makes more than"):
        rendered(source, [user] * 9)


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate(
        "{% for i in range(99999) %}{% endfor %}ok", origin="/x", variables={}
    )
    for _ in range(12):
        answer = template.render(
            [], add_generation_prompt=True, tools=None, variables={}
        )
        assert answer == "ok"


USUAL = """{%- set ns = namespace(text='', last=-1) -%}
{%- macro show(m) -%}<|{{ m.role }}|>{{ m['content'] | trim }}{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- set ns.text = ns.text ~ show(m) + '\n' -%}
{%- if loop.last and loop.length > 1 -%}{{ ns.text }}{%- endif -%}
{%- endfor -%}
{{ ns.last }} {{ '%5d|%s' % (7, 'x') }} {{ '{:>4}'.format(3) }} {{ 'a'.center(5) }}
{{ messages[:2] | tojson(indent=2) }} {{ ['a', 'b'] | join(', ') }} {{ 2 ** 10 }}
{{ messages | map(attribute='role') | unique | join('-') }}
{{ 'abc' | replace('b', 'd') }}
{%- for k, v in {'a': [1, 2]} | dictsort recursive %}{{ k }}{{ v }}{% endfor -%}
"""


def test_a_long_conversation_is_rendered_as_before() -> None:
    """1,000 messages of 2,000 characters each."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f" {i} " + "word " * 400}
        for i in range(1000)
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    for count in (1, 2, 1000):
        some = messages[:count]
        assert rendered(USUAL, some) == plain.from_string(USUAL).render(messages=some)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
