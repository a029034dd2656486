"""Estimates of device memory besides weights and KV slots: graphs and copies of KV.

`--mem-fraction-static` covers weights, captured graphs, workspaces and the KV pool; the
rest stays free for the other activations of prefill. Graphs are captured after the pool
is built, so their size is estimated here. The log gives their real size afterwards.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.configs.latent_form import PREFIX_BLOCK

if TYPE_CHECKING:
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.state_pool import StateShape
    from sglang.srt.server_args import ServerArgs

# Kernels that load with the first forward, and the libraries' own workspaces.
KERNEL_BYTES = 512 << 20
# One captured decode graph with up to some forty layers.
GRAPH_BYTES = 8 << 20
# One graph of a draft phase or extend, with fewer than a third as many launches.
DRAFT_GRAPH_BYTES = 2 << 20
# One captured segment of a prefill graph: a layer without its attention.
SEGMENT_BYTES = 64 << 10
# Residual, hidden, attention output and products that are live at once, per channel.
LIVE_HIDDEN, LIVE_INNER = 8, 3

# Request rows of a GPU by default: a power of two. Their tables take at most a share of
# the free memory, and each row finds so many KV slots.
MIN_ROWS, MAX_ROWS = 256, 2048
TABLES_SHARE = 0.02
SLOTS_PER_ROW = 256

CPU_POOL_CONTEXTS = 32
CPU_POOL_BYTES = 2 << 30

MAX_WHOLE_TOKENS = 256
"""Largest single-request prefill that is also captured as one graph, with its
attention. Beyond it the device computes longer than the host launches the pieces."""

MAX_ADAPTED_TOKENS = 1024
"""Largest prefill graph with adapters. Beyond it the device computes longer than the
host launches."""

MAX_HEAD_GRAPH_TOKENS = 512
"""Largest prefill graph of a head that drafts from hidden states. With 2,048 tokens the
device is the limit, and copying the states into the graph's buffer makes a replay about
1 % slower than an eager forward of the one layer (H200, EAGLE3)."""


def decode_graph_sizes(
    *, max_running_requests: int, max_bs: int | None, wanted: Sequence[int] | None
) -> list[int]:
    """Return padded batch sizes of the decode graphs, ascending.

    Args:
        max_bs: --cuda-graph-max-bs, or None.
        wanted: --cuda-graph-bs, or None for the default sizes.
    """
    largest = min(max_bs or max_running_requests, max_running_requests)
    sizes = wanted or default_batch_sizes(largest)
    return sorted({size for size in sizes if size <= largest}) or [largest]


def default_batch_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, then every 8 up to 256, then every 32, up to and including
    `max_rows`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows + 1, 32)]
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


def default_rows(*, free_bytes: int, bytes_per_row: int, num_slots: int) -> int:
    """Return how many requests run at once on a GPU without --max-running-requests.

    Args:
        free_bytes: free memory before the pools are built.
        bytes_per_row: bytes of a request's tables.
        num_slots: KV slots that the memory has room for.
    """
    rows = min(
        int(free_bytes * TABLES_SHARE) // bytes_per_row, num_slots // SLOTS_PER_ROW
    )
    return min(max(1 << (max(rows, 1).bit_length() - 1), MIN_ROWS), MAX_ROWS)


def graph_bytes(
    config: ModelConfig,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    tokens_per_row: Sequence[int] = (1,),
) -> int:
    """Estimate the memory of decode graphs of these sizes.

    Each keeps its logits. Other tensors of a forward share memory, as much as the
    largest size needs.

    Args:
        tokens_per_row: of each kind of graph; every kind has every size.
    """
    if not sizes:
        return 0
    live, graphs = _live_channels(config), len(sizes) * len(tokens_per_row)
    kept = sum(sizes) * sum(tokens_per_row) * config.vocab_size
    shared = max(sizes) * max(tokens_per_row) * live
    return (kept + shared) * dtype.itemsize + graphs * GRAPH_BYTES + KERNEL_BYTES


def _live_channels(config: ModelConfig) -> int:
    """Return the elements per token that are live at once."""
    inner = LIVE_INNER * config.intermediate_size
    if config.moe is not None:
        inner = max(inner, config.moe.num_active_channels(config.hidden_size))
    return LIVE_HIDDEN * config.hidden_size + inner


def prefill_token_counts(max_tokens: int) -> list[int]:
    """Return token counts of the prefill graphs, ascending, up to `max_tokens`
    inclusive.

    Steps grow with the size: 4, 16, 32, 64, 256, then 512.
    """
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max_tokens, 512),
    ]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def whole_token_counts(token_counts: Sequence[int]) -> list[int]:
    """Return the prefill graphs' counts that also have a single-request graph."""
    return [count for count in token_counts if count <= MAX_WHOLE_TOKENS]


def adapted_token_counts(token_counts: Sequence[int]) -> list[int]:
    """Return the prefill graphs' counts that also have a graph with adapters."""
    return [n for n in token_counts if n <= MAX_ADAPTED_TOKENS] or [min(token_counts)]


def prefill_graph_bytes(
    config: ModelConfig,
    token_counts: Sequence[int],
    *,
    dtype: torch.dtype,
    captures_attention: bool = False,
    has_adapters: bool = False,
) -> int:
    """Estimate the memory of prefill graphs of these token counts.

    Each has one segment more than there are layers. The tensors of a forward share
    memory, and so do the inputs and outputs of attention and of the stack.

    Args:
        captures_attention: count the graphs of `whole_token_counts` too, each as large
            as the segments.
        has_adapters: count the graphs of `adapted_token_counts` too.
    """
    if not token_counts:
        return 0
    live = _live_channels(config)
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    static = heads * config.head_dim + config.hidden_size
    sets = [list(token_counts)]
    if has_adapters:
        sets.append(adapted_token_counts(token_counts))
    graphs = sum(map(len, sets))
    if captures_attention:
        graphs += sum(len(whole_token_counts(counts)) for counts in sets)
    segments = graphs * (config.num_layers + 1)
    per_token = (live + static) * dtype.itemsize
    return max(token_counts) * per_token + segments * SEGMENT_BYTES


def draft_graph_bytes(
    config: ModelConfig,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    rows_per_request: int,
    kinds: int = 1,
) -> int:
    """Estimate the memory of the graphs of a draft's phase and extends, one of each per
    size and kind.

    Their results are written to the workspace; logits and activations live for one step
    and are shared.

    Args:
        rows_per_request: branches of a step, or tokens of an extend. kinds: shapes of
            trees.
    """
    if not sizes:
        return 0
    live = _live_channels(config)
    per_row = (live + config.vocab_size) * dtype.itemsize
    graphs = 2 * kinds * len(sizes) * DRAFT_GRAPH_BYTES
    return max(sizes) * rows_per_request * per_row + graphs


def expansion_bytes(
    latent: LatentConfig, *, heads: int, tokens: int, dtype: torch.dtype
) -> int:
    """Estimate the memory of attention over expanded latents: a block of latents, keys
    and values, and float32 results of the cached elements.

    Args:
        heads: heads on this rank.
        tokens: new tokens of a forward.
    """
    width = latent.width + heads * (latent.nope_dim + latent.value_dim)
    results = tokens * heads * (latent.value_dim + 1) * torch.float32.itemsize
    return max(tokens, PREFIX_BLOCK) * width * dtype.itemsize + results


def gathered_bytes(
    *, context_len: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Estimate the memory of the copy of cached K and V that a long prefill attends:
    one context in one layer.

    Args:
        kv_heads: KV heads on this rank.
    """
    return 2 * context_len * kv_heads * head_dim * dtype.itemsize


def cpu_pool_slots(
    *, context_len: int, max_running_requests: int, bytes_per_slot: int
) -> int:
    """Return the most KV slots that a pool on the CPU has without --max-total-tokens.

    At most what the running requests can fill and what `CPU_POOL_BYTES` allows, but at
    least one whole context. Anything more would take memory from other programs and be
    zeroed at start for nothing.
    """
    useful = min(max_running_requests, CPU_POOL_CONTEXTS) * context_len
    return min(useful, max(CPU_POOL_BYTES // bytes_per_slot, context_len))


def device_bytes(
    runners: Sequence[MeasuredRunner], device: str, *, watched: int = 0
) -> dict[str, int]:
    """Return where the bytes of the current CUDA device went, by use, in the order they
    are told; empty for "cpu", whose memory others use too.

    Args:
        runners: of the models on it.
        watched: what the canary keeps of their KV and states.
    """
    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    use = {
        "weights": sum(runner.weight_bytes for runner in runners),
        "KV": sum(runner.token_to_kv_pool.nbytes for runner in runners),
        "states": sum(runner.state_bytes for runner in runners),
        "canary": watched,
        "graphs": sum(runner.captured_bytes for runner in runners),
    }
    only_if_any = ("states", "canary")
    use = {name: n for name, n in use.items() if n or name not in only_if_any}
    return use | {"the rest": total - free - sum(use.values()), "free": free}


class MeasuredRunner(Protocol):
    """What `device_bytes` reads of a `ModelRunner`.

    Attributes:
        weight_bytes: that loading its weights took.
        captured_bytes: that its graphs took.
        state_bytes: of its recurrent states.
    """

    weight_bytes: int
    captured_bytes: int

    @property
    def state_bytes(self) -> int: ...

    @property
    def token_to_kv_pool(self) -> MeasuredPool: ...


class MeasuredPool(Protocol):
    @property
    def nbytes(self) -> int: ...


def _nothing(_shape: StateShape) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherBytes:
    """Device memory that a watcher of a model's pools will keep.

    Fields:
        slot: of each KV slot. head: besides, of each KV head in each slot and layer.
        state: returns those of each slot of recurrent state.
    """

    slot: int = 0
    head: int = 0
    state: Callable[[StateShape], int] = _nothing


NO_WATCHER = WatcherBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """Device memory that a draft worker will take in addition to its target's.

    Fields:
        bytes_per_slot: KV and its check records.
        graph_bytes: an estimate of its graphs.
        region_bytes: bytes of the slots that only the draft's pool has, and of what
            plain steps leave for it.
    """

    bytes_per_slot: int = 0
    graph_bytes: int = 0
    region_bytes: int = 0


NO_DRAFT_MEMORY = DraftMemory()


def no_room_for_a_page(
    args: ServerArgs, *, free_bytes: int, bytes_per_slot: int
) -> ValueError:
    """Return the error for a --mem-fraction-static that leaves less than a page."""
    beside, fix = "the weights", "raise it, or lower --page-size"
    if args.device != "cpu":
        beside += " and the CUDA graphs"
        fix += " or --cuda-graph-max-bs, or use --disable-piecewise-cuda-graph"
    return ValueError(
        f"--mem-fraction-static {args.mem_fraction_static} of "
        f"{free_bytes / 2**30:.1f} GiB leaves no room for one page of "
        f"{args.page_size} tokens ({bytes_per_slot} bytes each) beside {beside}; {fix}"
    )


@contextmanager
def explain_out_of_memory(doing: str, server_args: ServerArgs) -> Iterator[None]:
    """Turn a failing allocation inside into an error that names the flags.

    Raises:
        ValueError: the device ran out of memory while `doing`.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if server_args.device == "cpu" and _is_out_of_host_memory(error):
            raise ValueError(
                f"out of memory while {doing}: lower --max-total-tokens, "
                f"--context-length or --max-running-requests (now "
                f"{server_args.max_running_requests}), or serve a smaller model "
                f"({error})"
            ) from error
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"out of GPU memory while {doing}: lower --mem-fraction-static (now "
            f"{server_args.mem_fraction_static}), --max-running-requests (now "
            f"{server_args.max_running_requests or 'unset'}) or --cuda-graph-max-bs, "
            f"use --disable-piecewise-cuda-graph, or spread the model over more GPUs "
            f"with --tp-size ({error})"
        ) from error


def _is_out_of_host_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's CPU allocator has no error class for it.
    is_allocator = "can't allocate memory" in str(error)
    return is_allocator or isinstance(error, MemoryError)
