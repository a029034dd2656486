"""Locations of model files: the bundled demo model, local files, the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from tempfile import TemporaryFile

from sglang.srt.utils.gguf_header import is_gguf

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


def page_folders(page: str) -> tuple[Path, Path]:
    """Return the folders with a server page's files: its own and the shared one."""
    return _assets() / page, _assets() / "shared"


def bundled_demo_draft_path(algorithm: str) -> Path:
    """Return the folder of the demo model's draft for a --speculative-algorithm."""
    return _assets() / _DEMO_DRAFTS[algorithm]


def _assets() -> Path:
    return Path(str(resources.files("sglang"))) / "assets"


def resolve_model_path(path: str, *, flag: str = "--model-path") -> Path:
    """Return a local folder or GGUF file; download anything else as a hub name.

    Raises:
        ValueError: it is not a folder with a `config.json`, a GGUF file or a reachable
            hub name.
    """
    place = Path(path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            files = ", ".join(file.name for file in gguf_files(place)[:8])
            hint = f"; it holds {files}: name such a file" if files else ""
            raise ValueError(
                f"{flag} {path}: the folder has no config.json"
                f"{hint or '; name the folder that holds it and the weights'}"
            )
        return place
    if is_gguf(place) and place.is_file():
        return place
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(
            f"{flag} {path}: no such folder or GGUF file; name one, or a model of the "
            "hub as OWNER/NAME"
        )
    # The hub client is slow to import and is only needed for remote names.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{flag} {path}: no such folder, and the hub does not give it ({reason}); "
            "check name and network, or name a folder"
        ) from error


def resolve_gguf_file(path: str) -> Path:
    """Return the GGUF file that --load-format gguf reads: the path, or the only one in
    a folder.

    Raises:
        ValueError: there are no or several GGUF files; names them.
    """
    place = Path(path)
    if place.is_file() and is_gguf(place):
        return place
    files = gguf_files(place) if place.is_dir() else []
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ValueError(
            f"--load-format gguf: {path} holds {len(files)} GGUF files ({names}); name "
            "one of them in --model-path"
        )
    raise ValueError(
        f"--load-format gguf: --model-path {path} is neither a .gguf file nor a local "
        "folder with one"
    )


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder, sorted."""
    return sorted(file for file in folder.iterdir() if is_gguf(file))


def private_folder(path: str, *, flag: str) -> Path:
    """Return the folder named by a flag, creating it with owner-only access if missing.

    Raises:
        ValueError: it cannot be created or written to; names the flag.
    """
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be created: {error}") from error
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written to: {error}") from error
    return folder
