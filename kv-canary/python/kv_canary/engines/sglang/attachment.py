"""The canaries of SGLang's runners, and the wrappers that lead to them.

A canary is an attribute of the objects that it watches: the runner, its pool, its
allocator, its table, its model. Objects without one, such as those of a draft, are left
alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kv_canary.engines.hooks import Hook, Refusal, wrap
from kv_canary.engines.metrics import serve_metrics
from kv_canary.engines.reporting import unless_refused
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.sglang import hooks_of
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
    return [wrap(hook, wrapper) for hook, wrapper in around]


def attach(runner: Any, settings: Settings) -> None:
    """Attach a canary to a runner whose pools were just made; a draft's is left alone.

    Raises:
        Refusal: mode `raise`, and something cannot be checked. In mode `log` the error
            is logged, and the runner goes on unchecked.
    """
    if runner.is_draft_worker:
        logger.warning(
            "kv_canary: the pool of the draft model is not checked; the trees that the "
            "target verifies are"
        )
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
    pool = canary.canary.pool
    logger.warning(
        "kv_canary: checks group %r: %d layers, %d slots in pages of %d (mode %s, real "
        "data %s)",
        pool.group,
        pool.num_layers,
        pool.num_slots,
        pool.page_size,
        settings.mode.value,
        settings.real_data,
    )


def _create(runner: Any, settings: Settings) -> RunnerCanary:
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
        )
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


def _require_attached(runner: Any, settings: Settings) -> None:
    """A forward without a canary is an error; in mode `log` a line, once."""
    if runner.is_draft_worker or getattr(runner, _IS_TOLD, False):
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
        setattr(result, _PENDING, Held(canary, canary.take_pending()))
    return result


def _process_batch_result(
    method: Method, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    held: Held | None = getattr(result, _PENDING, None)
    if held is not None:
        for findings in held.pending:
            held.canary.collect(findings)
        held.canary.poll()
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
