"""The prefix cache of a scheduler and the constants of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.draft_slots import decode_reserve
from sglang.srt.managers.batch.schedule_batch import BatchEnvironment
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def create_environment(
    server_args: ServerArgs, runner: ModelRunner
) -> BatchEnvironment:
    """Create a cache over the pools of `runner`, and the constants of its batches."""
    cache_class: type[BasePrefixCache] = (
        ChunkCache if server_args.disable_radix_cache else RadixCache
    )
    cache = cache_class(
        req_to_token_pool=runner.req_to_token_pool,
        allocator=runner.allocator,
        # A slot in a draft head's pool also depends on the next token.
        bigram=server_args.speculative_algorithm is not None
        and server_args.draft_token_offset > 0,
    )
    return BatchEnvironment(
        cache=cache,
        vocab_size=runner.model_config.vocab_size,
        needs_host_lens=runner.attn_backend.capabilities.needs_cpu_seq_lens,
        decode_reserve=decode_reserve(server_args),
    )
