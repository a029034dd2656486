"""`--enable-lora` and the flags of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.arg_groups.arg_parser import Synonym
from sglang.srt.utils.json_file import parse_json_object
from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.server_args import ServerArgs

MAX_NAME_CHARS = 256
TARGET_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""The modules that adapters may adapt."""

ALL_MODULES = "all"
LORA_BACKENDS = tuple(
    Synonym(name, "triton", "adapters have one backend here")
    for name in ("csgmv", "torch_native", "triton_v2")
)
# Flags that mean nothing without adapters, and their neutral values.
_NEED_LORA: dict[str, Any] = {
    "lora_paths": None,
    "max_lora_rank": None,
    "lora_target_modules": None,
    "max_loaded_loras": None,
}


class AdapterPath(NamedTuple):
    """A name and the folder of its adapter."""

    name: str
    path: str


def settle_lora_paths(server_args: ServerArgs) -> None:
    """Turn `lora_paths` into a list of texts where Python gives a dict, or a list that
    holds dicts of SGLang's form."""
    given: Any = server_args.lora_paths
    if isinstance(given, dict):
        server_args.lora_paths = [f"{name}={path}" for name, path in given.items()]
    elif isinstance(given, list):
        server_args.lora_paths = [
            f"{entry.get('lora_name')}={entry.get('lora_path')}"
            if isinstance(entry, dict)
            else entry
            for entry in given
        ]


def adapter_paths(given: Sequence[str] | None) -> list[AdapterPath]:
    """Parse --lora-paths: NAME=PATH, a path that is also the name, or an object with
    `lora_name` and `lora_path`.

    Raises:
        ValueError: names the flag, the value and the fix.
    """
    found: dict[str, AdapterPath] = {}
    for text in given or ():
        name, path = _split(text)
        check_adapter_name(name, f"--lora-paths {quoted(text)}: the name")
        if name in found:
            raise ValueError(f"--lora-paths names {quoted(name)} twice; rename one")
        found[name] = AdapterPath(name, path)
    return list(found.values())


def _split(text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        entry = parse_json_object(text, where="--lora-paths")
        name, path = entry.get("lora_name"), entry.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str):
            raise ValueError(
                f"--lora-paths {quoted(text)}: an object needs lora_name and lora_path"
            )
        return name, path
    name, is_pair, path = text.partition("=")
    if not is_pair:
        return text, text
    if not path:
        raise ValueError(f"--lora-paths {quoted(text)}: write NAME=PATH")
    return name, path


def check_adapter_name(name: str, what: str) -> None:
    """
    Raises:
        ValueError: the name cannot be asked for; begins with `what`.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"{what} must have 1 to {MAX_NAME_CHARS} printable characters, got "
            f"{quoted(name)}"
        )


def handle_lora(server_args: ServerArgs) -> None:
    """Check the flags; --lora-paths switches adapters on.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    args = server_args
    paths = adapter_paths(args.lora_paths)
    args.enable_lora = args.enable_lora or bool(paths)
    if not args.enable_lora:
        for name, neutral in _NEED_LORA.items():
            if getattr(args, name) != neutral:
                raise ValueError(
                    f"--{name.replace('_', '-')} {quoted(getattr(args, name))} needs "
                    "--enable-lora; add it, or remove the flag"
                )
        return
    if not paths and args.max_lora_rank is None:
        raise ValueError(
            "--enable-lora without --lora-paths does not tell how large adapters will "
            "be; add --max-lora-rank, such as 64"
        )
    known = (*TARGET_MODULES, ALL_MODULES)
    for module in args.lora_target_modules or ():
        if module not in known:
            raise ValueError(
                f"--lora-target-modules {quoted(module)} is unknown; choose from "
                f"{', '.join(known)}"
            )
    most = args.max_loaded_loras
    if most is not None and most < len(paths):
        raise ValueError(
            f"--max-loaded-loras {most} is less than the {len(paths)} adapters of "
            "--lora-paths; raise it"
        )
