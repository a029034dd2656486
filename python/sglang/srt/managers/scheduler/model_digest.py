"""A digest of loaded models: of everything besides tokens that their KV depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.model_loader.weight_utils import weight_files
from sglang.srt.utils.hashing import hash_file

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

DIGEST_BYTES = 16
# Flags that change what weights become.
_LOADING = (
    *("load_format", "dtype", "quantization", "fp8_gemm_runner_backend"),
    "speculative_draft_model_quantization",
)


def loading_flags(server_args: ServerArgs) -> str:
    """Return in words how weights are loaded."""
    return ", ".join(f"{name} {getattr(server_args, name)}" for name in _LOADING)


def kv_identity(*, model: bytes, loading: str, layout: bytes) -> bytes:
    """Return a digest of everything besides tokens that KV depends on, 16 bytes.

    Args:
        model: `model_digest`. loading: `loading_flags`.
        layout: digest of what is kept.
    """
    return blake2b(layout + model + loading.encode(), digest_size=DIGEST_BYTES).digest()


def model_digest(server_args: ServerArgs, runners: Sequence[ModelRunner]) -> bytes:
    """Return a digest of the models' files and configurations, 16 bytes. Reads all
    files."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    is_dummy = server_args.load_format == "dummy"
    for runner in runners:
        config = runner.model_config
        digest.update(json.dumps(config.raw, sort_keys=True, default=str).encode())
        for group in runner.token_to_kv_pool.groups:
            digest.update(repr(sorted(group.tensors.scales.items())).encode())
        for found in () if is_dummy else _file_digests(config.path):
            digest.update(found)
    return digest.digest()


def _file_digests(path: Path) -> list[bytes]:
    """Return digests of a model's weight files, which are hashed side by side."""
    if path.is_file():
        files = [path]
    else:
        # A mock model has none.
        files = weight_files(path) if any(path.glob("*.safetensors")) else []
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_file_digest, files))


def _file_digest(file: Path) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    hash_file(digest, file)
    return digest.digest()
