"""Installs the canary on a model runner.

The worker that owns the runner calls it; the runner knows nothing but scopes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kv_canary.attended import SUM_BYTES, AttendedBytes, attended_bytes
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.kv_canary.attention_views import check_views
from sglang.srt.kv_canary.capacities import bytes_per_slot, bytes_per_state
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
from sglang.srt.kv_canary.state_group import StateGroup, create_state_group
from sglang.srt.kv_canary.token_oracle import InputOracle
from sglang.srt.model_executor.memory_plan import NO_WATCHER, WatcherBytes

if TYPE_CHECKING:
    from torch import nn

    from kv_canary.runtime.group import CanaryGroup
    from sglang.srt.configs.attention_backends import AttentionBackendCapabilities
    from sglang.srt.kv_canary.groups import PoolGroup
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def install_canary(
    *,
    server_args: ServerArgs,
    model_runner: ModelRunner,
    target_canary: CanaryManager | None = None,
) -> CanaryManager | None:
    """Check the KV cache of `model_runner` from now on.

    The worker that owns the runner calls it, once pools and attention backend exist and
    before any graph is captured.

    Args:
        target_canary: the target's manager, for a draft worker: without it a draft
            worker's pool is not checked, so that none ever is by accident.

    Returns:
        None where the canary is off, or for a draft worker without `target_canary`.

    Raises:
        ValueError: flags, environment or pool do not fit; names what to change.
        RuntimeError: attention is given other views than the pool's.
    """
    config = CanaryConfig.from_server_args(server_args)
    is_draft = model_runner.is_draft_worker
    if not config.is_on or (is_draft and target_canary is None):
        return None
    pool = model_runner.token_to_kv_pool
    req_to_token_pool = model_runner.req_to_token_pool
    topk, num_managers, tree_depth, token_offset = 1, 1, 0, 0
    if is_draft:
        token_offset = server_args.draft_token_offset
        topk = max(shape.topk for shape in server_args.tree_shapes)
        steps = max(shape.num_steps for shape in server_args.tree_shapes)
        num_managers = max(1, steps - 1)
    elif server_args.speculative_algorithm is not None:
        tree_depth = max(shape.num_steps for shape in server_args.tree_shapes)
    backend = model_runner.attn_backend
    keeps_sums = not is_draft and _keeps_sums(server_args, backend.capabilities)
    groups = attach_canary_buffers(
        pool=pool,
        config=config,
        device=pool.device,
        is_draft=is_draft,
        kv_token_id_vs_position_offset=token_offset,
        req_to_token_pool=req_to_token_pool,
        max_rows=req_to_token_pool.size * topk,
        num_managers=num_managers,
        num_branches=req_to_token_pool.size * topk if is_draft else 0,
        keeps_sums=keeps_sums,
    )
    check_views(pool, groups, model_runner.model)
    compared = {group.name: _attended(group) for group in groups}
    if compared[groups[0].name] is not None:
        backend.compare_bytes({n: own for n, own in compared.items() if own})
    oracle = None
    if config.check_write_inputs and not is_draft:
        oracle = InputOracle(
            vocab_size=model_runner.model_config.vocab_size,
            req_rows=req_to_token_pool.size + 1,
            device=pool.device,
        )
    manager = CanaryManager(
        CanaryTarget(
            config=config,
            groups=groups,
            req_to_token_pool=req_to_token_pool,
            kv_pool=pool,
            attn_backend=backend,
            page_size=model_runner.page_size,
            vocab_size=model_runner.model_config.vocab_size,
            topk=topk,
            tree_depth=tree_depth,
            oracle=oracle,
            states=_states(model_runner, config, groups[0]),
        ),
        num_managers=num_managers,
        rank=get_tp_group().rank,
        target_canary=target_canary,
    )
    if not is_draft and not manager.reports:
        config.refuse_without_windows()
    model_runner.allocator.register_on_free(groups[0].free)
    for group in groups:
        if is_draft:
            req_to_token_pool.register_on_region_free(group.free_primary)
        group.listen()
    _patch_model_forward(model_runner.model, manager)
    model_runner.scopes = model_runner.canary_manager = manager
    return manager


def _states(
    runner: ModelRunner, config: CanaryConfig, primary: PoolGroup
) -> StateGroup | None:
    """Records of the recurrent states of a model, if it has any."""
    pool = runner.state_pool
    if pool is None:
        return None
    rows = runner.req_to_token_pool
    group = create_state_group(
        pool, config, req_rows=rows.size + 1, primary=primary.state
    )
    group.listen(rows, runner.state_slots)
    return group


def watcher_bytes(server_args: ServerArgs, *, is_draft: bool = False) -> WatcherBytes:
    """Device memory that the canary will keep of a model's pools; none while it is
    off."""
    if server_args.kv_canary == CanaryMode.NONE.value:
        return NO_WATCHER
    assert server_args.attention_backend is not None
    backend = ATTENTION_BACKENDS[server_args.attention_backend]
    keeps_sums = not is_draft and _keeps_sums(server_args, backend)
    config = CanaryConfig.from_server_args(server_args)
    return WatcherBytes(
        slot=bytes_per_slot(),
        head=SUM_BYTES if keeps_sums else 0,
        state=partial(bytes_per_state, keeps_sums=config.covers_all_bytes),
    )


def _keeps_sums(server_args: ServerArgs, backend: AttentionBackendCapabilities) -> bool:
    """Whether the target's attention compares all bytes: in plain decode steps."""
    config = CanaryConfig.from_server_args(server_args)
    if not config.is_on:
        return False
    is_plain = server_args.speculative_algorithm is None
    return config.covers_all_bytes and is_plain and backend.compares_bytes


def _attended(group: CanaryGroup) -> AttendedBytes | None:
    return attended_bytes(group.state, group.checks.fingerprint)


def _patch_model_forward(model: nn.Module, manager: CanaryManager) -> None:
    """Run the canary's launches around every forward of `model`."""

    def stack(*args: Any) -> Any:
        run: Any = model.forward_stack
        return run(*args)

    def has_all_layers() -> bool:
        return not getattr(model, "is_shallow", False)

    has_stack = hasattr(model, "forward_stack")
    # An instance attribute: the class, and other models of it, stay as they are.
    model.__dict__["forward"] = _with_canary_bracketing(
        model.forward,
        manager,
        stack if has_stack else None,
        has_all_layers=has_all_layers,
    )


def _with_canary_bracketing(
    forward: Callable[..., Any],
    manager: CanaryManager,
    stack: Callable[..., Any] | None = None,
    *,
    has_all_layers: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """Wrap `forward` in the launches before and after it.

    Args:
        stack: runs in `forward` before its head unless `forward` is given another
            `stack`; None: it has no such argument.
        has_all_layers: whether `stack` makes the calls of every layer.
    """

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        forward_batch = _extract_forward_batch(args, kwargs)
        replayed = kwargs.get("stack")
        manager.pre_ops_maybe_inside_graph(
            forward_batch, is_replayed=replayed is not None
        )
        if replayed is not None or not has_all_layers():
            manager.calls.leave_out()
        if replayed is not None:
            replayed = manager.order.with_launch_behind(replayed)
        if stack is not None and manager.order.side is not None:
            kwargs["stack"] = manager.with_tail_after(replayed or stack)
        output = forward(*args, **kwargs)
        manager.post_ops_maybe_inside_graph(forward_batch)
        return output

    return bracketed


def _extract_forward_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ForwardBatch:
    """The batch among the arguments of a model forward.

    Raises:
        RuntimeError: there is none, or more than one.
    """
    found, count = None, 0
    for value in (*args, *kwargs.values()):
        if isinstance(value, ForwardBatch):
            found, count = value, count + 1
    if found is None or count != 1:
        raise RuntimeError(
            f"a model forward got {count} ForwardBatch arguments, expected one"
        )
    return found
