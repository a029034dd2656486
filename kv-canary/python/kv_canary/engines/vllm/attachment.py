"""The canary of one runner, and the parts common to both generations of runners."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.engines.engine_canary import EngineCanary
from kv_canary.engines.hooks import Refusal
from kv_canary.engines.metrics import serve_metrics
from kv_canary.engines.reporting import unless_refused
from kv_canary.engines.settings import Mode
from kv_canary.engines.vllm.connectors import compare_loads
from kv_canary.engines.vllm.healing import AskedBack, with_damage
from kv_canary.engines.vllm.layers import compare_in_pass
from kv_canary.engines.vllm.limits import judges_ahead, refused_by
from kv_canary.engines.vllm.pool import draft_groups, draft_layers, read_groups
from kv_canary.engines.vllm.states import read_states
from kv_canary.engines.vllm.steps import read_step
from kv_canary.engines.vllm.turned_back import NewRequests

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings
    from kv_canary.engines.state_canary import StateCanary
    from kv_canary.engines.step import ForwardReads
    from kv_canary.engines.vllm.connectors import WorkerLoads
    from kv_canary.runtime.pending import Pending

logger = logging.getLogger(__name__)

ATTRIBUTE = "kv_canary"
IN_PASS = "as attention reads them"
# Preempted requests keep their row until they come back.
_ROWS_PER_SEQUENCE = 2


class Attachment:
    """Connects a runner and its canary.

    Attributes:
        canary: canary of the runner.
        settings: what it was made from. since: Unix time of that.
        is_in_step: whether the forward that runs is the scheduler's, not a dummy.
        num_tokens: new tokens of the step.
        loads: what the connector loads, if there is one.
        reads_later: a forward that is to be checked when its blocks are loaded, or its
            states were copied.
        new_requests: see `turned_back.py`.
    """

    def __init__(
        self, canary: EngineCanary, settings: Settings, loads: WorkerLoads | None
    ) -> None:
        self.canary = canary
        self.settings = settings
        self.since = time.time()
        self.is_in_step = False
        self.num_tokens = 0
        self.loads = loads
        self.reads_later: ForwardReads | None = None
        self.new_requests = NewRequests()
        self._asked_back = AskedBack()
        self._has_checked = False

    def begin(self, scheduler_output: Any) -> None:
        """Run before the runner processes a step."""
        self._has_checked = False
        self.is_in_step = True
        self.num_tokens = scheduler_output.total_num_scheduled_tokens
        self.canary.plan(read_step(scheduler_output, self.canary.ledger))
        self._asked_back.hear(scheduler_output, self.canary.steps)

    def check(self, reads: ForwardReads) -> None:
        """Run before the forward of the step."""
        self.canary.before(reads)
        self._has_checked = True

    def check_later(self, **found: Any) -> None:
        """Check the forward of `reads_later`, if any.

        Args:
            found: further fields of `ForwardReads`.
        """
        reads, self.reads_later = self.reads_later, None
        if reads is not None:
            self.check(dataclasses.replace(reads, **found))

    def end(self) -> None:
        """Run after the model, or when no forward was due."""
        self.is_in_step = False
        if self._has_checked:
            self.canary.after()
        else:
            self.canary.finish()

    def pass_on(self, output: Any) -> Any:
        """Pass on the output of a step. A strict mode holds it back until all findings
        of its forward have arrived; `heal` adds which requests met damage.

        Raises:
            CanaryViolation: in mode `raise`.
        """
        pending = self.canary.take_pending()
        now = (self.canary.steps, self.canary.forwards)
        later = getattr(output, "get_output", None)
        if later is None:
            return self._noted(output, pending, *now)

        def get_output(*args: Any, **kwargs: Any) -> Any:
            return self._noted(later(*args, **kwargs), pending, *now)

        output.get_output = get_output
        return output

    def _noted(
        self, output: Any, pending: Sequence[Pending], step: int, forward: int
    ) -> Any:
        # In a thread of vLLM's for outputs; the records are tensors of inference mode.
        with torch.inference_mode():
            for findings in pending:
                self.canary.collect(findings)
        damaged = self.canary.damage.take(forward)
        if damaged is not None:
            output = with_damage(output, damaged)
            # Later steps may have them as new ones already.
            same = [rid for rid in damaged if self.canary.is_since(rid, step)]
            self.canary.damage.ask(same)
            self._asked_back.ask(same, step)
        tokens = getattr(output, "sampled_token_ids", None)
        if tokens:
            for rid, of_request in zip(output.req_ids, tokens, strict=False):
                self.canary.note_tokens(rid, of_request, step=step)
        return output


def get_attachment(runner: Any) -> Attachment | None:
    """The attachment of a runner, or None if it is not checked."""
    found: Attachment | None = getattr(runner, ATTRIBUTE, None)
    return found


def attach(runner: Any, settings: Settings) -> None:
    """Attach a canary to a runner whose KV cache was just initialised.

    Raises:
        Refusal: in a strict mode, if something cannot be checked. In mode `log` the
            error is logged, and the runner continues unchecked.
    """
    setattr(runner, ATTRIBUTE, None)
    attachment = unless_refused(lambda: _create(runner, settings), settings)
    if attachment is None:
        return
    setattr(runner, ATTRIBUTE, attachment)
    canary = attachment.canary
    why_before = compare_in_pass(runner, canary)
    where = f"before each forward: {why_before}" if why_before else IN_PASS
    drafts = draft_layers(runner)
    if drafts:
        logger.warning(
            "kv_canary: %d layers of the draft's model are not compared: %s",
            len(drafts),
            ", ".join(sorted(drafts)[:3]),
        )
    compared = "" if settings.real_data == "none" else f", compared {where}"
    for group in canary.groups:
        logger.warning(
            "kv_canary: checks group %r: %d layers, %d blocks of %d slots (mode %s, "
            "real data %s%s)",
            group.group.name,
            len(group.group.layers),
            group.group.num_blocks,
            group.group.page_size,
            settings.mode.value,
            settings.real_data,
            compared,
        )
    if canary.states is not None:
        _log_states(canary.states, settings)


def _log_states(states: StateCanary, settings: Settings) -> None:
    parts, pool = states.parts, states.pool
    compared = (
        ""
        if parts is None
        else (
            f", compared before each forward: {parts.run_bytes} of {parts.slot_bytes} "
            "bytes of a state in a decode"
        )
    )
    logger.warning(
        "kv_canary: checks group %r: %d layers, %d blocks of one state each (mode %s, "
        "real data %s%s)",
        pool.name,
        sum(len(group.layers) for group in pool.groups),
        pool.num_blocks,
        settings.mode.value,
        settings.real_data,
        compared,
    )


def sample_tokens(
    method: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap a runner's method of this name, which may return nothing."""
    output = method(runner, *args, **kwargs)
    attachment = get_attachment(runner)
    if attachment is None or output is None:
        return output
    return attachment.pass_on(output)


def _create(runner: Any, settings: Settings) -> Attachment:
    config = runner.vllm_config
    refused = refused_by(config, heals=settings.mode is Mode.HEAL)
    if refused:
        raise Refusal("; ".join(refused))
    rank = config.parallel_config.rank
    with torch.inference_mode():
        groups, states = read_groups(runner), read_states(runner)
        if not groups:
            raise Refusal("looked for KV cache groups, found none: no attention layers")
        try:
            canary = EngineCanary(
                groups,
                settings,
                num_rows=_ROWS_PER_SEQUENCE * config.scheduler_config.max_num_seqs,
                max_len=config.model_config.max_model_len,
                is_cached=bool(config.cache_config.enable_prefix_caching),
                rank=rank,
                states=states,
                unchecked=draft_groups(runner),
                judges_ahead=judges_ahead(config),
            )
        except ValueError as error:
            raise Refusal(str(error)) from None
        canary.warm_up()
        loads = compare_loads(runner, canary, settings)
    serve_metrics(canary, settings, rank=rank)
    return Attachment(canary, settings, loads)
