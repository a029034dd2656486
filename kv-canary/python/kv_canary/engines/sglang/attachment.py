"""The canaries of SGLang's runners, and the wrappers that lead to them.

A canary is an attribute of the objects that it watches: the runner, its pool, its
allocator, its table, its model. Objects without one are left alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kv_canary.engines.hooks import Hook, Refusal, problem_with, wrap
from kv_canary.engines.metrics import serve_metrics
from kv_canary.engines.reporting import unless_refused
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.sglang import hooks_of
from kv_canary.engines.sglang.batch import IDLE, PREFILL, mode_of
from kv_canary.engines.sglang.draft import extend_after, unseen_because
from kv_canary.engines.sglang.limits import refused_by
from kv_canary.engines.sglang.pool import read_pool
from kv_canary.engines.sglang.runner_canary import Pending, RunnerCanary

logger = logging.getLogger(__name__)

Method = Callable[..., Any]
_ATTRIBUTE = "_kv_canary"
_PENDING = "_kv_canary_pending"
_IS_TOLD = "_kv_canary_is_told"


class Held(NamedTuple):
    """Findings that must be collected before a result may leave; kept with it."""

    canary: RunnerCanary
    pending: list[Pending]


def canary_of(watched: Any) -> RunnerCanary | None:
    """The canary that watches an object of SGLang."""
    found: RunnerCanary | None = getattr(watched, _ATTRIBUTE, None)
    return found


def wrap_engine(settings: Settings) -> list[Callable[[], None]]:
    """Wrap all methods; returns what undoes it."""

    def alloc_pool(method: Method, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(runner, *args, **kwargs)
        attach(runner, settings)
        return result

    def forward(
        method: Method, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        canary = canary_of(runner)
        if runner.is_draft_worker:
            call = functools.partial(method, runner, forward_batch, *args, **kwargs)
            is_checked = mode_of(forward_batch) == PREFILL
            return checked(canary if is_checked else None, forward_batch, call)
        if canary is None:
            _require_attached(runner, settings)
            return method(runner, forward_batch, *args, **kwargs)
        canary.begin(forward_batch)
        result = method(runner, forward_batch, *args, **kwargs)
        canary.end()
        return result

    around: list[tuple[Hook, Method]] = [
        (hooks_of.POOL.found(), alloc_pool),
        (hooks_of.FORWARD, forward),
        (hooks_of.SAMPLE, _sample),
        (hooks_of.EXTEND, _prepare_for_extend),
        (hooks_of.RUN_BATCH, _run_batch),
        (hooks_of.RESULT, _process_batch_result),
        *((hook, _free) for hook in hooks_of.FREES),
        *((hook, _clear) for hook in hooks_of.CLEARS),
        *((hook, _move) for hook in hooks_of.MOVES),
    ]
    if hooks_of.is_there(hooks_of.FREE_SEGMENT):
        around.append((hooks_of.FREE_SEGMENT, _free))
    if problem_with(hooks_of.DRAFT_EXTEND) is None:
        around.append((hooks_of.DRAFT_EXTEND, _draft_extend))
    return [wrap(hook, wrapper) for hook, wrapper in around]


def attach(runner: Any, settings: Settings) -> None:
    """Attach a canary to a runner whose pools were just made.

    Raises:
        Refusal: mode `raise`, and something cannot be checked. In mode `log` the error
            is logged, and the runner goes on unchecked.
    """
    if runner.is_draft_worker:
        attach_draft(runner, settings)
        return
    canary = unless_refused(lambda: _create(runner, settings), settings)
    if canary is None:
        return
    watched = (
        runner,
        runner.req_to_token_pool,
        runner.token_to_kv_pool_allocator,
        runner.token_to_kv_pool,
    )
    for part in watched:
        setattr(part, _ATTRIBUTE, canary)
    _wrap_model(runner.model, canary)
    _tell(canary, "", settings)


def attach_draft(runner: Any, settings: Settings) -> None:
    """Attach a canary to the pool of a draft model, or say why not: a target verifies
    what its draft model says, so that no answer depends on that pool."""
    target = canary_of(runner.req_to_token_pool)
    because = "its target is not" if target is None else None
    because = because or unseen_because(runner.server_args)
    if because is None and target is not None:
        try:
            canary = _create(runner, settings, target)
        except Refusal as refusal:
            because = str(refusal)
        else:
            target.draft, target.registry.has_draft = canary, True
            for part in (runner, runner.token_to_kv_pool):
                setattr(part, _ATTRIBUTE, canary)
            _tell(canary, " of the draft model", settings)
    if because is not None:
        logger.warning(
            "kv_canary: the pool of the draft model is not checked (%s); the trees "
            "that the target verifies are",
            because,
        )


def _tell(canary: RunnerCanary, whose: str, settings: Settings) -> None:
    pool = canary.canary.pool
    logger.warning(
        "kv_canary: checks group %r%s: %d layers, %d slots in pages of %d (mode %s, "
        "real data %s)",
        pool.group,
        whose,
        pool.num_layers,
        pool.num_slots,
        pool.page_size,
        settings.mode.value,
        settings.real_data,
    )


def _create(
    runner: Any, settings: Settings, target: RunnerCanary | None = None
) -> RunnerCanary:
    args = runner.server_args
    refused = refused_by(args)
    if getattr(runner, "is_multimodal", False):
        refused.append("a multimodal model: images have no token ids")
    if getattr(runner, "is_hybrid_swa", False):
        refused.append("a hybrid model: sliding-window slots of its own are not seen")
    if settings.sweep_interval:
        refused.append(
            "KV_CANARY_SWEEP_INTERVAL: slots of the prefix cache are only checked when "
            "they are read; unset it"
        )
    if refused:
        raise Refusal("; ".join(refused))
    rank = int(getattr(getattr(runner, "ps", runner), "tp_rank", 0))
    with torch.inference_mode(False), torch.no_grad():
        canary = RunnerCanary(
            read_pool(runner.token_to_kv_pool, settings.fingerprint),
            settings,
            req_to_token=runner.req_to_token_pool.req_to_token,
            allocator=runner.token_to_kv_pool_allocator,
            tree_width=_tree_width(args),
            rank=rank,
            target=target,
        )
    if target is None:
        serve_metrics(canary, settings, rank=rank)
    return canary


def _tree_width(args: Any) -> int:
    if getattr(args, "speculative_algorithm", None) is None:
        return 0
    width = getattr(args, "speculative_num_draft_tokens", None)
    if not width:
        raise Refusal(
            "looked for speculative_num_draft_tokens of a speculative_algorithm, found "
            f"{width!r}"
        )
    return int(width)


def _wrap_model(model: Any, canary: RunnerCanary) -> None:
    """Around the model's forward, whoever runs or captures it."""
    method = model.forward

    # Its signature is asked for parameters that only some models have.
    @functools.wraps(method)
    def forward(
        input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        canary.before(forward_batch)
        result = method(input_ids, positions, forward_batch, *args, **kwargs)
        canary.after()
        return result

    model.forward = forward


def checked(canary: RunnerCanary | None, batch: Any, forward: Callable[[], Any]) -> Any:
    """A forward with all launches around it, none of them in its graphs."""
    if canary is None:
        return forward()
    canary.begin(batch)
    canary.before(batch)
    result = forward()
    canary.after()
    canary.end()
    return result


def _draft_extend(
    method: Method, worker: Any, batch: Any, batch_result: Any, *args: Any, **kw: Any
) -> Any:
    canary = canary_of(worker.draft_runner)
    call = functools.partial(method, worker, batch, batch_result, *args, **kw)
    if canary is None or mode_of(batch) == IDLE:
        return call()
    return checked(canary, extend_after(batch, batch_result), call)


def _require_attached(runner: Any, settings: Settings) -> None:
    """A forward without a canary is an error; in mode `log` a line, once."""
    if getattr(runner, _IS_TOLD, False):
        return
    text = (
        "kv_canary: a forward runs in a runner to which nothing is attached: "
        f"{hooks_of.POOL.found().place} made its pool before it was wrapped, was gone "
        "past, or was refused"
    )
    if settings.mode is Mode.RAISE:
        raise RuntimeError(text)
    setattr(runner, _IS_TOLD, True)
    logger.error("%s. NOTHING IS CHECKED", text)


def _sample(
    method: Method,
    runner: Any,
    logits_output: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tokens = method(runner, logits_output, forward_batch, *args, **kwargs)
    canary = canary_of(runner)
    if canary is not None:
        canary.sampled(forward_batch, tokens)
    return tokens


def _prepare_for_extend(method: Method, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(batch, *args, **kwargs)
    canary = canary_of(batch.req_to_token_pool)
    if canary is not None:
        for request in batch.reqs:
            canary.announce(request)
    return result


def _run_batch(
    method: Method, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    result = method(scheduler, batch, *args, **kwargs)
    canary = canary_of(batch.req_to_token_pool)
    if canary is not None and result is not None:
        canaries = [canary] if canary.draft is None else [canary, canary.draft]
        held = [Held(each, each.take_pending()) for each in canaries]
        setattr(result, _PENDING, held)
    return result


def _process_batch_result(
    method: Method, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    held: list[Held] = getattr(result, _PENDING, [])
    for canary, pending in held:
        for findings in pending:
            canary.collect(findings)
        canary.poll()
    return method(scheduler, batch, result, *args, **kwargs)


def _free(
    method: Method, allocator: Any, free_index: Any, *args: Any, **kwargs: Any
) -> Any:
    canary = canary_of(allocator)
    if canary is not None:
        canary.free(free_index)
    return method(allocator, free_index, *args, **kwargs)


def _clear(method: Method, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    canary = canary_of(allocator)
    if canary is not None:
        canary.clear()
    return method(allocator, *args, **kwargs)


def _move(
    method: Method, pool: Any, tgt_loc: Any, src_loc: Any, *args: Any, **kwargs: Any
) -> Any:
    result = method(pool, tgt_loc, src_loc, *args, **kwargs)
    canary = canary_of(pool)
    if canary is not None:
        canary.move(dst=tgt_loc, src=src_loc)
    return result
