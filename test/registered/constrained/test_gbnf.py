"""GBNF has the language that llama.cpp gives it, whatever is a lexeme.

Truth is a recogniser of the parsed rules that knows no lexemes: it lets every part end
everywhere.
"""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sglang.srt.constrained.base_grammar import GrammarLimitError
from sglang.srt.constrained.gbnf import (
    Chars,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    parse_gbnf,
)
from sglang.srt.constrained.gbnf_lexemes import gbnf_to_lark
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")


class Recogniser:
    """All ends of every rule at every place, until nothing new is found."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self._rules, self._text = rules, text
        self._ends: dict[tuple[str, int], set[int]] = {}
        self._is_changed = True

    def accepts(self) -> bool:
        while self._is_changed:
            self._is_changed = False
            for name, at in list(itertools.product(self._rules, self._places())):
                found = self._match(self._rules[name], at)
                known = self._ends.setdefault((name, at), set())
                self._is_changed |= not found <= known
                known |= found
        return len(self._text) in self._ends["root", 0]

    def _places(self) -> range:
        return range(len(self._text) + 1)

    def _match(self, node: Node, at: int) -> set[int]:
        if isinstance(node, Chars):
            code = ord(self._text[at]) if at < len(self._text) else -1
            return {at + 1} if any(a <= code <= b for a, b in node.ranges) else set()
        if isinstance(node, Reference):
            return set(self._ends.get((node.name, at), ()))
        if isinstance(node, Choice):
            return {end for one in node.options for end in self._match(one, at)}
        if isinstance(node, Sequence):
            ends = {at}
            for item in node.items:
                ends = {end for one in ends for end in self._match(item, one)}
            return ends
        assert isinstance(node, Repeat)
        ends, all_ends, times = {at}, {at} if node.low == 0 else set(), 0
        limit = len(self._text) + node.low + 1
        while ends and times < min(limit, limit if node.high is None else node.high):
            ends = {end for one in ends for end in self._match(node.item, one)}
            times += 1
            if times >= node.low:
                all_ends |= ends
        return all_ends


def follows(backend: LLGuidanceBackend, tokens: list[int], source: str) -> bool:
    """Whether an output may be exactly these tokens."""
    grammar = template(backend, source).fork()
    for token in tokens:
        try:
            grammar.accept(token)
        except RuntimeError:
            return False
    return bool(grammar._matcher.compute_bitmask()[0] & 1)


def template(backend: LLGuidanceBackend, source: str) -> object:
    if source not in _TEMPLATES:
        _TEMPLATES[source] = backend.compile_checked("ebnf", source)
    return _TEMPLATES[source]


_TEMPLATES: dict[str, object] = {}


def single_chars(tokenizer: Tokenizer, text: str) -> list[int]:
    return [one for char in text for one in tokenizer.encode(char).ids]


JSON_SHAPE = r"""
root ::= value
value ::= object | array | string | number | ("true" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] |
  "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CODE = r"""
root ::= (declaration)*
declaration ::= type name "(" (type name)? ")" "{" statement* "}"
type ::= "int" ws | "char" ws
name ::= [a-z_] [a-z_0-9]*
statement ::= ( type name ws "=" ws sum ";" ) | ( name ws "=" ws sum ";" ) |
    ( "return" ws sum ";" ) | ( "//" [^\n]* "\n" ) |
    ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
sum ::= item (("+" | "-") item)*
item ::= name | [0-9]+ | "-" item | name "(" sum ")" | "(" ws sum ws ")"
ws ::= ([ \t\n]+)
"""
# (grammar, possible, impossible)
SHAPES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" ws "\\n"\nws ::= [ \\t\\n]*', ["a\n", "a \n\n", "a\n\t\n"],
     ["a", "a ", "a\nb"]),
    (SUMS, ["a+b=c\n", "a +1 =\n2\n\n", "(x)=y\nb=(c )\n"], ["a+b=c", "1a=b\n"]),
    (JSON_SHAPE, ['{"a": [1, -2.5 ,true], "b":{}}', '[ ]', '"\\u00e9\\n"', "0"],
     ['{"a": }', "[1,]", '"\n"', "01"]),
    (CODE, ["int f(){}", "int f(char x){int y = -1+(\n2 );//a\n/* * */return x;}",
            "int f(){intx = 1;returned = 2;}"], ["int f(){return;}", "intf(){}"]),
    ('root ::= "\\"" [^"]* "\\""', ['""', '"a b\n"'], ['"', '"a"b"']),
    ('root ::= ([ \\n]* "a")* [ \\n]* "\\n"', ["\n", " a\na \n"], ["a", " "]),
    ('root ::= a b\na ::= "x" a | "x"\nb ::= "x" "y"', ["xxy", "xxxxy"], ["xy"]),
    ('root ::= ("a" | "ab") r "c"?\nr ::= "b" | "[" r "]"', ["ab", "abb", "abc",
     "a[b]"], ["abbb", "b"]),
    ("root ::= item+\nitem ::= \"- \" [^\\r\\n\\x0b\\x85\\u2028]+ \"\\n\"",
     ["- a\n", "- a\n- é b\n"], ["- \n", "- a", "- a\u2028\n"]),
    ('root ::= "a"\n  | "b"   # comment\n\n  | "c"\n', ["a", "b", "c"], ["ab"]),
    ("root ::= .", ["\n", "漢"], ["", "ab"]),
    ("root ::= \"\"", [""], ["a"]),
    ("root ::= [a-] [^\\]] [\\]]", ["-a]", "ab]"], ["b-]", "a]]"]),
    ("root ::= \"a\"{2} [b]{1,} \"c\"{0,1} \"d\"{0}", ["aab", "aabbc"], ["ab", "aacd"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "possible", "impossible"), SHAPES)
def test_shapes_of_published_grammars(
    source: str,
    possible: list[str],
    impossible: list[str],
    backend: LLGuidanceBackend,
    tokenizer: Tokenizer,
) -> None:
    backend.compile("ebnf", source)
    for text, is_possible in [(one, True) for one in possible] + [
        (one, False) for one in impossible
    ]:
        for tokens in (tokenizer.encode(text).ids, single_chars(tokenizer, text)):
            assert follows(backend, tokens, source) is is_possible, text
        assert Recogniser(parse_gbnf(source), text).accepts() is is_possible


@pytest.mark.parametrize(
    ("escape", "char"),
    [(r"\u00e9", "é"), (r"\U0001F600", "😀"), (r"\u4e00", "一"), (r"\x41", "A"),
     (r"\xe9", "é"), (r"\ud83d\ude00", "😀"), (r"\U0000000A", "\n"), (r"\u0000", "\0"),
     (r"\t", "\t"), (r"\[", "["), (r"\]", "]"), (r"\"", '"'), (r"\\", "\\"),
     (r"\-", "-"), (r"\/", "/"), (r"\.", ".")],
)  # fmt: skip
def test_escapes(
    escape: str, char: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    for source in (f'root ::= "{escape}"', f"root ::= [{escape}]"):
        assert follows(backend, tokenizer.encode(char).ids, source)
        assert not follows(backend, tokenizer.encode("x").ids, source)
    assert not follows(backend, tokenizer.encode(char).ids, f"root ::= [^{escape}]")


def test_single_tokens_of_the_vocabulary(backend: LLGuidanceBackend) -> None:
    assert follows(backend, [1, 1], "root ::= <pad> <[1]>")
    assert not follows(backend, [1, 3], "root ::= <pad> <[1]>")
    assert follows(backend, [3], "root ::= !<[1]>")
    assert not follows(backend, [1], "root ::= !<[1]>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a', "line 1: a literal that does not end"),
        ("root ::= [a", "a class that does not end"),
        ("root ::= []", "a class that no character is in"),
        ("root ::= [z-a]", "a range whose end"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= "\\U00110000"', "is no character"),
        ('root ::= "\\q"', "expected an escape"),
        ("root ::= ( a", "expected"),
        ("\n\nroot ::= nothing", "line 3: rule 'nothing' not found"),
        ('list ::= "a"', "no rule 'root'"),
        ('root ::= "a"{3,2}', "cannot be repeated"),
        ('root = "a"', "expected ::="),
        ('root ::= "a" ) "b"', "unexpected text"),
        ("root ::= !<pad>", r"!<\[id\]>"),
    ],
)
def test_errors_say_where(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gbnf_to_lark(source)


ATOMS = ['"a"', '"ab"', "[ab]", "[^a]", '" "', "[ b]", "root", "x", "y", '"ba"']


SIGNS = ["", "", "", "*", "+", "?", "{2}"]


@st.composite
def grammars(draw: st.DrawFn) -> str:
    def part(depth: int) -> str:
        items = []
        for _ in range(draw(st.integers(1, 3))):
            item = draw(st.sampled_from(ATOMS))
            if depth and draw(st.booleans()):
                options = [part(depth - 1) for _ in range(draw(st.integers(1, 2)))]
                item = f"({' | '.join(options)})"
            items.append(
                item + draw(st.sampled_from(["", "", "", "*", "+", "?", "{2}"]))
            )
        return " ".join(items)

    lines = []
    for name in ("root", "x", "y"):
        options = [part(1) for _ in range(draw(st.integers(1, 2)))]
        if name != "root":
            options.append(draw(st.sampled_from(['"a"', "[ab]*", '" "'])))
        lines.append(f"{name} ::= {' | '.join(options)}")
    return "\n".join(lines)


@settings(max_examples=count(ci=60, full=1000), deadline=None)
@given(grammars(), st.integers(0, 2**32))
def test_any_grammar_accepts_what_its_rules_do(source: str, seed: int) -> None:
    backend, tokenizer = _WORLD
    rules = parse_gbnf(source)
    rng = random.Random(seed)
    texts = {"".join(rng.choices("ab ", k=rng.randrange(6))) for _ in range(25)}
    try:
        compiled = backend.compile_checked("ebnf", source)
    except (ValueError, GrammarLimitError) as error:
        assert not any(Recogniser(rules, text).accepts() for text in texts), error
        return
    _TEMPLATES[source] = compiled
    for text in texts:
        expected = Recogniser(rules, text).accepts()
        assert follows(backend, single_chars(tokenizer, text), source) is expected, text
    del _TEMPLATES[source]


_WORLD: tuple[LLGuidanceBackend, Tokenizer]


@pytest.fixture(scope="module", autouse=True)
def _world(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    global _WORLD
    _WORLD = backend, tokenizer


@pytest.mark.parametrize(
    "space",
    ["[ \\t\\n]*", '(" " | "\\n")*', "([ \\t\\n] ws)?", '"" | [ \\n] ws', "[ \\n]+"],
)
def test_white_space_ends(
    space: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    """A model that likes white space would write it up to its token limit."""
    source = f'root ::= "a" ws "\\n"\nws ::= {space}'
    for text, is_possible in (("a" + " " * 32 + "\n", True), ("a" + " " * 33, False)):
        grammar = backend.compile("ebnf", source)
        accepted = 0
        for token in single_chars(tokenizer, text):
            try:
                grammar.accept(token)
            except RuntimeError:
                break
            accepted += 1
        assert (accepted == len(text)) is is_possible
    indented = source.replace(space, "[ ]{40}", 1)
    assert follows(backend, single_chars(tokenizer, "a" + " " * 40 + "\n"), indented)


def test_large_parts_are_one_lexeme() -> None:
    """Single characters as lexemes would make masks of large vocabularies slow."""
    assert gbnf_to_lark('root ::= "a" ws "\\n"\nws ::= [ \\t]*').count("/") == 2
    lark = gbnf_to_lark(JSON_SHAPE)
    assert len(re.findall(r"^T\d+: ", lark, re.MULTILINE)) <= 10
    assert r"[^\x{0}-\x{1f}\x{22}\x{5c}\x{7f}]" in lark


def test_hostile_grammars_cost_bounded_time() -> None:
    chain = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(2500)]
    doubling = "\n".join(["root ::= r0", *chain, 'r2500 ::= "a"'])
    long_chain = "\n".join(
        ["root ::= r0", *(f'r{i} ::= "x" r{i + 1} | r{i + 1} "y"' for i in range(1800))]
        + ['r1800 ::= "a" root?']
    )
    literal = 'root ::= "' + "ab" * 30_000 + '"'
    wide = (
        "root ::= [" + "".join(chr(0x4E00 + 2 * i) for i in range(20_000)) + "]+ root?"
    )
    mixed = "root ::= " + " | ".join(
        f'"{"a" * (i % 90)}" [ab]* root' for i in range(900)
    )
    for source in (doubling, long_chain, literal, wide, mixed):
        started = time.process_time()
        gbnf_to_lark(source)
        assert time.process_time() - started < 20


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
