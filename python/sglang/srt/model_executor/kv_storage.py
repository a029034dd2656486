"""The dtype that a model's KV is stored in, and its scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.mem_cache.kv_dtype import KV_DTYPES
from sglang.srt.model_loader.kv_scales import find_kv_scales

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

_NEEDED = (8, 9)
"""Compute capability of GPUs that convert 8 bits."""


def resolve_kv_dtype(
    server_args: ServerArgs, *, computes: torch.dtype, is_draft: bool
) -> torch.dtype:
    """Return the dtype that KV of a model that computes in `computes` is stored in.

    Raises:
        ValueError: the flag asks for a type that the model or the device lacks.
    """
    flag, name = "--kv-cache-dtype", server_args.kv_cache_dtype
    if is_draft and server_args.speculative_draft_kv_cache_dtype is not None:
        flag = "--speculative-draft-kv-cache-dtype"
        name = server_args.speculative_draft_kv_cache_dtype
    if name in KV_DTYPES:
        is_gpu = server_args.device != "cpu"
        if is_gpu and torch.cuda.get_device_capability() < _NEEDED:
            raise ValueError(
                f"{flag} {name} needs a GPU of compute capability 8.9; use auto"
            )
        return KV_DTYPES[name]
    if name == "bfloat16" and computes != torch.bfloat16:
        raise ValueError(
            f"{flag} {name}: the model computes in {computes}, and KV is stored in the "
            "compute type or in 8 bits; use --dtype bfloat16, or auto"
        )
    return computes


def set_kv_scales(
    pool: KVCache,
    server_args: ServerArgs,
    config: ModelConfig,
    *,
    is_draft: bool,
    has_file: bool,
) -> None:
    """Set the scales of a pool of 8 bits; others have none.

    Args:
        has_file: whether the weights come from files.

    Raises:
        ValueError: as `find_kv_scales`.
    """
    if pool.dtype.itemsize > 1:
        return
    scales = find_kv_scales(
        config.path,
        layers=config.attention_layers,
        param_path=None if is_draft else server_args.quantization_param_path,
        rank=get_tp_group().rank,
        has_file=has_file and server_args.load_format != "dummy",
    )
    pool.set_scales(scales)
