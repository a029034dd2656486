"""Chat-shaped samples cut out of the corpus: a request in words, then the function.

The words are the first sentence of a docstring, or the name of the function read aloud.
Knows Python's syntax tree; refuses to know tokens. Held-out files give held-out chats.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.demo_model.paths import CORPUS

Function = ast.FunctionDef | ast.AsyncFunctionDef

MIN_CODE_LINES = 2
# Short answers: a small model has to learn to stop.
MAX_CODE_CHARS = 800
MAX_REQUEST_WORDS = 24
VARIANTS_PER_FUNCTION = 4
SYSTEM_SHARE = 0.15
KEEP_DOCSTRING_SHARE = 0.3
MAX_KEPT_DOCSTRING_LINES = 3

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful programming assistant.",
    "You write Python code.",
)

# Base forms; "returns" in a docstring is brought back to "return" by `base_verb`.
VERB_LIST = """
    accept add adjust align allow analyze append apply approximate assert assign
    attach balance break build cache calculate call cancel change check choose clean
    clear close collapse collect combine compare compile complete compute concatenate
    configure connect construct contract convert copy count create cut decide decode
    decompose decrement define delete derive describe detach detect determine display
    divide do download draw drop dump eliminate emit enable encode ensure enumerate
    erase escape estimate evaluate examine exchange execute expand express extend
    extract factor fetch fill filter find finish fit flatten flush force format
    generate get give go group guess handle help hide identify ignore implement import
    increment indicate infer initialize insert inspect install integrate interpret
    interpolate intersect invert invoke iterate join keep leave list load locate lock
    log look lower make map mark mask match measure merge modify move multiply
    normalize notify obtain open order output pack pad parse partition perform permute
    pick plot poll pop position predict prepare preprocess print process produce
    project provide pull push put query quote raise rank read rebuild receive record
    reduce reformat register relabel release remove rename render reorder repeat
    replace report represent request reset reshape resize resolve restore retrieve
    return reverse rewrite rotate round run sample save scale scan schedule search
    select send separate serialize set setup shift show shuffle shut simplify simulate
    skip slice solve sort specify split square start stop store strip subtract suggest
    sum swap take tell terminate test tokenize transform translate transpose traverse
    try turn undo unescape unpack update use validate verify wait walk warn wrap write
    yield
"""
VERBS = frozenset(VERB_LIST.split())

# {kind}: function or method; {third}: "returns the sum"; {base}: "return the sum".
VERB_REQUESTS = (
    "Write a Python {kind} that {third}.",
    "Write a Python {kind} that {third}.",
    "Write a Python {kind} that {third}",
    "Write a {kind} that {third}.",
    "Write a {kind} that {third} in Python.",
    "Write a Python {kind} to {base}.",
    "Write a Python {kind} `{name}` that {third}.",
    "Write a {kind} named {name}. It should {base}.",
    "Please write a Python {kind} that {third}.",
    "Can you write a Python {kind} that {third}?",
    "Create a Python {kind} that {third}.",
    "Implement a {kind} that {third}.",
    "Implement `{signature}`, which {third}.",
    "I need a Python {kind} to {base}.",
    "How do I {base} in Python?",
    "How can I {base}?",
    "Write Python code to {base}.",
    "Show me Python code that {third}.",
    "{base_capital}",
)
# For docstrings that do not begin with a verb: {sentence} is quoted unchanged.
PLAIN_REQUESTS = (
    "Write the Python {kind} `{name}`: {sentence}",
    "Implement `{signature}`: {sentence}",
    "Write a Python {kind} with this description: {sentence}",
    'Complete this {kind}:\n\n{header}\n    """{sentence}"""',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSample:
    """One conversation; `system` is empty without a system turn."""

    system: str
    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A function as text: dedented code with and without its docstring."""

    name: str
    kind: str
    signature: str
    header: str
    sentence: str
    code: str
    code_without_docstring: str


def third_person(verb: str) -> str:
    """Inflect: `search` -> `searches`, `copy` -> `copies`, `return` -> `returns`."""
    if verb == "do" or verb == "go" or verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2:-1] not in "aeou":
        return verb[:-1] + "ies"
    return verb + "s"


THIRD_TO_BASE = {third_person(verb): verb for verb in VERBS}


def base_verb(word: str) -> str | None:
    """Return the base form of `word` if it is a known verb in either form."""
    word = word.lower()
    return word if word in VERBS else THIRD_TO_BASE.get(word)


def first_sentence(docstring: str) -> str:
    """Return the first sentence on one line, without RST quoting; may be ''."""
    paragraph = re.split(r"\n\s*\n", textwrap.dedent(docstring).strip())[0]
    line = " ".join(paragraph.split()).replace("``", "`")
    line = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", line)
    sentence = re.split(r"(?<=[.!?])\s", line)[0]
    usable = sentence.isascii() and ">>>" not in sentence and "::" not in sentence
    words = sentence.split()
    return sentence if usable and 2 <= len(words) <= MAX_REQUEST_WORDS else ""


def name_to_sentence(name: str) -> str:
    """Map `_parse_header` to `Parse header.`; '' unless it starts with a verb."""
    words = [word for word in name.strip("_").split("_") if word]
    is_special = name.startswith("__") or name != name.lower()
    if len(words) < 2 or base_verb(words[0]) is None or is_special:
        return ""
    return " ".join(words).capitalize() + "."


def docstring_node(node: Function) -> ast.Constant | None:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def iter_functions(tree: ast.Module) -> Iterator[tuple[Function, str]]:
    """Yield (node, "function" | "method") of module level and of its classes."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node, "function"
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function):
                    yield member, "method"


def cut_function(lines: list[str], node: Function, kind: str) -> Cut | None:
    """Return the function as text, or None when it makes no useful answer."""
    doc = docstring_node(node)
    body_line = node.body[0].lineno
    if node.decorator_list or node.end_lineno is None or body_line == node.lineno:
        return None
    header_lines = lines[node.lineno - 1 : body_line - 1]
    whole = lines[node.lineno - 1 : node.end_lineno]
    bare = whole
    if doc is not None and doc.end_lineno is not None:
        bare = header_lines + lines[doc.end_lineno : node.end_lineno]
        while len(bare) > len(header_lines) and not bare[len(header_lines)].strip():
            del bare[len(header_lines)]
    code = textwrap.dedent("\n".join(bare)).rstrip()
    if len(bare) - len(header_lines) < MIN_CODE_LINES - 1 or len(code) > MAX_CODE_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError:
        return None
    keeps = doc is not None and doc.end_lineno is not None
    if doc is not None and doc.end_lineno is not None:
        keeps = doc.end_lineno - doc.lineno < MAX_KEPT_DOCSTRING_LINES
    kept = textwrap.dedent("\n".join(whole)).rstrip() if keeps else code
    header = textwrap.dedent("\n".join(header_lines)).strip()
    sentence = first_sentence(str(doc.value)) if doc is not None else ""
    sentence = sentence or name_to_sentence(node.name)
    if not sentence:
        return None
    return Cut(
        name=node.name,
        kind=kind,
        signature=" ".join(header.split()).removeprefix("def ").rstrip(":"),
        header=header,
        sentence=sentence,
        code=kept,
        code_without_docstring=code,
    )


def phrase(cut: Cut, rng: random.Random) -> str:
    """Return a user turn that asks for `cut`."""
    first, _, rest = cut.sentence.partition(" ")
    verb = base_verb(first)
    fields = {
        "kind": cut.kind,
        "name": cut.name,
        "signature": cut.signature,
        "header": cut.header,
        "sentence": cut.sentence,
    }
    if verb is None:
        return rng.choice(PLAIN_REQUESTS).format(**fields)
    rest = rest.rstrip(".!?: ")
    fields["base"] = f"{verb} {rest}"
    fields["third"] = f"{third_person(verb)} {rest}"
    fields["base_capital"] = f"{verb.capitalize()} {rest}"
    if rng.random() < 0.1:
        return rng.choice(PLAIN_REQUESTS).format(**fields)
    return rng.choice(VERB_REQUESTS).format(**fields)


def iter_samples(text: str, rng: random.Random) -> Iterator[ChatSample]:
    """Yield up to `VARIANTS_PER_FUNCTION` different requests per usable function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = text.split("\n")
    for node, kind in iter_functions(tree):
        cut = cut_function(lines, node, kind)
        if cut is None:
            continue
        # Methods are of less use without their class: one request each.
        count = VARIANTS_PER_FUNCTION if kind == "function" else 1
        for user in sorted({phrase(cut, rng) for _ in range(count)}):
            keep = rng.random() < KEEP_DOCSTRING_SHARE
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else ""
            yield ChatSample(
                system=system,
                user=user,
                assistant=cut.code if keep else cut.code_without_docstring,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    args = parser.parse_args()
    for split in ("train", "heldout"):
        seen: set[str] = set()
        count = 0
        source = args.corpus / f"{split}.jsonl"
        target = args.corpus / f"chat_{split}.jsonl"
        with (
            source.open(encoding="utf-8") as reader,
            target.open("w", encoding="utf-8") as out,
        ):
            for line in reader:
                item = json.loads(line)
                rng = random.Random(item["sha256"])
                for sample in iter_samples(item["text"], rng):
                    both = f"{sample.user}\0{sample.assistant}".encode()
                    digest = hashlib.sha256(both).hexdigest()
                    if digest not in seen:
                        seen.add(digest)
                        count += 1
                        out.write(json.dumps(asdict(sample)) + "\n")
        print(f"{target.name}: {count} samples, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
