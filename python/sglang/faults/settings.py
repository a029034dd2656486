"""What `SGLANG_KV_CANARY_PERTURB_*` asks to be planted by chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_canary.faults.catalogue import planted_in
from kv_canary.faults.fault import Planted
from kv_canary.violation import GROUPS
from sglang.srt.environ import EnvVar, envs
from sglang.srt.kv_canary.config import at_least, refuse_while_off

if TYPE_CHECKING:
    from sglang.srt.kv_canary.config import CanaryConfig
    from sglang.srt.server_args import ServerArgs

FULL, SWA, _, STATE = GROUPS
# A model without window slots has only one group, whatever its name.
DAMAGED_GROUPS = (FULL, SWA)

NEXT_TOKEN_SWAP = "next_token_swap"
REAL_KV_UNUSED_CACHE = "real_kv_unused_cache"
VARIABLES: Mapping[str, EnvVar[float]] = {
    name: getattr(envs, fault.variable)
    for name, fault in planted_in(Planted.POOL, Planted.SAMPLING).items()
    if fault.variable
}
"""The faults that can be planted by chance, and the variable of each chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbSettings:
    """What is planted by chance.

    Fields:
        chances: per forward, by the fault's name, each above 0.
        group: the group of slots that is damaged.
        warmup_steps: forwards before the first fault.
    """

    chances: Mapping[str, float] = field(default_factory=dict)
    warmup_steps: int = 50
    group: str = FULL

    @classmethod
    def from_environment(
        cls, server_args: ServerArgs, config: CanaryConfig
    ) -> PerturbSettings:
        """Read the variables.

        Raises:
            ValueError: a variable has an impossible value, or no effect with these
                flags; names the variable, the value and the fix.
        """
        group = envs.SGLANG_KV_CANARY_PERTURB_TARGET_GROUP
        if group.get() not in DAMAGED_GROUPS:
            raise ValueError(
                f"{group.name}={group.get()!r} must be one of "
                f"{', '.join(DAMAGED_GROUPS)}"
            )
        chances = {name: _probability(one) for name, one in VARIABLES.items()}
        settings = cls(
            chances={name: chance for name, chance in chances.items() if chance > 0},
            warmup_steps=at_least(envs.SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS, 0),
            group=group.get(),
        )
        settings._refuse_conflicts(server_args, config)
        return settings

    def _refuse_conflicts(self, server_args: ServerArgs, config: CanaryConfig) -> None:
        if self.chances and not config.is_on:
            refuse_while_off("SGLANG_KV_CANARY_PERTURB_*_PROB")
        if NEXT_TOKEN_SWAP in self.chances and not config.check_write_inputs:
            raise ValueError(
                f"{VARIABLES[NEXT_TOKEN_SWAP].name} swaps tokens that only the token "
                "oracle can tell apart; set "
                "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT=1 too"
            )
        if REAL_KV_UNUSED_CACHE in self.chances and server_args.disable_radix_cache:
            raise ValueError(
                f"{VARIABLES[REAL_KV_UNUSED_CACHE].name} damages the prefix cache, "
                "which --disable-radix-cache turns off; unset one of them"
            )


def _probability(variable: EnvVar[float]) -> float:
    value = variable.get()
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{variable.name}={value} must lie between 0 and 1")
    return value
