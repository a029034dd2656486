"""Plants faults while the engine runs: by chance from the environment, or on demand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sglang.faults.pools.planters import PLANTERS
from sglang.faults.pools.scene import Damage, Moves, Scene, When
from sglang.faults.settings import FULL, NEXT_TOKEN_SWAP

if TYPE_CHECKING:
    from sglang.faults.settings import PerturbSettings
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

SEED = 20_260_101


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedFault:
    """A planted fault, and the first forward (by `CanaryState.clock`) to notice it."""

    name: str
    clock: int
    damage: Damage


@dataclass(frozen=True, kw_only=True)
class Armed:
    """A fault that was asked for before forward number `clock`."""

    name: str
    seed: int
    group: str | None
    clock: int


@dataclass(frozen=True, kw_only=True)
class SavedPerturb:
    """State of a driver between two steps; `rng` of `random.Random.getstate`.
    `num_asked` counts the faults asked for so far; `armed` are those not planted yet.
    """

    group: str
    num_forwards: int
    num_asked: int
    armed: list[str]
    rng: tuple[int, list[int], float | None]


class PerturbDriver:
    """Plants faults that the environment or a test asks for.

    Args:
        settings: what to plant by chance.
        cache: the prefix cache whose slots some faults damage, if there is one.
        model: the target's, whose layers some faults wrap, if it is known.

    Attributes:
        is_draft: whether it damages a draft's pool.
        group: of the slots that it damages.
        is_idle: nothing will be planted and nothing is to be repaired, so that
            `before_forward`, `before_step` and `after_forward` need no call.
        planted: what was planted so far; asked: what `arm` was called with.
    """

    def __init__(
        self,
        target: CanaryTarget,
        *,
        settings: PerturbSettings,
        cache: BasePrefixCache | None,
        model: nn.Module | None = None,
    ) -> None:
        self._target = target
        self._model = model
        self._settings = settings
        self._cache = cache
        self.is_draft = target.is_draft
        self.group = settings.group if target.group(settings.group) else FULL
        self._rng = random.Random(SEED)
        self._forwards = 0
        self._armed: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_step: list[Callable[[], None]] = []
        self._launched: ForwardBatch | None = None
        self._previous: ForwardBatch | None = None
        self.planted: list[ArmedFault] = []
        self.asked: list[Armed] = []
        self._chances = dict(settings.chances)
        self._swap_chance = self._chances.pop(NEXT_TOKEN_SWAP, 0.0)
        self._has_chances = bool(settings.chances)
        self.is_idle = not self._has_chances

    def arm(self, name: str, *, seed: int, group: str | None = None) -> None:
        """Plant one fault at the first forward that offers an opportunity, in `group`
        from now on, if it is given.

        Raises:
            ValueError: no injector has this name, or it needs the token oracle.
        """
        self.group = group or self.group
        known = PLANTERS[self.group]
        if name == NEXT_TOKEN_SWAP:
            if not self._target.config.use_token_oracle:
                raise ValueError(
                    f"{name} swaps tokens of the token oracle, which is off"
                )
        elif name not in known:
            raise ValueError(
                f"no fault of group {self.group} is called {name!r}; choose from "
                f"{', '.join(known)}"
            )
        self._rng = random.Random(seed)
        self._armed.append(name)
        clock = int(self._target.buffers.state.clock.item())
        self.asked.append(Armed(name=name, seed=seed, group=group, clock=clock))
        self.is_idle = False
        if self._waits_for_move(name):
            self._watch_moves()

    def before_forward(self, forward_batch: ForwardBatch) -> None:
        """Plant what is due before a launch, outside any graph."""
        self._previous, self._launched = self._launched, forward_batch
        self._plant(forward_batch, When.BEFORE_FORWARD)

    def before_step(
        self, forward_batch: ForwardBatch, *, step: int, backend: AttentionBackend
    ) -> None:
        """Plant what is due before a model forward that no graph runs."""
        if self._undo_step:
            self._repair(self._undo_step)
        if self._armed:
            self._plant(forward_batch, When.BEFORE_STEP, step=step, backend=backend)

    def after_forward(self, forward_batch: ForwardBatch) -> None:
        """Repair what the engine itself relies on, then damage what was written."""
        if self._undo_step or self._undo:
            self._repair(self._undo_step)
            self._repair(self._undo)
        self._plant(forward_batch, When.AFTER_FORWARD)
        self._forwards += 1
        self.is_idle = not (
            self._has_chances or self._armed or self._undo or self._undo_step
        )

    def save(self) -> SavedPerturb:
        """Return the state between two steps, for `load`."""
        version, words, gauss = self._rng.getstate()
        return SavedPerturb(
            group=self.group,
            num_forwards=self._forwards,
            num_asked=len(self.asked),
            armed=list(self._armed),
            rng=(version, list(words), gauss),
        )

    def load(self, saved: SavedPerturb) -> None:
        """Go on from a saved state."""
        version, words, gauss = saved.rng
        self._rng.setstate((version, tuple(words), gauss))
        self.group = saved.group
        self._forwards = saved.num_forwards
        self._armed = list(saved.armed)
        self.is_idle = not (self._has_chances or self._armed)
        if any(self._waits_for_move(name) for name in self._armed):
            self._watch_moves()

    def _waits_for_move(self, name: str) -> bool:
        planter = PLANTERS[self.group].get(name)
        return planter is not None and planter.when is When.ON_MOVE

    def _watch_moves(self) -> None:
        """Wrap the pool's `move_kv_cache` until nothing waits for a move any more."""
        pool: Any = self._target.kv_pool
        state, move = self._target.buffers.state, type(pool).move_kv_cache

        def watched(dst: Tensor, src: Tensor) -> None:
            head, tail = state.head.clone(), state.tail.clone()
            move(pool, dst, src)
            if self._launched is not None:
                moves = Moves(dst=dst, src=src, head=head, tail=tail)
                self._plant(self._launched, When.ON_MOVE, moves=moves)
            if not any(self._waits_for_move(name) for name in self._armed):
                del pool.move_kv_cache

        pool.move_kv_cache = watched

    @staticmethod
    def _repair(undo: list[Callable[[], None]]) -> None:
        while undo:
            undo.pop()()

    def swapped(
        self, tokens: Tensor, *, rows: Tensor, serials: Tensor, ends: Tensor
    ) -> Tensor:
        """Return `tokens` [R] or [R, ...]; two requests' are swapped if that is due.

        Args:
            rows, serials: of the requests; ends: positions of their first tokens.
        """
        chance = self._swap_chance
        is_armed = NEXT_TOKEN_SWAP in self._armed
        if not chance and not is_armed:
            return tokens
        if len(tokens) < 2 or not (is_armed or self._is_due(chance)):
            return tokens
        first, second = self._rng.sample(range(len(tokens)), 2)
        if int(tokens[first].view(-1)[0]) == int(tokens[second].view(-1)[0]):
            return tokens
        if is_armed:
            self._armed.remove(NEXT_TOKEN_SWAP)
        order = list(range(len(tokens)))
        order[first], order[second] = second, first
        damage = Damage(
            req_row=int(rows[first]),
            serial=int(serials[first]),
            position=int(ends[first]),
            other=(int(serials[second]), int(ends[second])),
        )
        self._note(NEXT_TOKEN_SWAP, damage, self._undo)
        return tokens[order]

    def _is_due(self, chance: float) -> bool:
        is_warm = self._forwards >= self._settings.warmup_steps
        return is_warm and self._rng.random() < chance

    def _plant(
        self,
        forward_batch: ForwardBatch,
        when: When,
        *,
        step: int = -1,
        backend: AttentionBackend | None = None,
        moves: Moves | None = None,
    ) -> None:
        if not self._chances and not self._armed:
            return
        scene = Scene(
            target=self._target,
            forward_batch=forward_batch,
            cache=self._cache,
            previous=self._previous,
            model=self._model,
            group=self.group,
            rng=self._rng,
            step=step,
            backend=backend,
            moves=moves,
        )
        undo = self._undo_step if when is When.BEFORE_STEP else self._undo
        for name in list(self._armed):
            planter = PLANTERS[self.group].get(name)
            if planter is not None and planter.when is when:
                damage = planter.apply(scene)
                if damage is not None:
                    self._armed.remove(name)
                    self._note(name, damage, undo)
        for name, chance in self._chances.items():
            planter = PLANTERS[self.group][name]
            if planter.when is when and self._is_due(chance):
                damage = planter.apply(scene)
                if damage is not None:
                    self._note(name, damage, undo)

    def _note(self, name: str, damage: Damage, undo: list[Callable[[], None]]) -> None:
        clock = int(self._target.buffers.state.clock.item())
        self.planted.append(ArmedFault(name=name, clock=clock, damage=damage))
        if damage.undo is not None:
            undo.append(damage.undo)
