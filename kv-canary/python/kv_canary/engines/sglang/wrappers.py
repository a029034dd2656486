"""Wrappers of SGLang's methods that call the canaries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_canary.engines.hooks import Hook, problem_with, wrap
from kv_canary.engines.sglang import hooks_of
from kv_canary.engines.sglang.attachment import attach, get_canary, require_attached
from kv_canary.engines.sglang.batch import IDLE, PREFILL, forward_mode_name
from kv_canary.engines.sglang.draft import extend_after

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings
    from kv_canary.engines.sglang.runner_canary import RunnerCanary
    from kv_canary.runtime.pending import Pending

Method = Callable[..., Any]
_PENDING = "_kv_canary_pending"


class Held(NamedTuple):
    """Findings to collect before a result may leave; kept with the result."""

    canary: RunnerCanary
    pending: list[Pending]


def wrap_engine(settings: Settings) -> list[Callable[[], None]]:
    """Wrap all methods; return functions that undo it."""

    def alloc_pool(method: Method, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(runner, *args, **kwargs)
        attach(runner, settings)
        return result

    def forward(
        method: Method, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        canary = get_canary(runner)
        if runner.is_draft_worker:
            call = functools.partial(method, runner, forward_batch, *args, **kwargs)
            is_checked = forward_mode_name(forward_batch) == PREFILL
            return _checked(canary if is_checked else None, forward_batch, call)
        if canary is None:
            require_attached(runner, settings)
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


def _checked(
    canary: RunnerCanary | None, batch: Any, forward: Callable[[], Any]
) -> Any:
    """Run a forward with all launches around it, outside its graphs."""
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
    canary = get_canary(worker.draft_runner)
    call = functools.partial(method, worker, batch, batch_result, *args, **kw)
    if canary is None or forward_mode_name(batch) == IDLE:
        return call()
    return _checked(canary, extend_after(batch, batch_result), call)


def _sample(
    method: Method,
    runner: Any,
    logits_output: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tokens = method(runner, logits_output, forward_batch, *args, **kwargs)
    canary = get_canary(runner)
    if canary is not None:
        canary.sampled(forward_batch, tokens)
    return tokens


def _prepare_for_extend(method: Method, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(batch, *args, **kwargs)
    canary = get_canary(batch.req_to_token_pool)
    if canary is not None:
        for request in batch.reqs:
            canary.announce(request)
    return result


def _run_batch(
    method: Method, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    result = method(scheduler, batch, *args, **kwargs)
    canary = get_canary(batch.req_to_token_pool)
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
    canary = get_canary(allocator)
    if canary is not None:
        canary.free(free_index)
    return method(allocator, free_index, *args, **kwargs)


def _clear(method: Method, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    canary = get_canary(allocator)
    if canary is not None:
        canary.clear()
    return method(allocator, *args, **kwargs)


def _move(
    method: Method, pool: Any, tgt_loc: Any, src_loc: Any, *args: Any, **kwargs: Any
) -> Any:
    result = method(pool, tgt_loc, src_loc, *args, **kwargs)
    canary = get_canary(pool)
    if canary is not None:
        canary.move(dst=tgt_loc, src=src_loc)
    return result
