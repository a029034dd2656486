"""The V2 runner (`gpu/model_runner.py`, and the CPU runner that extends it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kv_canary.engines.hooks import wrap, wrap_of
from kv_canary.engines.step import ForwardReads, GroupReads
from kv_canary.engines.vllm.attachment import (
    ATTRIBUTE,
    attach,
    get_attachment,
    sample_tokens,
)
from kv_canary.engines.vllm.hooks_of import V2_HOOKS, V2_LOADS, V2_STATES
from kv_canary.engines.vllm.states import state_blocks

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings

Method = Callable[..., Any]


def wrap_runner(settings: Settings) -> list[Callable[[], None]]:
    """Wrap its methods; return functions that undo it."""

    def initialize_kv_cache(
        method: Method, self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = method(self, kv_cache_config, *args, **kwargs)
        is_profiling = kwargs.get("is_profiling", bool(args and args[0]))
        if not is_profiling:
            attach(self, settings)
            _check_later(self)
        return result

    around: dict[str, Method] = {
        "pool": initialize_kv_cache,
        "step": _execute_model,
        "forward": _prepare_attn,
        "tokens": sample_tokens,
        "sampled": _sample,
    }
    hooks = [wrap(hook, around[name]) for name, hook in V2_HOOKS.items()]
    return [*hooks, wrap(V2_LOADS, _pre_forward)]


def _execute_model(
    method: Method,
    self: Any,
    scheduler_output: Any,
    intermediate_tensors: Any = None,
    dummy_run: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    attachment = get_attachment(self)
    if attachment is None or dummy_run:
        return method(
            self, scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs
        )
    attachment.begin(scheduler_output)
    if attachment.loads is not None:
        attachment.new_requests.note(scheduler_output)
        again = attachment.canary.again
        scheduler_output = attachment.new_requests.again(scheduler_output, again)
    result = method(
        self, scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs
    )
    attachment.end()
    return result


def _prepare_attn(method: Method, self: Any, input_batch: Any) -> Any:
    block_tables, slot_mappings = method(self, input_batch)
    attachment = get_attachment(self)
    if attachment is not None and attachment.is_in_step:
        canary, num_tokens = attachment.canary, attachment.num_tokens
        numbers = [group.group.number for group in canary.groups]
        reads = _reads(input_batch, num_tokens, block_tables, slot_mappings, numbers)
        if attachment.loads is None and canary.states is None:
            attachment.check(reads)
        else:
            attachment.reads_later = reads
    return block_tables, slot_mappings


def _check_later(runner: Any) -> None:
    """Let forwards be checked when the connector has loaded what they read, or when
    states were copied to their next block, which is after their tables are made."""
    attachment = get_attachment(runner)
    if attachment is None:
        return
    if attachment.loads is not None:
        setattr(runner.kv_connector, ATTRIBUTE, attachment)
    states = attachment.canary.states
    if states is not None:

        def prepare_attn(method: Method, *args: Any, **kwargs: Any) -> Any:
            metadata = method(*args, **kwargs)
            if attachment.reads_later is not None:
                blocks = state_blocks(runner, states, metadata)
                attachment.check_later(states=blocks)
            return metadata

        wrap_of(runner.model_state, V2_STATES.method, prepare_attn)


def _pre_forward(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(self, *args, **kwargs)
    attachment = get_attachment(self)
    if attachment is not None:
        attachment.check_later()
    return result


def _sample(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    sampled = method(self, *args, **kwargs)
    attachment = get_attachment(self)
    if attachment is not None:
        output, num_sampled, _ = sampled
        attachment.canary.sampled(output.sampled_token_ids, num_sampled)
    return sampled


def _reads(
    batch: Any,
    num_tokens: int,
    block_tables: tuple[Tensor, ...],
    slots: Tensor,
    numbers: Sequence[int],
) -> ForwardReads:
    rids = list(batch.req_ids[: batch.num_reqs])
    return ForwardReads(
        rids=rids,
        num_tokens=num_tokens,
        input_ids=batch.input_ids,
        positions=batch.positions,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        groups=[
            GroupReads(
                block_table=block_tables[number][: len(rids)],
                slot_mapping=slots[number],
            )
            for number in numbers
        ],
    )
