"""Where model files are: the bundled demo model, a local folder, or the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def bundled_demo_model_path() -> Path:
    """Folder of the demo model inside the installed package."""
    return Path(str(resources.files("sglang"))) / "assets" / "demo_model"


def resolve_model_folder(path: str) -> Path:
    """A local folder as it is; anything else is taken as a hub name and downloaded.

    Raises:
        ValueError: neither a folder with a `config.json` nor a reachable hub name.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model-path {path}: the folder has no config.json")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"--model-path {path}: no such folder")
    # The hub client is slow to import and is needed for remote names alone.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"--model-path {path}: no such folder, and the hub does not give it: "
            f"{error}"
        ) from error
