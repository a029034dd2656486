"""The model, version and flags that a record and a machine must share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.environ import set_variables
from sglang.srt.replay.recording.record_file import Origin
from sglang.srt.utils.paths import resolve_model_path
from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.lora.adapters import Adapters
    from sglang.srt.replay.recording.source import RecordedScheduler
    from sglang.srt.server_args import ServerArgs

# Variables that change what a replay does.
VARIABLES = ("SGLANG_KV_CANARY_", "SGLANG_DEBUG_REVERT_PR")
# Flags that must not be recorded.
_SECRET = frozenset({"api_key", "admin_api_key", "api_key_file"})
_HEADER_BYTES = 65536


def digest_models(server_args: ServerArgs) -> dict[str, str]:
    """Return digests of the models by role."""
    paths = {
        "target": server_args.model_path,
        "draft": server_args.speculative_draft_model_path,
    }
    return {
        role: model_digest(resolve_model_path(path))
        for role, path in paths.items()
        if path is not None
    }


def model_digest(path: Path) -> str:
    """Return a digest of the configuration and of the weight files' names, sizes and
    first bytes (which contain the tensor index); for a GGUF file, only of the file.
    """
    digest = hashlib.sha256()
    files = [path]
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
        files = sorted(path.glob("*.safetensors"))
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_HEADER_BYTES))
    return digest.hexdigest()


def describe_origin(
    scheduler: RecordedScheduler, *, rank: int, has_tokens: bool
) -> Origin:
    """Return the origin of this scheduler's records."""
    args, runner = scheduler.server_args, scheduler.worker.model_runner
    return Origin(
        version=__version__,
        torch=str(torch.__version__),
        models=digest_models(args),
        device=args.device,
        rank=rank,
        num_slots=runner.max_total_num_tokens,
        page_size=runner.allocator.page_size,
        vocab_size=runner.model_config.vocab_size,
        max_in_flight=scheduler.max_in_flight,
        # Another machine would choose another number of rows.
        server_args=_public_flags(args)
        | {"max_running_requests": runner.max_running_requests},
        environment=set_variables(VARIABLES),
        has_tokens=has_tokens,
    )


def adapter_flags(adapters: Adapters | None) -> dict[str, Any]:
    """Return the flag that loads the present adapters, also those of run time."""
    if adapters is None:
        return {}
    entries = [
        {"lora_name": ref.name, "lora_path": ref.path} for ref in adapters.loaded
    ]
    return {"lora_paths": [json.dumps(entry) for entry in entries]}


def _public_flags(args: ServerArgs) -> dict[str, Any]:
    names = [field.name for field in fields(args)]
    return {name: getattr(args, name) for name in names if name not in _SECRET}


def differences(origin: Origin, *, models: dict[str, str]) -> list[str]:
    """Describe how this installation and these models differ from a record's."""
    found = []
    if origin.version != __version__:
        found.append(
            f"it was recorded by version {origin.version}, this is {__version__}"
        )
    for role in sorted(origin.models.keys() | models.keys()):
        recorded, own = origin.models.get(role), models.get(role)
        if recorded != own:
            found.append(
                f"the {role} model is another one: its configuration and weights have "
                f"digest {_short(own)}, the recorded one {_short(recorded)}"
            )
    return found


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
