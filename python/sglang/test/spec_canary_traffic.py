"""Runs a speculating engine until a planted fault is reported.

Keeps its own record of the slots that every forward of both pools reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kv_canary.reporter import CanaryViolation
from sglang.faults.driver import ArmedFault
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.kv_canary.perturb import PerturbDriver, drivers_of
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.harness import EngineHarness, Finished
from sglang.test.tiny_models import write_mock_draft, write_mock_model

if TYPE_CHECKING:
    from sglang.srt.draft_trees.workspace import EagleWorkspace

VOCAB = 1000
CONTEXT = 512
WARM_STEPS = 8
MAX_STEPS = 300
SHORTEST_PROMPT = 30
POOLS = ("target", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRow:
    """A row of a forward according to the host's records.

    slots[:prefix_len] are read, the others written (by the tree's nodes in order in a
    verification). copies: for a branch, the sources of copied slots that it reads, by
    position.
    """

    rid: str | None
    req_row: int
    prefix_len: int
    slots: list[int]
    copies: dict[int, int] = field(default_factory=dict)

    def reads(self, slot: int) -> bool:
        """Whether it reads a slot, or a copy of it."""
        return slot in self.slots[: self.prefix_len] or slot in self.copies.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecForward:
    """One forward of a pool.

    Fields:
        clock: its number in its pool.
        step: its step in a draft phase, or None.
    """

    clock: int
    step: int | None
    mode: ForwardMode
    rows: list[SpecRow]

    def reads(self, slot: int) -> bool:
        return any(row.reads(slot) for row in self.rows)


@dataclass(kw_only=True)
class PoolLog:
    """Records the forwards of one pool before anything is planted in them."""

    manager: CanaryManager
    workspace: EagleWorkspace | None
    forwards: list[SpecForward] = field(default_factory=list)
    rids: dict[int, str] = field(default_factory=dict)

    def note(self, batch: ForwardBatch) -> None:
        is_step = self.workspace is not None and batch.forward_mode.is_decode
        parts = zip(
            batch.req_pool_indices.tolist(),
            batch.req_serial.tolist(),
            batch.prefix_lens.tolist(),
            batch.extend_lens.tolist(),
            strict=True,
        )
        step = self._step() if is_step else None
        rows = []
        for i, (row, serial, prefix, extend) in enumerate(parts):
            rid = self.manager.serials.rid(serial) if row else None
            if rid is not None:
                self.rids[serial] = rid
            columns = list(range(prefix + extend))
            if step is not None:
                columns = self._branch_columns(i, prefix - step, prefix + extend)
            # Including the columns of the draft region.
            whole = self.manager.target.req_to_token_pool.req_to_token[row].tolist()
            rows.append(
                SpecRow(
                    rid=rid,
                    req_row=row,
                    prefix_len=prefix,
                    slots=[whole[column] for column in columns],
                    copies={
                        position: whole[position]
                        for position in range(prefix - (step or 0))
                        if columns[position] != position
                    },
                )
            )
        self.forwards.append(
            SpecForward(
                clock=int(self.manager.target.buffers.state.clock),
                step=step,
                mode=batch.forward_mode,
                rows=rows,
            )
        )

    def _step(self) -> int:
        """Return the number of this draft step; steps are consecutive."""
        before = self.forwards[-1] if self.forwards else None
        assert self.workspace is not None
        if before is None or before.step is None:
            return 0
        return (before.step + 1) % max(self.workspace.layout.num_steps - 1, 1)

    def _branch_columns(self, row: int, seq_len: int, end: int) -> list[int]:
        assert self.workspace is not None
        layout = self.workspace.layout
        own, topk = layout.base(seq_len), layout.topk
        branches = [row % topk] * (end - own)
        if layout.is_exact:
            # The candidates that its ancestors were, from the newest step upwards.
            followed = self.workspace.rows(row // topk + 1).levels.parents[-1].tolist()
            for step in range(end - own - 1, 0, -1):
                candidate = followed[1 + topk * step + branches[step]]
                parent = (candidate - topk - topk**2 * (step - 1)) // topk
                branches[step - 1] = parent
        shifts = [layout.branch_shift(seq_len, branch) for branch in branches]
        return [*range(own), *(e + s for e, s in enumerate(shifts, start=own))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOutcome:
    """A run that ended in a report.

    Fields:
        planted: the fault, in `pool`.
        violations: violations of the incident that stopped the engine, as JSON objects.
        text: error text of mode `raise`.
        logs: logs by pool. asked, said: prompts, and output that clients had received.
        last_messages: number of messages that the last step sent to clients.
    """

    pool: str
    planted: ArmedFault
    violations: list[dict[str, Any]]
    text: str
    logs: dict[str, PoolLog]
    asked: dict[str, list[int]]
    said: dict[str, Finished]
    last_messages: int

    def since_planted(self) -> list[SpecForward]:
        forwards = self.logs[self.pool].forwards
        return [f for f in forwards if f.clock >= self.planted.clock]

    def forward(self, clock: int) -> SpecForward:
        return next(f for f in self.logs[self.pool].forwards if f.clock == clock)

    def victim(self, serial: int) -> str | None:
        return self.logs[self.pool].rids.get(serial)


def worker_of(harness: EngineHarness) -> EAGLEWorkerV2:
    worker = harness.scheduler.worker
    assert isinstance(worker, EAGLEWorkerV2)
    return worker


def write_mock_models(
    folder: Path,
    *,
    kind: str = "EAGLE",
    source: str | None = "hidden",
    **target: Any,
) -> dict[str, Path]:
    """Write a mock target with further fields `target`, and its draft of this kind,
    whose proposals come from `source`.
    """
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    return {
        "model": write_mock_model(folder / "target", **sizes, **target),
        "draft": write_mock_draft(folder / "draft", kind=kind, source=source, **sizes),
    }


def canaries_of(harness: EngineHarness) -> dict[str, CanaryManager]:
    managers = worker_of(harness).canary_managers()
    return dict(zip(POOLS, managers, strict=True))


def faults_of(harness: EngineHarness) -> dict[str, PerturbDriver]:
    """Return the drivers that plant faults, by pool. Call this before `logged`, which
    records a forward before anything is planted in it.
    """
    return dict(zip(POOLS, drivers_of(harness.scheduler), strict=True))


@contextmanager
def logged(harness: EngineHarness) -> Iterator[dict[str, PoolLog]]:
    """Log the forwards of each pool within the context; eager forwards only."""
    workspace = worker_of(harness).draft_worker.workspace
    logs: dict[str, PoolLog] = {}
    with ExitStack() as stack:
        for pool, manager in canaries_of(harness).items():
            log = PoolLog(
                manager=manager, workspace=workspace if pool == "draft" else None
            )
            logs[pool] = log
            before: Callable[..., None] = manager.pre_ops_maybe_inside_graph

            def noted(
                batch: ForwardBatch,
                log: PoolLog = log,
                before: Callable[..., None] = before,
                **options: bool,
            ) -> None:
                log.note(batch)
                before(batch, **options)

            stack.enter_context(
                patch.object(manager, "pre_ops_maybe_inside_graph", noted)
            )
        yield logs


def speculating(
    model: Path, draft: Path, *, tree: tuple[int, int, int], **server_args: Any
) -> EngineHarness:
    """Create an engine that drafts trees of (topk, steps, nodes)."""
    topk, steps, nodes = tree
    defaults: dict[str, Any] = {
        "speculative_algorithm": "EAGLE",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "partial",
    }
    return EngineHarness(
        model,
        speculative_draft_model_path=str(draft),
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=nodes,
        **(defaults | server_args),
    )


def longer_for(page_size: int) -> int:
    """Return the tokens to add to every prompt so that prefixes have whole pages to
    share.
    """
    return page_size if page_size > SHORTEST_PROMPT else 0


class SpecTraffic:
    """Requests with partly shared prefixes, a new one in every third step.

    The first ones and half of the others run until the end of a test.

    Args:
        longer_by: number of tokens added to every prompt.
    """

    def __init__(
        self, harness: EngineHarness, *, seed: int, longer_by: int = 0
    ) -> None:
        self._harness = harness
        self._rng = random.Random(seed)
        self._shared = self._tokens(32)
        self._shortest = SHORTEST_PROMPT + longer_by
        self.asked: dict[str, list[int]] = {}

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(length)]

    def on_step(self, step: int) -> None:
        if step % 3:
            return
        rng, i = self._rng, len(self.asked)
        earlier: Sequence[list[int]] = list(self.asked.values())
        head = self._shared if i % 3 == 0 else []
        ids = head + self._tokens(self._shortest + rng.randrange(6))
        if i % 4 == 3:
            ids = rng.choice(earlier) + ids[:3]
        # Requests that run when a fault is planted continue, and read it.
        is_long = i % 2 == 0 or i <= WARM_STEPS
        length = rng.randrange(200, 240) if is_long else rng.randrange(8, 30)
        rid = self._harness.submit(
            ids, rid=f"q{i}", stream=True, max_new_tokens=length, ignore_eos=True
        )
        self.asked[rid] = ids


def plant_in(
    pool: str,
    name: str,
    *,
    seed: int,
    model: Path,
    draft: Path,
    tree: tuple[int, int, int],
    page_size: int = 1,
    group: str | None = None,
    **server_args: Any,
) -> SpecOutcome:
    """Serve mock requests in mode `raise`, plant the fault in a group of the pool, run
    to the report.
    """
    harness = speculating(model, draft, tree=tree, page_size=page_size, **server_args)
    manager, faults = canaries_of(harness)[pool], faults_of(harness)[pool]
    traffic = SpecTraffic(harness, seed=seed, longer_by=longer_for(page_size))

    def run() -> tuple[str, int]:
        for step in range(MAX_STEPS):
            traffic.on_step(step)
            if step == WARM_STEPS:
                faults.arm(name, seed=seed, group=group)
            messages = len(harness.io.responses)
            try:
                harness.scheduler.step()
            except CanaryViolation as error:
                return str(error), len(harness.io.responses) - messages
        planted = faults.planted
        raise AssertionError(f"{name}, seed {seed}: not reported; planted {planted}")

    with logged(harness) as logs:
        text, last_messages = run()
    assert len(faults.planted) == 1, faults.planted
    incident = manager.reporter.incidents[-1]
    return SpecOutcome(
        pool=pool,
        planted=faults.planted[0],
        violations=incident["violations"],
        text=text,
        logs=logs,
        asked=traffic.asked,
        said=harness.collect(),
        last_messages=last_messages,
    )
