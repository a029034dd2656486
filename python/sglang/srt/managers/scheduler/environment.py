"""The prefix cache of a scheduler and the constants of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.draft_slots import decode_reserve, decode_spare
from sglang.srt.managers.batch.schedule_batch import BatchEnvironment
from sglang.srt.managers.batch.state_plans import StatePlanner
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def create_environment(
    server_args: ServerArgs, runner: ModelRunner, *, max_behind: int = 0
) -> BatchEnvironment:
    """Create a cache over the pools of `runner`, and the constants of its batches.

    Args:
        max_behind: as `Worker.max_behind`.
    """
    cache = _create_cache(server_args, runner)
    is_speculative = server_args.speculative_algorithm is not None
    return BatchEnvironment(
        cache=cache,
        vocab_size=runner.model_config.vocab_size,
        needs_host_lens=runner.attn_backend.capabilities.needs_cpu_seq_lens,
        decode_reserve=decode_reserve(server_args),
        decode_spare=decode_spare(server_args) if is_speculative else 0,
        drafts_on_host=is_speculative and not server_args.draft_kind.has_model,
        # An iteration may be in flight.
        max_ahead=2 * max(shape.accept_width for shape in server_args.tree_shapes)
        if is_speculative
        else 0,
        draft_lead=server_args.draft_lead if is_speculative else 0,
        max_behind=max_behind,
        # A GPU catches up for a few percent of its plain steps, a CPU for ten.
        drafts_lapse=server_args.device == "cpu",
        shape=server_args.tree_shape if is_speculative else None,
        states=_create_planner(server_args, cache),
        adapters=None if runner.adapters is None else runner.adapters.pool,
    )


def _create_cache(server_args: ServerArgs, runner: ModelRunner) -> BasePrefixCache:
    pools: dict[str, Any] = {
        "req_to_token_pool": runner.req_to_token_pool,
        "allocator": runner.allocator,
        # A slot in a draft head's pool also depends on the next token.
        "bigram": server_args.speculative_algorithm is not None
        and server_args.draft_token_offset > 0,
    }
    if server_args.disable_radix_cache:
        return ChunkCache(**pools)
    return RadixCache(**pools, states=runner.state_slots)


def _create_planner(
    server_args: ServerArgs, cache: BasePrefixCache
) -> StatePlanner | None:
    if cache.checkpoints is None:
        return None
    return StatePlanner(
        cache.checkpoints,
        page_size=cache.page_size,
        interval=server_args.mamba_track_interval or 0,
        tracks_inside=server_args.mamba_radix_cache_strategy != "no_buffer",
        ahead=_ahead(server_args),
    )


def _ahead(server_args: ServerArgs) -> int:
    """Return `StatePlanner.ahead`."""
    if server_args.speculative_algorithm is None:
        return 0
    verifications = 1 if server_args.disable_overlap_schedule else 2
    return verifications * max(shape.accept_width for shape in server_args.tree_shapes)
