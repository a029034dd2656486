"""How many slots of recurrent state a model gets, and how large they are."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.state_config import DeltaShape
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.partition import divide
from sglang.srt.mem_cache.state_pool import StateShape

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.state_config import StateConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU_CHECKPOINTS_PER_ROW = 2
"""Checkpoints of a pool on the CPU for each request row without
--max-mamba-cache-size: more would be zeroed at start for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlanSizes:
    """Slots of a state pool: `rows` of requests, then `checkpoints`."""

    rows: int
    checkpoints: int
    bytes_per_slot: int

    @property
    def slots(self) -> int:
        return self.rows + self.checkpoints

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of scratch."""
        return (self.slots + 1) * self.bytes_per_slot


def state_shape(
    config: ModelConfig, args: ServerArgs, *, dtype: torch.dtype
) -> StateShape | None:
    """Return what one slot holds on this rank, or None for models without state.

    Raises:
        ValueError: the ranks cannot share it. The message names the flag.
    """
    state = config.state
    if state is None:
        return None
    return StateShape(
        layers=state.layers,
        conv_channels=_conv_channels(state),
        conv_inputs=state.conv_width - 1,
        delta=_delta_of_rank(state),
        dtype=dtype,
        matrix_dtype=_matrix_dtype(config, args),
    )


def _conv_channels(state: StateConfig) -> int:
    return divide(state.conv_channels, get_tp_group(), what="channels of state").size


def _delta_of_rank(state: StateConfig) -> DeltaShape | None:
    delta, group = state.delta, get_tp_group()
    if delta is None:
        return None
    return DeltaShape(
        heads=divide(delta.heads, group, what="linear_num_value_heads").size,
        key_heads=divide(delta.key_heads, group, what="linear_num_key_heads").size,
        d_k=delta.d_k,
        d_v=delta.d_v,
    )


def _matrix_dtype(config: ModelConfig, args: ServerArgs) -> torch.dtype:
    """Return --mamba-ssm-dtype, or the checkpoint's, or float32."""
    name = args.mamba_ssm_dtype or config.raw.get("mamba_ssm_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(
            f"{config.file}: mamba_ssm_dtype {name!r} is not supported; use "
            f"--mamba-ssm-dtype with one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def rows_with_states(shape: StateShape, args: ServerArgs, *, available: int) -> int:
    """Return how many requests can run with as many checkpoints beside them; of a
    number of states that is given, all of them without a prefix cache.

    Args:
        available: bytes for states and KV.
    """
    given, ratio = args.max_mamba_cache_size, args.mamba_full_memory_ratio
    if given is not None and args.disable_radix_cache:
        return given
    share = int(available * ratio / (1 + ratio)) // shape.bytes_per_slot
    return max((given or share) // 2, 1)


def plan_states(
    shape: StateShape,
    args: ServerArgs,
    *,
    rows: int,
    available: int,
    watched: int = 0,
) -> StatePlanSizes:
    """Divide memory between states and KV.

    Args:
        rows: requests that run at once.
        available: bytes for both.
        watched: bytes that a watcher keeps of each slot.

    Raises:
        ValueError: not every running request would get a state, or the prefix cache no
            checkpoint. The message names the flag and the number that fits.
    """
    slot = shape.bytes_per_slot + watched
    least = rows if args.disable_radix_cache else rows + 1
    given = args.max_mamba_cache_size
    if given is not None:
        if given < least:
            raise ValueError(
                f"--max-mamba-cache-size {given}: {rows} running requests"
                f"{'' if args.disable_radix_cache else ' and one checkpoint'} need "
                f"{least} states; raise it, or lower --max-running-requests to "
                f"{max(given - (least - rows), 1)}"
            )
        if args.disable_radix_cache and given > rows:
            raise ValueError(
                f"--max-mamba-cache-size {given} asks for {given - rows} cached states "
                f"beside those of {rows} running requests, which --disable-radix-cache "
                f"rules out; use {rows}, or raise --max-running-requests to {given}"
            )
        slots = given
    else:
        ratio = args.mamba_full_memory_ratio
        share = int(available * ratio / (1 + ratio))
        slots = share // slot - 1
        if slots < least:
            raise ValueError(
                f"--mamba-full-memory-ratio {ratio} leaves {max(share, 0) / 2**30:.2f} "
                f"GiB for states of {slot / 2**20:.2f} MiB each, and {rows} running "
                f"requests{'' if args.disable_radix_cache else ' and one checkpoint'} "
                f"need {least}: {_raised(available, (least + 1) * slot)}lower "
                f"--max-running-requests to {max(slots - (least - rows), 1)}"
            )
    if args.disable_radix_cache:
        slots = rows
    elif args.device == "cpu" and given is None:
        slots = min(slots, rows * (1 + CPU_CHECKPOINTS_PER_ROW))
    sizes = StatePlanSizes(rows=rows, checkpoints=slots - rows, bytes_per_slot=slot)
    if sizes.nbytes > available:
        raise ValueError(
            f"--max-mamba-cache-size {given} needs {sizes.nbytes / 2**30:.2f} GiB, but "
            f"{available / 2**30:.2f} GiB are free; use at most "
            f"{max(available // slot - 1, 0)}"
        )
    logger.info(
        "Recurrent state: %d request rows and %d checkpoints of %.2f MiB each",
        sizes.rows,
        sizes.checkpoints,
        slot / 2**20,
    )
    return sizes


def _raised(available: int, needed: int) -> str:
    """Return the advice to raise the ratio, if another one fits."""
    if needed >= available:
        return ""
    # Rounded up in its third digit.
    ratio = math.ceil(1000 * needed / (available - needed)) / 1000
    return f"raise it to {ratio:g}, or "


def refuse_draft_with_state(config: ModelConfig) -> None:
    """Raise ValueError for a draft that keeps a state: its branches would need one
    each."""
    if config.state is not None:
        raise ValueError(
            f"--speculative-draft-model-path {config.path}: {config.architecture} "
            "keeps a recurrent state, and a draft must not; choose another draft"
        )
