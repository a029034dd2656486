"""The measure "does the completion parse": its prompts and the end of a completion.

Knows Python text; refuses to know models. A prompt is a held-out file up to the end of
a function's header and docstring. A completion counts when the whole file prefix with
it parses, in one attempt, and it has at least `MIN_CODE_LINES` lines of code.
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.demo_model.chat_samples import docstring_node, iter_functions

MIN_REFERENCE_LINES = 3
MIN_CODE_LINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCase:
    """`prompt` ends with a line break; `def_line` (1-based) is the function's line."""

    path: str
    prompt: str
    reference: str
    def_line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A completion cut at its end. `is_closed`: the function was finished."""

    text: str
    is_closed: bool


def iter_cases(path: str, text: str) -> Iterator[PromptCase]:
    """Yield one case per function or method whose body has enough lines."""
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    for node, _ in iter_functions(tree):
        doc = docstring_node(node)
        end = node.end_lineno or node.lineno
        cut = node.body[0].lineno - 1
        if doc is not None:
            cut = doc.end_lineno or doc.lineno
        if cut < node.lineno or end - cut < MIN_REFERENCE_LINES:
            continue
        yield PromptCase(
            path=path,
            prompt="\n".join(lines[:cut]) + "\n",
            reference="\n".join(lines[cut:end]) + "\n",
            def_line=node.lineno,
        )


def choose_cases(
    files: Sequence[tuple[str, str]], *, count: int, seed: int
) -> list[PromptCase]:
    """Draw `count` cases from (path, text) files, or fewer if they hold fewer.

    The files are taken in turn, so that long ones do not dominate.
    """
    rng = random.Random(seed)
    queues = [list(iter_cases(path, text)) for path, text in files]
    for queue in queues:
        rng.shuffle(queue)
    chosen: list[PromptCase] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return chosen


def read_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return the tokens up to the first error, or all."""
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found.append(token)
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def cut_completion(case: PromptCase, completion: str, *, is_truncated: bool) -> Cut:
    """Return the completion up to the end of the function it continues.

    `is_truncated` says that generation ran into its length limit. Then, if the function
    is not finished, the completion ends after its last complete simple statement (the
    last logical line that opens no block). A completion that ended by itself is left
    whole, broken or not. One that leaves the function at once is empty.
    """
    text = case.prompt + completion
    if is_truncated:
        text = text[: text.rfind("\n") + 1]
    prompt_rows = case.prompt.count("\n")
    last_row = text.count("\n")
    depth = 0
    def_depth: int | None = None
    previous = ""
    statement_end = simple_end = prompt_rows
    lines = text.splitlines(keepends=True)

    def until(row: int) -> str:
        return "".join(lines[prompt_rows:row])

    for token in read_tokens(text):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
            is_at_end = token.start[0] > last_row
            is_past_prompt = token.start[0] > prompt_rows
            closes = def_depth is not None and depth <= def_depth and is_past_prompt
            if closes and not (is_truncated and is_at_end):
                return Cut(text=until(statement_end), is_closed=True)
        elif token.type == tokenize.NEWLINE:
            if token.start[0] > prompt_rows:
                statement_end = token.start[0]
                if previous != ":":
                    simple_end = token.start[0]
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.string
            if token.start[0] == case.def_line and def_depth is None:
                def_depth = depth
    if is_truncated:
        return Cut(text=until(simple_end), is_closed=False)
    return Cut(text=completion, is_closed=False)


def count_code_lines(text: str) -> int:
    """Count the lines that are neither blank nor only a comment."""
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def does_parse(case: PromptCase, cut: Cut) -> bool:
    """Whether the whole file prefix with the completion parses; one attempt."""
    if count_code_lines(cut.text) < MIN_CODE_LINES:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(case.prompt + cut.text)
    except (SyntaxError, ValueError):
        return False
    return True


def four_grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]


def distinct_ratio(sequences: Sequence[Sequence[int]]) -> float:
    """Return distinct over all 4-grams, averaged over the sequences that have one.

    1.0 means that no completion repeats itself.
    """
    shares = [
        len(set(grams)) / len(grams) for ids in sequences if (grams := four_grams(ids))
    ]
    return sum(shares) / len(shares) if shares else 0.0


def pooled_distinct_ratio(sequences: Sequence[Sequence[int]]) -> float:
    """Return distinct over all 4-grams of all sequences together."""
    grams = [gram for ids in sequences for gram in four_grams(ids)]
    return len(set(grams)) / len(grams) if grams else 0.0
