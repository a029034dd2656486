"""Faults under `KV_CANARY=heal`: named, and no answer shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_canary.faults.vllm.host import VllmHost
    from kv_canary.faults.vllm.planters import Outcome


STAYS = ("block of another tenant",)
"""Faults that meet a request again however often it is computed."""


def run_healed(
    run_one: Callable[[VllmHost, str, int], Outcome],
    host: VllmHost,
    name: str,
    seed: int,
) -> Outcome:
    """Plant a fault with `run_one`. It only counts as named if all requests get the
    answers that they get without it, or end with an error where the fault stays."""
    before = len(host.asked)
    outcome = run_one(host, name, seed)
    host.drain()
    asked = list(host.asked.items())[before:]
    host.reset()
    wrong = []
    for number, one in asked:
        again = host.add(one.tokens, new_tokens=one.new_tokens, salt=one.salt)
        host.drain()
        is_ended = number in host.errors and name in STAYS
        if host.outputs[again] != host.outputs[number] and not is_ended:
            wrong.append(
                f"request {number} gets another answer: healed "
                f"{host.outputs[number]}, without the fault "
                f"{host.outputs[again]}"
            )
    if not wrong:
        return outcome
    return dataclasses.replace(outcome, named=False, lines=[*wrong, *outcome.lines])
