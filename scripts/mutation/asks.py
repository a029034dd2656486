"""The requests of the promise run.

Request number n is a function of the world, the seed and n alone, so its right answer
does not depend on when it is sent or on what a fault did before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.mutation.worlds import World

LONGEST_OUTPUT = 70
MAX_SEED = 1 << 30
Params = dict[str, Any]

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": '
    '["x", "yz"]}}, "required": ["a", "b"], "additionalProperties": false}'
)
GRAMMARS: tuple[Params, ...] = (
    {"regex": "[a-c]{2,40}"},
    {"regex": "(yes|no|maybe){3,20}"},
    {"regex": "[0-9]{4}-[a-z]+"},
    {"regex": "x[yz]*|[a-w]{9,30}"},
    {"json_schema": SCHEMA},
    {"ebnf": 'root ::= item+\nitem ::= "<" [a-f]+ ">"'},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asks for; `params` are sampling parameters."""

    prompt: list[int]
    params: Params
    stream: bool
    extra_key: str | None

    @property
    def max_new_tokens(self) -> int:
        return int(self.params["max_new_tokens"])


class Asks:
    """The requests of one world and seed; some share prefixes."""

    def __init__(self, world: World, *, seed: int) -> None:
        self._world = world
        self._seed = seed
        rng = random.Random(seed)
        self._stems = [
            self._tokens(rng, rng.randrange(20, world.longest_stem)) for _ in range(4)
        ]

    def __getitem__(self, number: int) -> Ask:
        world, rng = self._world, random.Random(f"{self._seed}/{number}")
        stem = rng.choice(self._stems)
        prompt = stem[: rng.randrange(len(stem) + 1)]
        prompt = (prompt + self._tokens(rng, rng.randrange(1, 60)))[: world.longest]
        room = world.longest + 1 - len(prompt)
        new = min(rng.choice((1, 2, rng.randrange(1, LONGEST_OUTPUT))), room)
        if rng.random() < 0.4:
            new = min(LONGEST_OUTPUT, room)
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        params |= PARAMS[world.asks](rng)
        params["min_new_tokens"] = min(params.get("min_new_tokens", 0), new)
        return Ask(
            prompt=prompt,
            params=params,
            stream=not world.has_front or rng.random() < 0.7,
            extra_key=rng.choice((None, None, None, "tenant")),
        )

    def _tokens(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self._world.vocab) for _ in range(length)]


def greedy(rng: random.Random) -> Params:
    return {}


def sampled(rng: random.Random) -> Params:
    """Return any mixture of the parameters that a sampler reads."""
    params: Params = {"sampling_seed": rng.randrange(MAX_SEED)}
    # Below 1 the mock model's best token usually wins.
    params["temperature"] = rng.choice((0.0, 0.4, 0.7, 1.0, 1.5))
    some: tuple[Params, ...] = (
        {"top_k": rng.randrange(2, 40)},
        {"top_p": rng.uniform(0.3, 0.95)},
        {"min_p": rng.uniform(0.02, 0.3)},
        {"repetition_penalty": rng.uniform(1.1, 2.0)},
        {"frequency_penalty": rng.uniform(0.2, 2.0)},
        {"presence_penalty": rng.uniform(0.2, 2.0)},
        {"logit_bias": {rng.randrange(200): rng.uniform(2.0, 9.0) for _ in range(3)}},
        {"min_new_tokens": 4, "stop_token_ids": [rng.randrange(200) for _ in range(8)]},
    )
    for part in some:
        if rng.random() < 0.35:
            params |= part
    return params


def mixed(rng: random.Random) -> Params:
    return sampled(rng) if rng.random() < 0.4 else {}


def grammars(rng: random.Random) -> Params:
    """Return a grammar for most requests, drawn from its tokens or greedy."""
    params: Params = {"sampling_seed": rng.randrange(MAX_SEED)}
    params["temperature"] = rng.choice((0.0, 0.0, 1.0))
    if rng.random() < 0.8:
        params |= rng.choice(GRAMMARS)
    if rng.random() < 0.2:
        params |= {"min_new_tokens": 3}
    return params


def texts(rng: random.Random) -> Params:
    """Return several outputs per prompt, some with stops."""
    params: Params = {"sampling_seed": rng.randrange(MAX_SEED)}
    params |= {"n": rng.choice((1, 2, 3)), "temperature": rng.choice((0.0, 1.0, 1.5))}
    letters = [chr(rng.randrange(97, 123)) for _ in range(6)]
    some: tuple[Params, ...] = (
        {"stop": [*letters[:3], letters[3] + letters[4]]},
        {"stop_token_ids": [rng.randrange(256) for _ in range(6)]},
        {"no_stop_trim": True},
        {"skip_special_tokens": False},
        {"min_new_tokens": 5},
        {"stop_regex": ["[0-9][a-z]"]},
    )
    for part in some:
        if rng.random() < 0.3:
            params |= part
    return params


PARAMS: dict[str, Callable[[random.Random], Params]] = {
    "greedy": greedy,
    "sampled": sampled,
    "mixed": mixed,
    "grammars": grammars,
    "texts": texts,
}
