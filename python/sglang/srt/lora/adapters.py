"""The adapters of a running engine: by name for clients, by content in memory."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.arg_groups.lora_hook import (
    ALL_MODULES,
    TARGET_MODULES,
    adapter_paths,
    check_adapter_name,
)
from sglang.srt.layers.linear import Linear
from sglang.srt.lora.adapter_config import AdapterConfig, read_adapter_config
from sglang.srt.lora.adapter_file import AdapterTensors, read_adapter
from sglang.srt.lora.layout import AdapterLayout
from sglang.srt.lora.pool import AdapterPool, PackedPool
from sglang.srt.lora.stacked_pool import StackedPool
from sglang.srt.managers.messages.io_struct import LoraRef
from sglang.srt.models.llama import LoadableModel
from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.models.registry import CausalLM
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# No digest has this form.
_REHEARSED = "rehearsed"


class Adapters:
    """Loads and forgets adapters.

    Args:
        max_rank: largest rank of an adapter.
        max_loaded: most adapters at once, or None.

    Attributes:
        pool: their memory.
    """

    def __init__(
        self, pool: AdapterPool[Any], *, max_rank: int, max_loaded: int | None
    ) -> None:
        self.pool = pool
        self._max_rank = max_rank
        self._max_loaded = max_loaded
        self._by_name: dict[str, LoraRef] = {}

    @property
    def loaded(self) -> list[LoraRef]:
        return list(self._by_name.values())

    def load(self, name: str, path: str) -> LoraRef:
        """Load the adapter in a folder.

        Raises:
            ValueError: the name is in use, there are too many adapters, or the adapter
                does not fit the model; nothing has changed.
        """
        check_adapter_name(name, "the name of an adapter")
        if name in self._by_name:
            raise ValueError(
                f"an adapter {quoted(name)} is loaded; unload it first, or choose "
                "another name"
            )
        if self._max_loaded is not None and len(self._by_name) >= self._max_loaded:
            raise ValueError(
                f"{len(self._by_name)} adapters are loaded, as many as "
                "--max-loaded-loras allows; unload one first"
            )
        return self._load(name, read_adapter_config(Path(path)))

    def _load(self, name: str, config: AdapterConfig) -> LoraRef:
        pool = self.pool
        adapter = read_adapter(
            config, pool.layout, max_rank=self._max_rank, dtype=pool.dtype
        )
        if adapter.revision not in pool:
            pool.add(adapter)
        ref = LoraRef(name=name, path=str(config.folder), revision=adapter.revision)
        self._by_name[name] = ref
        logger.info(
            "Loaded adapter %s (rank %d, revision %s) from %s",
            quoted(name),
            adapter.rank,
            ref.revision,
            ref.path,
        )
        return ref

    def unload(self, name: str) -> None:
        """Forget an adapter that no request uses.

        Raises:
            ValueError: it is not loaded.
        """
        ref = self._by_name.pop(name, None)
        if ref is None:
            raise ValueError(f"no adapter {quoted(name)} is loaded")
        if ref.revision not in {other.revision for other in self.loaded}:
            self.pool.remove(ref.revision)

    @contextmanager
    def rehearsing(self) -> Iterator[LoraRef]:
        """Scope with one more adapter, of zeros, which no client knows. Nothing is left
        of it; its requests must have ended, and others begun, before the scope
        does."""
        before = self.pool.num_placed
        self.pool.add(AdapterTensors(pairs={}, rank=1, revision=_REHEARSED))
        yield LoraRef(name=_REHEARSED, path="", revision=_REHEARSED)
        self.pool.remove(_REHEARSED)
        self.pool.num_placed = before

    def check(self, ref: LoraRef) -> None:
        """
        Raises:
            ValueError: the adapter is not loaded, or its content is another.
        """
        if ref.revision not in self.pool:
            raise ValueError(
                f"the adapter {quoted(ref.name)}, revision {ref.revision}, is not "
                "loaded"
            )


def create_adapters(
    model: CausalLM, server_args: ServerArgs, *, dtype: torch.dtype, device: str
) -> Adapters | None:
    """Make room for adapters in the layers of `model` and load those of the flags;
    None without --enable-lora.

    Raises:
        ValueError: the model cannot have adapters, or one of them does not fit; names
            the flag or the file.
    """
    args = server_args
    if not args.enable_lora:
        return None
    if not isinstance(model, LoadableModel):
        raise ValueError(
            f"--enable-lora: {type(model).__name__} cannot have adapters; remove the "
            "flag"
        )
    configs = {
        entry.name: read_adapter_config(Path(entry.path))
        for entry in adapter_paths(args.lora_paths)
    }
    layout = AdapterLayout(model, _targets(args, model, configs.values()))
    rank = args.max_lora_rank or max(config.rank for config in configs.values())
    options: dict[str, Any] = {
        "num_slots": args.max_loras_per_batch,
        "evicts_oldest": args.lora_eviction_policy == "fifo",
    }
    is_packed = all(module.linear.packed is not None for module in layout.modules)
    pool: AdapterPool[Any]
    if is_packed:
        pool = PackedPool(layout, **options)
    else:
        pool = StackedPool(layout, **options, rank=rank, dtype=dtype, device=device)
        pool.warm_up()
    adapters = Adapters(pool, max_rank=rank, max_loaded=args.max_loaded_loras)
    for name, config in configs.items():
        adapters._load(name, config)
    return adapters


def _targets(
    args: ServerArgs, model: LoadableModel, configs: Iterable[AdapterConfig]
) -> list[str]:
    """Return the modules to make room for: those of the flag, or of the adapters, or
    all that the model has."""
    asked = args.lora_target_modules
    named: set[str] = set()
    for config in configs:
        named |= config.targets or _every_target(model)
    if asked is None:
        return sorted(named or _every_target(model))
    return sorted(_every_target(model) if ALL_MODULES in asked else set(asked))


def _every_target(model: LoadableModel) -> set[str]:
    """Return the modules of the model that can have adapters."""
    leaves = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, Linear) and module.takes_adapters
    }
    packed = {leaf for leaf, (own, _) in model.packed_modules.items() if own in leaves}
    return (leaves | packed) & set(TARGET_MODULES)
