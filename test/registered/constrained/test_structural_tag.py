"""Text that is free until a structure begins, and bound from there on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.spec_world import ModelFolders, SpecConfig, plain_engine, spec_engine

register_cpu_ci(est_time=6, suite="cpu")

INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PLAIN = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call>{x:", "schema": INT, "end": "}</call>"},
        {"begin": "<call>{y:", "schema": {"type": "boolean"}, "end": "}</call>"},
        # Special tokens of the vocabulary.
        {"begin": "<pad>", "schema": INT, "end": "<pad>"},
    ],
    "triggers": ["<call>", "<pad>"],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": PLAIN["triggers"],
        "tags": [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in PLAIN["structures"]
        ],
    },
}


def follows(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, source: Any, text: str
) -> bool:
    grammar = backend.compile_checked("structural_tag", json.dumps(source))
    for token in tokenizer.encode(text).ids:
        try:
            grammar.accept(token)
        except RuntimeError:
            return False
    return bool(grammar._matcher.compute_bitmask()[0] & 1)


@pytest.mark.parametrize("source", [PLAIN, FORMAT], ids=["plain", "format"])
@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ("", True),
        ("hello\n<cal", True),
        (' <call>{x:{"a":1}}</call> z', True),
        ('<call>{y:true}</call><call>{x:{"a": 2}}</call>', True),
        ('a <pad>{"a":3}<pad> b', True),
        ('<call>{x:{"a":"s"}}</call>', False),
        ("<call>{z", False),
        ("<call> {x", False),
        ("<call>", False),
        ('<call>{x:{"a":1}}', False),
        ("<pad>x", False),
    ],
)
def test_free_until_a_trigger(
    source: Any,
    text: str,
    is_possible: bool,
    backend: LLGuidanceBackend,
    tokenizer: Tokenizer,
) -> None:
    assert follows(backend, tokenizer, source, text) is is_possible


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ("", False),
        ("hello", False),
        ('{"a": 1}', True),
        ('{"a": "x"}', False),
        ('{"a":1}<call>{y:true}</call>', False),
        ("<call>{y:true}</call>", True),
        ('<call>{y:true}</call>\n<call>{x:{"a": 2}}</call>', True),
        ('<pad>{"a":3}<pad>', True),
        ("<call>{y:true}</call> and text", False),
        ("<call>{y:1}</call>", False),
    ],
)
def test_bound_from_the_beginning_where_an_answer_has_a_schema(
    text: str, is_possible: bool, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    source = PLAIN | {"answer_schema": INT}
    assert follows(backend, tokenizer, source, text) is is_possible


def changed(**fields: Any) -> dict[str, Any]:
    return PLAIN | fields


ONE = {"begin": "<a>", "schema": INT, "end": ""}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[", "not JSON"),
        ("[]", "must be an object"),
        ({}, "structures must be a list"),
        (changed(structures=[]), "structures must be a list"),
        (changed(triggers=[""]), "triggers must be texts"),
        (changed(triggers=["<other>"]), "begins with none of the triggers"),
        (changed(at_least_one=True), "unknown field 'at_least_one'"),
        (changed(answer_schema=[]), "answer_schema must be a JSON schema"),
        (changed(answer_schema={"not": {}}), "answer_schema.not: "),
        (changed(triggers=["<", "<a"], structures=[ONE]), "trigger '<a' begins with"),
        (changed(triggers=["<"], structures=[ONE, ONE | {"begin": "<a>b"}]),
         "begin '<a>b' begins with"),
        (changed(structures=[ONE | {"schema": 3}]), r"structures\[0\].schema must be"),
        (changed(triggers=["<"], structures=[ONE | {"schema": {"not": {}}}]),
         r"structures\[0\].schema.not: \{\} is not supported"),
        (changed(triggers=["<"], structures=[ONE | {"end": "<eos>"}]), "'<eos>'"),
        ({"format": {"type": "sequence"}}, "format.type is 'sequence'; supported"),
        ({"format": FORMAT["format"] | {"at_least_one": True}}, "must be false"),
        ({"format": FORMAT["format"] | {"tags": [
            {"begin": "<call>", "content": {"type": "regex"}, "end": ""}]}},
         r"format.tags\[0\].content.type is 'regex'"),
    ],
)  # fmt: skip
def test_refused_by_name(source: Any, message: str, backend: LLGuidanceBackend) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(ValueError, match=message):
        backend.compile_checked("structural_tag", text)


PAIR = {"type": "array", "prefixItems": [{"enum": [7]}], "minItems": 1, "items": False}
IN_CODE = {
    "structures": [{"begin": "(", "schema": PAIR, "end": ")"}],
    "triggers": ["("],
}
TREE = SpecConfig(
    algorithm="EAGLE3",
    topk=4,
    page_size=4,
    num_steps=4,
    nodes="middle",
    backend="cpu_native",
    overlap=True,
    model="demo",
    variant=None,
)


def outputs(harness: EngineHarness) -> list[list[int]]:
    asked: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
    tag = json.dumps(IN_CODE)
    rids = [
        harness.submit(TOKENIZER.encode(text).ids, structural_tag=tag, **asked)
        for text in ("def area", "print", "for i in range")
    ]
    answers = harness.run()
    return [list(answers[rid].output_ids) for rid in rids]


TOKENIZER = Tokenizer.from_file(str(bundled_demo_model_path() / "tokenizer.json"))


def test_in_every_order_of_steps_and_in_draft_trees(tmp_path: Path) -> None:
    usual = {"skip_tokenizer_init": False, "max_total_tokens": 16384}
    model = bundled_demo_model_path()
    expected = outputs(plain_engine(model, **usual))
    texts = ["".join(TOKENIZER.decode(ids).split()) for ids in expected]
    begun = [text[at.start() :] for text in texts for at in re.finditer(r"\(", text)]
    assert begun and all(
        "([7])".startswith(one) or one.startswith("([7])") for one in begun
    )
    assert outputs(EngineHarness(model, overlap=True, **usual)) == expected
    assert outputs(spec_engine(ModelFolders(tmp_path), TREE, **usual)) == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
