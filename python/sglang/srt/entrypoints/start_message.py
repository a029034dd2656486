"""The lines that say what a server is starting and, later, what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.sampling_defaults import describe
from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import SchedulerReady
    from sglang.srt.server_args import ServerArgs


def starting(args: ServerArgs) -> str:
    """The first lines: model, device, drafts and canary, before anything is loaded."""
    return (
        f"sglang-canary {__version__} loads {args.model_path} on {_device(args)}\n"
        f"{_drafts(args)}; {_canary(args)}"
    )


def serving(
    args: ServerArgs,
    ready: SchedulerReady,
    *,
    url: str,
    sampling_defaults: Mapping[str, Any],
) -> str:
    """The last lines: limits of the running engine, the checkpoint's recommended
    sampling, and addresses.
    """
    pages = "" if args.page_size == 1 else f" in pages of {args.page_size}"
    size = f"{ready.kv_pool_bytes / 2**30:.2f} GiB"
    each = "" if args.tp_size == 1 else " on each rank"
    return (
        f"sglang-canary serves {args.served_model_name} on {_device(args)}: "
        f"{ready.max_total_num_tokens} KV slots{pages} ({size}{each}), context "
        f"{ready.context_len}, at most {ready.max_running_requests} requests at once\n"
        f"{_drafts(args)}; {_canary(args)}\n"
        f"{_memory(ready)}"
        f"{_sampling(sampling_defaults)}"
        f"{_places(args, url)}\n"
        f"ready on {url}"
    )


def _memory(ready: SchedulerReady) -> str:
    """Where the memory of a GPU went."""
    if not ready.device_bytes:
        return ""
    total = sum(ready.device_bytes.values()) / 2**30
    parts = (f"{use} {n / 2**30:.2f}" for use, n in ready.device_bytes.items())
    return f"GPU memory of {total:.2f} GiB: {', '.join(parts)}\n"


def _sampling(defaults: Mapping[str, Any]) -> str:
    if not defaults:
        return ""
    return (
        f"requests that do not say otherwise are sampled as the checkpoint recommends: "
        f"{describe(defaults)} (--sampling-defaults openai ignores it)\n"
    )


def _places(args: ServerArgs, url: str) -> str:
    """The server's pages for people."""
    places = {"chat": url, "API": f"{url}/docs"}
    if args.enable_metrics:
        places["metrics"] = f"{url}/metrics"
    if has_inspector(args):
        places["inspector"] = f"{url}/canary"
    return ", ".join(f"{name}: {place}" for name, place in places.items())


def has_inspector(args: ServerArgs) -> bool:
    """Whether the server shows the KV cache at `/canary`."""
    return not args.disable_canary_page


def _device(args: ServerArgs) -> str:
    ranks = "" if args.tp_size == 1 else f"{args.tp_size} ranks, "
    dtype = "the checkpoint's dtype" if args.dtype == "auto" else args.dtype
    return f"{args.device} ({ranks}{dtype}, {args.attention_backend})"


def _drafts(args: ServerArgs) -> str:
    if args.speculative_algorithm is None:
        return "no speculative decoding"
    shape = args.tree_shape
    drafts = "adaptive drafts of up to" if args.speculative_adaptive else "drafts of"
    return (
        f"{args.speculative_algorithm} {drafts} {shape.num_steps} steps, top-k "
        f"{shape.topk}, {shape.num_draft_tokens} tokens verified at once"
    )


def _canary(args: ServerArgs) -> str:
    if args.kv_canary == "none":
        return "KV canary off"
    return f"KV canary {args.kv_canary} (real data {args.kv_canary_real_data})"
