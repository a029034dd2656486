"""Locations of model files: the bundled demo model, a local folder, the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


# Bundled drafts of the demo model by --speculative-algorithm.
_DEMO_DRAFTS = {
    "EAGLE": "demo_model_eagle",
    "EAGLE3": "demo_model_eagle3",
    "STANDALONE": "demo_model_draft",
}


def bundled_demo_model_path() -> Path:
    """Return the folder of the demo model inside the installed package."""
    return _assets() / "demo_model"


def bundled_demo_draft_path(algorithm: str) -> Path:
    """Return the folder of the demo model's draft for a --speculative-algorithm."""
    return _assets() / _DEMO_DRAFTS[algorithm]


def _assets() -> Path:
    return Path(str(resources.files("sglang"))) / "assets"


def resolve_model_folder(path: str, *, flag: str = "--model-path") -> Path:
    """Return a local folder unchanged; download anything else as a hub name.

    Raises:
        ValueError: neither a folder with a `config.json` nor a reachable hub name.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{flag} {path}: the folder has no config.json")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"{flag} {path}: no such folder")
    # The hub client is slow to import and is needed for remote names alone.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{flag} {path}: no such folder, and the hub does not give it: {error}"
        ) from error
