"""Prompts for benchmarks: drawn from a seed, nothing is downloaded.

Text comes from the Python standard library's own source, which every machine has.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from sglang.bench_utils.speed_bench import read_rows
from sglang.srt.arg_groups.arg_parser import Arg, check_values
from sglang.srt.utils.hf_tokenizer import Tokenizer

DATASETS = ("random", "random-ids", "generated-shared-prefix", "speed-bench")
# Characters tokenized per wanted token; more if that yields too few tokens.
CHARS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt, as text and as tokens, and the number of tokens to generate.

    `ids_only` marks random tokens, whose text would be tokenized differently. `body` is
    a whole request as once sent to `/generate`, or None to build it from the other
    fields. `category` is the class of text, or None.
    """

    text: str
    input_ids: list[int]
    output_len: int
    ids_only: bool = False
    body: dict[str, Any] | None = None
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetArgs:
    """The flags of a dataset; a benchmark's own flags extend them."""

    dataset_name: Annotated[
        str,
        Arg(
            "random: text of random lengths; random-ids: random tokens; "
            "generated-shared-prefix: groups of prompts with a common beginning; "
            "speed-bench: prompts by class of text, from --dataset-path.",
            DATASETS,
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None, Arg("speed-bench: .jsonl file with the rows of the data set.")
    ] = None
    speed_bench_output_len: Annotated[
        int, Arg("speed-bench: longest output, in tokens.", low=1)
    ] = 1024
    num_prompts: Annotated[
        int, Arg("Requests (random, random-ids); most requests (speed-bench).", low=1)
    ] = 1000
    seed: Annotated[int, Arg("Seed of everything that is drawn.", low=0)] = 1
    random_input_len: Annotated[int, Arg("Longest prompt, in tokens.", low=1)] = 1024
    random_output_len: Annotated[int, Arg("Longest output, in tokens.", low=1)] = 1024
    random_range_ratio: Annotated[
        float, Arg("Shortest length as a share of the longest.")
    ] = 0.0
    gsp_num_groups: Annotated[int, Arg("Groups that share a prefix.", low=1)] = 64
    gsp_prompts_per_group: Annotated[int, Arg("Prompts in a group.", low=1)] = 16
    gsp_system_prompt_len: Annotated[int, Arg("Tokens of a shared prefix.", low=1)] = (
        1024
    )
    gsp_question_len: Annotated[int, Arg("Tokens of a prompt's own part.", low=1)] = 128
    gsp_output_len: Annotated[int, Arg("Tokens to generate.", low=1)] = 256

    def __post_init__(self) -> None:
        check_values(self)
        if not 0.0 <= self.random_range_ratio <= 1.0:
            raise ValueError(
                f"--random-range-ratio {self.random_range_ratio} must lie between 0 "
                "and 1"
            )


def make_requests(args: DatasetArgs, tokenizer: Tokenizer) -> list[BenchRequest]:
    """Build the requests of the dataset that `args` names; same seed, same requests."""
    rng = random.Random(args.seed)
    return _BUILDERS[args.dataset_name](args, tokenizer, rng)


def draw_length(rng: random.Random, longest: int, range_ratio: float) -> int:
    """Draw a length uniformly from `[longest * range_ratio, longest]`, at least 1."""
    return rng.randint(max(int(longest * range_ratio), 1), longest)


def text_ids(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[int]:
    """Return `count` tokens of source code from a random position."""
    text, wanted = "", 0
    while True:
        wanted += count * CHARS_PER_TOKEN
        while len(text) < wanted:
            source = rng.choice(_source_files()).read_text(encoding="utf-8")
            text += source[rng.randrange(len(source)) :]
        ids = tokenizer.encode(text[:wanted], add_special_tokens=False)
        if len(ids) >= count:
            return ids[:count]


def decode_no_longer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return a text that a server tokenizes to at most `len(ids)` tokens.

    The text of a word that is cut in the middle may have more tokens than its ids.
    """
    kept = list(ids)
    while True:
        text = tokenizer.decode(kept)
        excess = len(tokenizer.encode(text)) - len(ids)
        if excess <= 0 or len(kept) <= excess:
            return text
        kept = kept[:-excess]


def _random_text(
    args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random
) -> list[BenchRequest]:
    requests = []
    for prompt_len, output_len in _lengths(args, rng):
        text = decode_no_longer(tokenizer, text_ids(tokenizer, rng, prompt_len))
        requests.append(_from_text(text, tokenizer, output_len))
    return requests


def _random_ids(
    args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random
) -> list[BenchRequest]:
    vocab = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    requests = []
    for prompt_len, output_len in _lengths(args, rng):
        ids = rng.choices(vocab, k=prompt_len)
        requests.append(
            BenchRequest(
                text=tokenizer.decode(ids),
                input_ids=ids,
                output_len=output_len,
                ids_only=True,
            )
        )
    return requests


def _shared_prefix(
    args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random
) -> list[BenchRequest]:
    """Build groups, shuffled so that a group's members do not arrive together."""
    requests = []
    for _ in range(args.gsp_num_groups):
        prefix = text_ids(tokenizer, rng, args.gsp_system_prompt_len)
        for _ in range(args.gsp_prompts_per_group):
            question = text_ids(tokenizer, rng, args.gsp_question_len)
            text = decode_no_longer(tokenizer, prefix + question)
            requests.append(_from_text(text, tokenizer, args.gsp_output_len))
    rng.shuffle(requests)
    return requests


def _speed_bench(
    args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random
) -> list[BenchRequest]:
    """Draw rows without repetition; every category has its share of them."""
    rows = read_rows(args.dataset_path)
    rng.shuffle(rows)
    return [
        BenchRequest(
            text=row.turns[0],
            input_ids=tokenizer.encode(row.turns[0]),
            output_len=args.speed_bench_output_len,
            category=row.category,
        )
        for row in rows[: args.num_prompts]
    ]


_Builder = Callable[[DatasetArgs, Tokenizer, random.Random], list[BenchRequest]]
_BUILDERS: dict[str, _Builder] = {
    "random": _random_text,
    "random-ids": _random_ids,
    "generated-shared-prefix": _shared_prefix,
    "speed-bench": _speed_bench,
}


def _lengths(args: DatasetArgs, rng: random.Random) -> list[tuple[int, int]]:
    share = args.random_range_ratio
    return [
        (
            draw_length(rng, args.random_input_len, share),
            draw_length(rng, args.random_output_len, share),
        )
        for _ in range(args.num_prompts)
    ]


def _from_text(text: str, tokenizer: Tokenizer, output_len: int) -> BenchRequest:
    return BenchRequest(
        text=text, input_ids=tokenizer.encode(text), output_len=output_len
    )


@lru_cache(maxsize=1)
def _source_files() -> list[Path]:
    """Return the modules of the standard library of a page of text or more."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(folder.glob("*.py")) if path.stat().st_size > 4096]
