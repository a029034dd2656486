"""Sizes and builds the pools of a model runner."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.arg_groups.draft_slots import decode_reserve, region_columns
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.partition import divide_kv_heads
from sglang.srt.layers.state.nodes import StateNodes
from sglang.srt.mem_cache.allocator import BaseAllocator, create_allocator
from sglang.srt.mem_cache.draft_region import DraftRegion, region_size
from sglang.srt.mem_cache.groups.state_slots import StateSlots
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.mem_cache.state_pool import StatePool
from sglang.srt.model_executor.kv_groups import (
    SecondaryGroup,
    SlotPlan,
    TensorSpec,
    create_kv_pool,
    wanted_groups,
)
from sglang.srt.model_executor.memory_plan import (
    MAX_HEAD_GRAPH_TOKENS,
    NO_DRAFT_MEMORY,
    DraftMemory,
    WatcherBytes,
    cpu_pool_slots,
    decode_graph_sizes,
    default_rows,
    expansion_bytes,
    gathered_bytes,
    graph_bytes,
    no_room_for_a_page,
    prefill_graph_bytes,
    prefill_token_counts,
)
from sglang.srt.model_executor.state_memory import (
    plan_states,
    refuse_draft_with_state,
    rows_with_states,
    state_shape,
)
from sglang.srt.models.draft import DraftModel
from sglang.srt.utils.memory import available_device_bytes

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import CausalLM
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Extra columns of a row, beyond the context, in every configuration.
ROW_HEADROOM = 4


class SharedPools(NamedTuple):
    """Pools that a draft worker shares with its target. The same slot id addresses a
    row in either KV pool."""

    req_to_token_pool: ReqToTokenPool
    allocator: BaseAllocator


class ModelRunnerKVCacheMixin:
    """Adds `_init_pools`; the runner provides the attributes declared here."""

    server_args: ServerArgs
    model: CausalLM
    model_config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str
    is_draft_worker: bool
    page_size: int
    free_bytes_at_start: int
    watcher: WatcherBytes
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVCache
    allocator: BaseAllocator
    max_total_num_tokens: int
    # Set if the model keeps a recurrent state; the slots if it has checkpoints.
    state_pool: StatePool | None = None
    state_slots: StateSlots | None = None
    state_nodes: StateNodes | None = None
    # Set by the target, which decides it; a draft's slots count as primary ones.
    _secondary: Sequence[SecondaryGroup] = ()
    # Set by `_init_pools` if there is no --max-running-requests.
    _default_rows: int | None = None

    @property
    def max_running_requests(self) -> int:
        """Requests in one batch, and rows of `req_to_token`."""
        rows = self.server_args.max_running_requests or self._default_rows
        assert rows is not None, "the pools are not built"
        return rows

    def row_width(self) -> int:
        """Columns of a `req_to_token` row.

        The context, plus what one decode iteration may reserve beyond it in whole
        pages.
        """
        args, context_len = self.server_args, self.model_config.context_len
        if args.speculative_algorithm is None:
            return context_len + max(ROW_HEADROOM, self.page_size + 1)
        narrow = ROW_HEADROOM + args.tree_shapes[-1].num_draft_tokens
        return context_len + max(narrow, decode_reserve(args) + self.page_size - 1)

    def graph_sizes(self) -> list[int]:
        """Batch sizes of the decode graphs; empty if the flags or the backend rule
        graphs out."""
        args = self.server_args
        assert args.attention_backend is not None
        capabilities = ATTENTION_BACKENDS[args.attention_backend]
        if args.disable_cuda_graph or not capabilities.supports_cuda_graph:
            return []
        return decode_graph_sizes(
            max_running_requests=self.max_running_requests,
            max_bs=args.cuda_graph_max_bs,
            wanted=args.cuda_graph_bs,
        )

    def decode_graph_bytes(self) -> int:
        """Memory reserved for decode graphs, including verification graphs."""
        args = self.server_args
        tokens = [1]
        if args.speculative_algorithm is not None:
            tokens = [shape.num_draft_tokens for shape in args.tree_shapes]
            tokens += [1] * args.speculative_adaptive
        # Batches with adapters have graphs of their own.
        return (1 + args.enable_lora) * graph_bytes(
            self.model_config,
            self.graph_sizes(),
            dtype=self.dtype,
            tokens_per_row=tokens,
        )

    def prefill_graph_bytes(self) -> int:
        """Memory reserved for prefill graphs."""
        args = self.server_args
        backend = args.attention_backend
        assert backend is not None
        return prefill_graph_bytes(
            self.model_config,
            self.prefill_graph_token_counts(),
            dtype=self.dtype,
            captures_attention=ATTENTION_BACKENDS[backend].captures_prefill
            and self.model_config.state is None,
            has_adapters=args.enable_lora and not self.is_draft_worker,
        )

    def expansion_bytes(self) -> int:
        """Memory kept free for the latents that a prefill expands."""
        latent, args = self.model_config.latent, self.server_args
        assert args.attention_backend is not None
        capabilities = ATTENTION_BACKENDS[args.attention_backend]
        if latent is None or not capabilities.expands_latents:
            return 0
        limits = (args.max_prefill_tokens, args.chunked_prefill_size or 0)
        return expansion_bytes(
            latent,
            heads=self.model_config.num_heads // get_tp_group().size,
            tokens=min(limit for limit in limits if limit > 0),
            dtype=self.dtype,
        )

    def gathered_bytes(self) -> int:
        """Memory kept free for the prefixes that a prefill gathers."""
        config, args = self.model_config, self.server_args
        assert args.attention_backend is not None
        capabilities = ATTENTION_BACKENDS[args.attention_backend]
        if config.latent is not None or not capabilities.gathers_prefixes:
            return 0
        return gathered_bytes(
            context_len=config.context_len,
            kv_heads=max(config.num_kv_heads // get_tp_group().size, 1),
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    def prefill_graph_token_counts(self) -> list[int]:
        """Token counts of the prefill graphs; empty if the flags or the backend rule
        them out."""
        args = self.server_args
        if not args.has_prefill_graphs:
            return []
        assert args.chunked_prefill_size is not None
        limits = [args.max_prefill_tokens, args.chunked_prefill_size]
        # A forward never writes more tokens than there are slots.
        limits.append(args.max_total_tokens or 0)
        if isinstance(self.model, DraftModel):
            limits.append(MAX_HEAD_GRAPH_TOKENS)
        return prefill_token_counts(min(limit for limit in limits if limit > 0))

    def _init_pools(
        self, *, shared: SharedPools | None, draft_memory: DraftMemory
    ) -> None:
        """Build rows, slots and KV bytes; with `shared`, the KV bytes only.

        Raises:
            ValueError: the memory cannot hold one page. The message names the flags.
        """
        config, args = self.model_config, self.server_args
        if shared is not None:
            refuse_draft_with_state(config)
        if shared is None:
            self._secondary = wanted_groups(config, args)
            if args.max_running_requests is None:
                self._default_rows = self._choose_rows()
            self._check_rows()
            # Every rank keeps the KV of its heads in the same slots.
            self._init_states()
            size = get_tp_group().min_int(self._pool_size(draft_memory))
            rows = ReqToTokenPool(
                size=self.max_running_requests,
                row_width=self.row_width(),
                device=self.device,
                context_len=config.context_len,
                region=self._draft_region(size),
            )
            plan = SlotPlan(
                size=size,
                page_size=self.page_size,
                reserve=decode_reserve(args),
                region_size=self.region_size(),
                device=self.device,
            )
            allocator = create_allocator(
                size=size,
                page_size=self.page_size,
                secondary=[
                    kind.create_slots(config, args, plan) for kind in self._secondary
                ],
            )
            shared = SharedPools(rows, allocator)
        self.req_to_token_pool, self.allocator = shared
        self.max_total_num_tokens = self.allocator.size
        self.token_to_kv_pool = create_kv_pool(
            config,
            self._tensor_spec(),
            size=self.max_total_num_tokens,
            page_size=self.page_size,
            secondary=self.allocator.secondary,
            region_size=self.region_size() if self.is_draft_worker else 0,
            device=self.device,
        )

    def _init_states(self) -> None:
        """Build the states of a model that has any, before the KV takes what is
        left."""
        shape = state_shape(self.model_config, self.server_args, dtype=self.dtype)
        if shape is None:
            return
        nodes = self._num_state_nodes()
        sizes = plan_states(
            shape,
            self.server_args,
            rows=self.max_running_requests,
            available=self._memory_for_pools() - nodes * shape.bytes_per_node,
            watched=self.watcher.state(shape),
        )
        group = get_tp_group()
        checkpoints = group.min_int(sizes.checkpoints)
        self.state_pool = StatePool(
            shape, size=sizes.rows + checkpoints, device=self.device
        )
        if checkpoints:
            self.state_slots = StateSlots(rows=sizes.rows, size=checkpoints)
        if nodes:
            self.state_nodes = StateNodes(self.state_pool, size=nodes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states, 0 for a model without any."""
        return 0 if self.state_pool is None else self.state_pool.nbytes

    def _num_state_nodes(self) -> int:
        """Return the most nodes of a verification."""
        args = self.server_args
        if args.speculative_algorithm is None:
            return 0
        return self.max_running_requests * args.tree_shapes[-1].num_draft_tokens

    def region_size(self) -> int:
        """KV slots of the draft region, in whole pages; 0 if there is none."""
        return region_size(
            rows=self.max_running_requests,
            columns=region_columns(self.server_args),
            page_size=self.page_size,
        )

    def _draft_region(self, size: int) -> DraftRegion | None:
        """Return the draft region after the `size` slots of the allocator."""
        args = self.server_args
        columns = region_columns(args)
        if not columns:
            return None
        logger.info(
            "Draft branches have a region of %d KV slots, %d for each request row",
            self.max_running_requests * columns,
            columns,
        )
        return DraftRegion(
            first_slot=size + self.page_size,
            rows=self.max_running_requests,
            columns=columns,
            page_size=self.page_size,
        )

    def _choose_rows(self) -> int:
        """Return the number of request rows that memory suggests, the same on all
        ranks."""
        args, free = self.server_args, self._available_bytes()
        slots = args.max_total_tokens
        if slots is None:
            for_kv = max(free - self._activation_bytes(), 0)
            slots = for_kv // self.bytes_per_kv_slot()
        per_row = ReqToTokenPool.bytes_per_row(row_width=self.row_width())
        rows = default_rows(free_bytes=free, bytes_per_row=per_row, num_slots=slots)
        shape = state_shape(self.model_config, args, dtype=self.dtype)
        if shape is not None:
            # Graphs are for fewer rows than this, so their memory is not known yet.
            available = max(free - self._activation_bytes(), 0)
            rows = min(rows, rows_with_states(shape, args, available=available))
        rows = get_tp_group().min_int(rows)
        logger.info(
            "At most %d requests run at once (--max-running-requests), with tables of "
            "%.2f GiB",
            rows,
            (rows + 1) * per_row / 2**30,
        )
        return rows

    def _activation_bytes(self) -> int:
        """Memory that --mem-fraction-static leaves to prefill activations."""
        share = self.server_args.mem_fraction_static
        assert share is not None
        return int(self.free_bytes_at_start * (1 - share))

    def _check_rows(self) -> None:
        """Raises:
        ValueError: the tables of the requests' tokens do not fit into memory.
        """
        running = self.max_running_requests
        needed = ReqToTokenPool.num_bytes(
            size=running,
            row_width=self.row_width(),
            region_columns=region_columns(self.server_args),
        )
        available = self._available_bytes()
        if needed > available:
            raise ValueError(
                f"{running} requests of up to {self.model_config.context_len} tokens "
                f"need {needed / 2**30:.1f} GiB for their tables, but "
                f"{available / 2**30:.1f} GiB are free; lower --context-length or "
                "--max-running-requests"
            )

    def _num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return divide_kv_heads(self.model_config.num_kv_heads, get_tp_group()).size

    def _available_bytes(self) -> int:
        """Return the device's free memory. Ranks on the CPU share it evenly."""
        available = available_device_bytes(self.device)
        return available // get_tp_group().size if self.device == "cpu" else available

    def _tensor_spec(self) -> TensorSpec:
        return TensorSpec.of(
            self.model_config, dtype=self.kv_dtype, kv_heads=self._num_kv_heads()
        )

    def bytes_per_kv_slot(self) -> int:
        """Return the device memory of one primary slot: its KV, the canary's records of
        it, and its share of the other groups' slots."""
        config, spec = self.model_config, self._tensor_spec()
        per_layer = spec.layer_bytes + spec.heads * self.watcher.head
        primary, total = len(config.attention_layers), 0.0
        for kind in self._secondary:
            layers = len(kind.layers(config))
            primary -= layers
            slot = layers * per_layer + self.watcher.slot
            total += kind.share(self.server_args) * slot
        return math.ceil(total + primary * per_layer + self.watcher.slot)

    def _pool_size(self, draft_memory: DraftMemory) -> int:
        """Return the number of KV slots, a multiple of the page size."""
        args = self.server_args
        per_token = self.bytes_per_kv_slot() + draft_memory.bytes_per_slot
        available = self._available_bytes() - draft_memory.region_bytes
        if args.max_total_tokens is not None:
            if args.max_total_tokens * per_token > available:
                raise ValueError(
                    f"--max-total-tokens {args.max_total_tokens} needs "
                    f"{args.max_total_tokens * per_token / 2**30:.1f} GiB for the KV "
                    f"cache, but {available / 2**30:.1f} GiB are free; lower it"
                )
            return args.max_total_tokens
        size = max(available - self._kept_free(draft_memory), 0) // per_token
        size -= self.page_size  # the scratch page
        if self.device == "cpu":
            size = self._cap(size, per_token)
        size -= size % self.page_size
        if size < self.page_size:
            raise no_room_for_a_page(
                args, free_bytes=self.free_bytes_at_start, bytes_per_slot=per_token
            )
        return size

    def _kept_free(self, draft_memory: DraftMemory) -> int:
        """Return the bytes that the pools leave free."""
        kept = self._activation_bytes()
        kept += self.decode_graph_bytes() + self.prefill_graph_bytes()
        kept += draft_memory.graph_bytes
        return kept + self.expansion_bytes() + self.gathered_bytes()

    def _memory_for_pools(self) -> int:
        """Return the bytes that states and KV share."""
        return max(self._available_bytes() - self._kept_free(NO_DRAFT_MEMORY), 0)

    def _cap(self, size: int, bytes_per_slot: int) -> int:
        """Return the default size of a CPU pool for which memory has `size` slots."""
        cap = cpu_pool_slots(
            context_len=self.model_config.context_len,
            max_running_requests=self.max_running_requests,
            bytes_per_slot=bytes_per_slot,
        )
        if cap < self.page_size <= size:
            raise ValueError(
                f"--page-size {self.page_size} is more than the {cap} tokens that a "
                "pool on the CPU has by default; lower it, or set --max-total-tokens"
            )
        if cap < size:
            logger.info(
                "The KV pool has %d tokens by default; --max-total-tokens takes up to "
                "%d of them",
                cap,
                size,
            )
        return min(size, cap)
