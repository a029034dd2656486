"""The V1 runner (`gpu_model_runner.py`, and the CPU runner that extends it)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kv_canary.engines.hooks import Refusal, wrap
from kv_canary.engines.step import ForwardReads, GroupReads
from kv_canary.engines.vllm.attachment import attach, get_attachment, sample_tokens
from kv_canary.engines.vllm.hooks_of import FORWARD_CONTEXT, V1_HOOKS
from kv_canary.engines.vllm.states import state_blocks
from kv_canary.engines.vllm.turned_back import forget_sampled

if TYPE_CHECKING:
    from kv_canary.engines.engine_canary import EngineCanary
    from kv_canary.engines.settings import Settings

Method = Callable[..., Any]
_READ = ("block_table", "slot_mapping", "seq_lens", "query_start_loc")


def wrap_runner(settings: Settings) -> list[Callable[[], None]]:
    """Wrap its methods; return functions that undo it."""

    def initialize_kv_cache(
        method: Method,
        self: Any,
        kv_cache_config: Any,
        is_profiling: bool = False,
        **rest: Any,
    ) -> Any:
        result = method(self, kv_cache_config, is_profiling, **rest)
        if not is_profiling:
            attach(self, settings)
        return result

    around: dict[str, Method] = {
        "pool": initialize_kv_cache,
        "step": _execute_model,
        "forward": _model_forward,
        "tokens": sample_tokens,
        "sampled": _sample,
    }
    return [wrap(hook, around[name]) for name, hook in V1_HOOKS.items()]


def _execute_model(
    method: Method, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    attachment = get_attachment(self)
    if attachment is None:
        return method(self, scheduler_output, *args, **kwargs)
    attachment.begin(scheduler_output)
    forget_sampled(self, attachment.canary.again)
    result = method(self, scheduler_output, *args, **kwargs)
    attachment.end()
    return result


def _model_forward(
    method: Method,
    self: Any,
    input_ids: Tensor | None = None,
    positions: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    attachment = get_attachment(self)
    if attachment is not None and attachment.is_in_step:
        canary, num_tokens = attachment.canary, attachment.num_tokens
        attachment.check(_reads(self, canary, num_tokens, input_ids, positions))
    return method(self, input_ids, positions, *args, **kwargs)


def _sample(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = method(self, *args, **kwargs)
    attachment = get_attachment(self)
    if attachment is not None:
        attachment.canary.sampled(output.sampled_token_ids)
    return output


def _reads(
    runner: Any,
    canary: EngineCanary,
    num_tokens: int,
    input_ids: Tensor | None,
    positions: Tensor | None,
) -> ForwardReads:
    """Return the tensors of the forward that is about to begin."""
    context = importlib.import_module(FORWARD_CONTEXT).get_forward_context()
    metadata = context.attn_metadata
    if not isinstance(metadata, dict):
        raise Refusal(
            f"looked for attention metadata by layer, found a {type(metadata).__name__}"
        )
    batch = runner.input_batch
    # With embeddings the model gets no ids, but the runner has them.
    ids = runner.input_ids.gpu if input_ids is None else input_ids
    # Models with several positions per token keep them apart from the plain ones.
    if positions is None or positions.dim() != 1:
        positions = runner.positions
    assert isinstance(positions, Tensor)
    every = runner.kv_cache_config.kv_cache_groups
    groups = [
        metadata[every[group.group.number].layer_names[0]] for group in canary.groups
    ]
    for of_group in groups:
        missing = [name for name in _READ if not hasattr(of_group, name)]
        if missing:
            raise Refusal(
                f"looked for {', '.join(missing)} in {type(of_group).__name__}: this "
                "attention backend reads tables that are not seen"
            )
    rids = list(batch.req_ids[: batch.num_reqs])
    return ForwardReads(
        rids=rids,
        num_tokens=num_tokens,
        input_ids=ids,
        positions=positions,
        query_start_loc=groups[0].query_start_loc,
        seq_lens=groups[0].seq_lens,
        groups=[
            GroupReads(
                block_table=of_group.block_table[: len(rids)],
                slot_mapping=of_group.slot_mapping,
            )
            for of_group in groups
        ],
        states=state_blocks(runner, canary.states, metadata),
    )
