"""Reads the `adapter_config.json` of a `peft` adapter, which may come from anybody."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.lora_hook import TARGET_MODULES
from sglang.srt.utils.checked_values import REQUIRED, ConfigValues, Key
from sglang.srt.utils.json_file import parse_json_object, read_text_file, shown
from sglang.srt.utils.quoting import clipped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 12

_KEYS: dict[str, Key] = {
    "peft_type": Key(str, default=REQUIRED),
    "r": Key(int, 1, MAX_RANK, REQUIRED),
    "lora_alpha": Key(float, 1e-6, 1e6, REQUIRED),
    "use_rslora": Key(bool, default=False),
    "rank_pattern": Key(dict),
    "bias": Key(str, default="none"),
    "fan_in_fan_out": Key(bool, default=False),
}
# Features of peft that change the product, and their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": (),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "megatron_config": (),
    "lora_bias": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """How an adapter's tensors are applied.

    Fields:
        folder: where the adapter is.
        rank: rank of its modules, unless `has_ranks`.
        alpha, is_rank_stable: the scale is alpha / rank, or alpha / sqrt(rank).
        targets: names of the adapted modules, or None if their tensors decide.
        has_ranks: whether modules may have other ranks.
        is_whole: whether every layer has the modules of `targets`.
    """

    folder: Path
    rank: int
    alpha: float
    is_rank_stable: bool
    targets: frozenset[str] | None
    has_ranks: bool
    is_whole: bool

    def scale(self, rank: int) -> float:
        """Return the factor of a module's product."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stable else rank)


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Scope whose errors of the disk become ValueErrors that name the folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{clipped(str(folder))}: {error.strerror}") from error


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the configuration of the adapter in `folder`. No other path in the file is
    followed.

    Raises:
        ValueError: the file is missing, too large, not JSON, or asks for something that
            is not served; names file, key and value.
    """
    file = folder / CONFIG_FILE
    with naming(folder):
        is_folder = folder.is_dir()
    if not is_folder:
        raise ValueError(
            f"{clipped(str(folder))} is not a folder; name one with {CONFIG_FILE} and "
            "adapter_model.safetensors, as peft writes it"
        )
    text = read_text_file(file, max_bytes=MAX_CONFIG_BYTES)
    raw = parse_json_object(text, where=str(file))
    values = ConfigValues(file, raw, keys=_KEYS)
    if (kind := values.get("peft_type")) != "LORA":
        raise ValueError(f"{file}: peft_type is {shown(kind)}; only LORA is served")
    for name, neutral in _UNSUPPORTED.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            raise values.wrong(name, "is not served; leave it out")
    if values.get("bias") != "none":
        raise values.wrong("bias", 'must be "none"')
    if values.get("fan_in_fan_out"):
        raise values.wrong("fan_in_fan_out", "must be false")
    return AdapterConfig(
        folder=folder,
        rank=values.get("r"),
        alpha=values.get("lora_alpha"),
        is_rank_stable=values.get("use_rslora"),
        targets=_targets(values, raw.get("target_modules")),
        has_ranks=bool(values.get("rank_pattern")),
        is_whole=raw.get("layers_to_transform") is None
        and raw.get("exclude_modules") in (None, []),
    )


def _targets(values: ConfigValues, given: Any) -> frozenset[str] | None:
    """Return the names in a list of module names; None for a pattern."""
    if given is None or isinstance(given, str):
        return None
    is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
    if not is_list or not given:
        raise values.wrong("target_modules", "must be a list of module names")
    # peft compares the ends of names.
    names = frozenset(name.rpartition(".")[2] for name in given)
    unknown = sorted(names - set(TARGET_MODULES))
    if unknown:
        raise values.error(
            "target_modules",
            f"names {shown(unknown[:8])}; adapters of {', '.join(TARGET_MODULES)} are "
            "served",
        )
    return names
