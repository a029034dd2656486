"""Fault points: historical faults that `SGLANG_DEBUG_REVERT_PR` re-opens.

A test then proves for each that a check sees it.

A fault point wraps methods of the engine from outside: the instances that are built
while it is open carry the fault for as long as they live, and no other code knows of
it. All are memory-safe: nothing outside the engine's own buffers is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_canary.faults.catalogue import START_FAULTS
from sglang.faults.historical_faults import (
    Method,
    advance_positions,
    free_early,
    narrow_headroom,
    narrow_rows,
    prompt_tails,
    sampled_tails,
    short_lists,
    short_tables,
    small_buffer,
    with_tails,
)
from sglang.srt.arg_groups.draft_slots import decode_reserve
from sglang.srt.environ import envs
from sglang.srt.layers.attention.branch_lists import BranchLists
from sglang.srt.layers.attention.paged_backend import BranchDraftDecode
from sglang.srt.managers.worker.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ROW_HEADROOM
from sglang.srt.speculative.eagle_draft_phase import DraftPhase
from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker

if TYPE_CHECKING:
    from kv_canary.faults.fault import Fault
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A method that a fault point wraps.

    Fields:
        owner: its class.
        method: its name.
        wrap: given an instance (before its `__init__`) and its bound method, returns
            the method with the fault.
    """

    owner: type[Any]
    method: str
    wrap: Callable[[Any, Method], Method]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Scope in which the method of every new instance is wrapped."""
        init = self.owner.__init__

        def wrap_and_init(instance: Any, *args: Any, **kwargs: Any) -> None:
            wrapped = self.wrap(instance, getattr(instance, self.method))
            setattr(instance, self.method, wrapped)
            init(instance, *args, **kwargs)

        self.owner.__init__ = wrap_and_init
        try:
            yield
        finally:
            self.owner.__init__ = init


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A condition on resolved arguments, and its text for people."""

    text: str
    holds: Callable[[ServerArgs], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoint:
    """A historical fault that can be re-opened.

    Fields:
        name: in the catalogue, and the value of the variable that opens it.
        needs: conditions without which it changes nothing. All must hold; each may
            rely on those before it.
        seams: the methods it wraps.
    """

    name: str
    needs: tuple[Need, ...]
    seams: tuple[Seam, ...]

    @property
    def fault(self) -> Fault:
        return START_FAULTS[self.name]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further values of the variable that open it."""
        return self.fault.upstream

    def can_fire(self, server_args: ServerArgs) -> bool:
        """Whether it changes anything in this configuration."""
        return all(need.holds(server_args) for need in self.needs)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Scope in which everything that is built gets the fault."""
        with ExitStack() as stack:
            for seam in self.seams:
                stack.enter_context(seam.opened())
            yield


def open_fault_point(server_args: ServerArgs) -> AbstractContextManager[None]:
    """The fault point that `SGLANG_DEBUG_REVERT_PR` names, to be entered around the
    construction of a scheduler and its worker; nothing where the variable is not set.

    Raises:
        ValueError: the variable names no fault point, or one that cannot fire with
            these arguments.
    """
    variable = envs.SGLANG_DEBUG_REVERT_PR
    name = variable.get()
    if name in ("", "0"):
        return nullcontext()
    point = next(
        (p for p in FAULT_POINTS.values() if name in (p.name, *p.aliases)), None
    )
    if point is None:
        raise ValueError(
            f"{variable.name}={name!r} names no fault point; choose from "
            f"{', '.join(sorted(FAULT_POINTS))}, or unset it"
        )
    if not point.can_fire(server_args):
        needs = "; ".join(need.text for need in point.needs)
        raise ValueError(
            f"{variable.name}={name!r} cannot fire in this configuration, because it "
            f"needs all of: {needs}. Change the flags, or unset it"
        )
    logger.warning("%s=%s re-opens a fault: %s", variable.name, name, point.fault.what)
    return point.opened()


# -- where they fire -----------------------------------------------------------------

# Attention backends whose draft steps read index lists (`BranchLists`).
_INDEX_LIST_BACKENDS = ("flashinfer",)
_INDEX_LIST_FLAG = f"--attention-backend {' or '.join(_INDEX_LIST_BACKENDS)}"


def _has_chunks(args: ServerArgs) -> bool:
    assert args.chunked_prefill_size is not None
    return args.chunked_prefill_size > 0


def _has_company(args: ServerArgs) -> bool:
    # Unset, it is many on a GPU.
    return args.max_running_requests is None or args.max_running_requests > 1


def _reserves_more(args: ServerArgs) -> bool:
    assert args.page_size is not None
    return decode_reserve(args) + args.page_size - 1 > narrow_headroom(args)


def _has_trees(args: ServerArgs) -> bool:
    return args.tree_shape.topk > 1


def _has_index_lists(args: ServerArgs) -> bool:
    return args.attention_backend in _INDEX_LIST_BACKENDS


_SPECULATION = Need(
    text="--speculative-algorithm",
    holds=lambda args: args.speculative_algorithm is not None,
)
_NO_SPECULATION = Need(
    text="no --speculative-algorithm",
    holds=lambda args: args.speculative_algorithm is None,
)
_HEAD = Need(
    text="--speculative-algorithm EAGLE, EAGLE3 or NEXTN (a language model reads no "
    "next token)",
    holds=lambda args: args.draft_token_offset > 0,
)
_DECODE = Need(
    text="decode steps (no --disaggregation-mode prefill)",
    holds=lambda args: args.disaggregation_mode != "prefill",
)
_CANARY = Need(
    text="--kv-canary log, raise or heal", holds=lambda args: args.kv_canary != "none"
)
# The first level of a tree comes from the extend before.
_DRAFT_STEPS = Need(
    text="--speculative-num-steps 2 or more",
    holds=lambda args: args.tree_shape.num_steps > 1,
)
_TREES = Need(text="--speculative-eagle-topk 2 or more", holds=_has_trees)
_INDEX_LISTS = Need(text=_INDEX_LIST_FLAG, holds=_has_index_lists)
_LISTS_OR_TABLES = Need(
    text=f"{_TREES.text}, or {_INDEX_LIST_FLAG}",
    holds=lambda args: _has_trees(args) or _has_index_lists(args),
)
_CHUNKS = Need(text="--chunked-prefill-size above 0", holds=_has_chunks)
_RETRACTIONS = Need(
    text="--max-running-requests 2 or more (a single one is never retracted)",
    holds=_has_company,
)
_WIDE_RESERVE = Need(
    text="a decode reserve that, with a page, exceeds --speculative-num-draft-tokens "
    f"by more than {ROW_HEADROOM} (take a larger --page-size or a larger tree)",
    holds=_reserves_more,
)


# -- the fault points ----------------------------------------------------------------

EARLY_FREE = FaultPoint(
    name="EARLY_FREE",
    needs=(_CANARY, _NO_SPECULATION, _DECODE),
    seams=(
        Seam(owner=TpModelWorker, method="forward_batch_generation", wrap=free_early),
    ),
)
EARLY_POSITIONS = FaultPoint(
    name="25015",
    needs=(_SPECULATION, _DECODE, _DRAFT_STEPS),
    seams=(Seam(owner=DraftPhase, method="run_step", wrap=advance_positions),),
)
SAMPLED_TAIL = FaultPoint(
    name="26329",
    needs=(_SPECULATION, _HEAD, _CHUNKS),
    seams=(
        Seam(
            owner=EagleDraftWorker,
            method="_draft_extend_for_prefill",
            wrap=with_tails(sampled_tails),
        ),
    ),
)
NARROW_ROWS = FaultPoint(
    name="26972",
    needs=(_SPECULATION, _DECODE, _WIDE_RESERVE),
    seams=(Seam(owner=ModelRunner, method="row_width", wrap=narrow_rows),),
)
SMALL_INDEX_BUFFER = FaultPoint(
    name="27338",
    needs=(_SPECULATION, _DECODE, _DRAFT_STEPS, _TREES, _INDEX_LISTS),
    seams=(Seam(owner=BranchLists, method="declare", wrap=small_buffer),),
)
SHORT_BRANCH_TABLE = FaultPoint(
    name="27360",
    needs=(_SPECULATION, _DECODE, _DRAFT_STEPS, _LISTS_OR_TABLES),
    seams=(
        Seam(owner=BranchLists, method="fill", wrap=short_lists),
        Seam(owner=BranchDraftDecode, method="prepare", wrap=short_tables),
    ),
)
PROMPT_TAIL = FaultPoint(
    name="28254",
    needs=(_SPECULATION, _HEAD, _DECODE, _CHUNKS, _RETRACTIONS),
    seams=(
        Seam(
            owner=EagleDraftWorker,
            method="_draft_extend_for_prefill",
            wrap=with_tails(prompt_tails),
        ),
    ),
)

FAULT_POINTS: Mapping[str, FaultPoint] = {
    point.name: point
    for point in (
        EARLY_FREE,
        EARLY_POSITIONS,
        SAMPLED_TAIL,
        NARROW_ROWS,
        SMALL_INDEX_BUFFER,
        SHORT_BRANCH_TABLE,
        PROMPT_TAIL,
    )
}
