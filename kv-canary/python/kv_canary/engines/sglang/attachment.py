"""The canaries of SGLang's runners.

A canary is an attribute of the objects it watches: the runner and its pool, allocator,
table and model. Objects without one are left alone.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from kv_canary.engines.hooks import Refusal
from kv_canary.engines.metrics import serve_metrics
from kv_canary.engines.reporting import unless_refused
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.sglang import hooks_of
from kv_canary.engines.sglang.draft import unseen_because
from kv_canary.engines.sglang.limits import refused_by
from kv_canary.engines.sglang.pool import read_pool
from kv_canary.engines.sglang.runner_canary import SGLANG, RunnerCanary

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_kv_canary"
_IS_TOLD = "_kv_canary_is_told"


def get_canary(watched: Any) -> RunnerCanary | None:
    """Return the canary that watches an object of SGLang, or None."""
    found: RunnerCanary | None = getattr(watched, _ATTRIBUTE, None)
    return found


def attach(runner: Any, settings: Settings) -> None:
    """Attach a canary to a runner whose pools were just made.

    Raises:
        Refusal: in mode `raise`, if something cannot be checked. In mode `log` the
            error is logged, and the runner continues unchecked.
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
    """Attach a canary to a draft model's pool, or log why not. No answer depends on
    that pool, because the target verifies what its draft model says."""
    target = get_canary(runner.req_to_token_pool)
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
    pool = canary.pool
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
    if settings.sweep_interval and not SGLANG.can_sweep:
        refused.append(
            "KV_CANARY_SWEEP_INTERVAL: slots of the prefix cache are only checked when "
            "they are read; unset it"
        )
    if settings.sample < 1:
        refused.append(
            f"KV_CANARY_SAMPLE={settings.sample}: captured launches verify every row; "
            "unset it"
        )
    if settings.units_dir is not None:
        refused.append("KV_CANARY_UNITS_DIR: only for connectors of vLLM; unset it")
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
    """Wrap the model's forward, whoever runs or captures it."""
    method = model.forward

    # SGLang inspects its signature for parameters that only some models have.
    @functools.wraps(method)
    def forward(
        input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        canary.before(forward_batch)
        result = method(input_ids, positions, forward_batch, *args, **kwargs)
        canary.after()
        return result

    model.forward = forward


def require_attached(runner: Any, settings: Settings) -> None:
    """Fail for a forward without a canary; in mode `log` only log it once."""
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
