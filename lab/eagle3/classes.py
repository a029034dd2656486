"""Requests by class of text, as rows of SPEED-Bench (arXiv 2604.09557): how many drafts
are accepted depends on the text.

    python -m lab.eagle3.classes ROWS.jsonl

They are made of held-out sources, of the language reference that comes with Python,
and of templates. The data set itself is larger and better; its file has the same form.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path
from pydoc_data.topics import topics

from lab.eagle3.corpus import digest, read_texts
from lab.eagle3.prompts import write_lines

ROWS_PER_CLASS = 12
PASSAGE_CHARS = 900
CODE_CHARS = 700

Rows = Iterator[str]


def passages() -> Iterator[str]:
    """Yield passages of the language reference."""
    for name in sorted(topics, key=digest):
        text = topics[name].strip()
        if len(text) >= PASSAGE_CHARS:
            yield text[:PASSAGE_CHARS]


def heldout(kind: str) -> Iterator[str]:
    """Yield one held-out text per file."""
    seen: set[str] = set()
    for text in read_texts(heldout=True):
        if text.kind == kind and text.path not in seen:
            seen.add(text.path)
            yield text.text[:CODE_CHARS]


def coding() -> Rows:
    for text in heldout("docs"):
        yield f"Write a Python function with this docstring.\n\n{text}"


def editing() -> Rows:
    for text in heldout("code"):
        yield (
            "Add type hints and comments to this code. Answer with the whole code.\n\n"
            f"```python\n{text}\n```"
        )


def summarization() -> Rows:
    for text in passages():
        yield f"Summarize the following text in three sentences.\n\n{text}"


def qa() -> Rows:
    for text in passages():
        yield (
            "What should a beginner know about this? Answer in plain words.\n\n"
            f"{text[: PASSAGE_CHARS // 2]}"
        )


def multilingual() -> Rows:
    languages = cycle(("German", "French", "Spanish", "Chinese"))
    for language, text in zip(languages, passages(), strict=False):
        yield f"Translate into {language}:\n\n{text[: PASSAGE_CHARS // 3]}"


def reasoning() -> Rows:
    names = ("Anna", "Ben", "Chidi", "Dora", "Emil", "Fatima")
    goods = (("apples", 3), ("notebooks", 4), ("tickets", 12), ("lamps", 25))
    for (goods_name, price), name in product(goods, names):
        many, other = 3 + digest(name) % 9, 2 + digest(goods_name + name) % 7
        yield (
            f"{name} buys {many} {goods_name} at {price} euros each and gives "
            f"{other} friends an equal share of twice that many {goods_name}. How much "
            f"did {name} pay, and how many {goods_name} are left over after sharing? "
            "Think step by step."
        )


def writing() -> Rows:
    forms = ("a short story", "a friendly email", "a poem", "a product description")
    themes = ("a lighthouse in winter", "a bicycle that is lent", "an old library")
    for form, theme in product(forms, themes):
        yield f"Write {form} about {theme}."


CLASSES = (coding, editing, summarization, qa, multilingual, reasoning, writing)


def class_rows() -> Iterator[dict[str, object]]:
    """Yield the rows of all classes, in turn."""
    of_class = {rows.__name__: list(islice(rows(), ROWS_PER_CLASS)) for rows in CLASSES}
    for at in range(ROWS_PER_CLASS):
        for name, texts in of_class.items():
            if at < len(texts):
                yield {"category": name, "turns": [texts[at]]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    write_lines(parser.parse_args(arguments).file, class_rows())


if __name__ == "__main__":
    main()
