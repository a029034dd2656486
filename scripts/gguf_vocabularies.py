"""Vocabularies of published models with the token ids that are right, for tests.

    scripts/gguf_vocabularies.py fetch

The source distribution of llama-cpp-python carries llama.cpp's vocabularies: GGUF files
without tensors, and beside each its texts (.inp) and their token ids (.out). `fetch`
has pip download it (which runs its build backend for the metadata), compares its hash
and keeps those files; `path` prints their folder. They are for tests only: they have
the licences of their models.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.real_models import (  # noqa: E402
    COPY_BYTES,
    download,
    models_folder,
    say,
    unfinished,
)

PACKAGE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
MEMBERS = "*/vendor/llama.cpp/models/ggml-vocab-*"


def vocabularies_folder() -> Path:
    """The folder of the fetched files, whether it is there or not."""
    return models_folder() / "gguf-vocabularies"


def fetch() -> Path:
    """Return the folder; make it where it is not there.

    Raises:
        RuntimeError: the package cannot be had, or has another hash.
    """
    folder = vocabularies_folder()
    if folder.is_dir():
        return folder
    models_folder().mkdir(parents=True, exist_ok=True)
    with (
        unfinished(folder) as place,
        tempfile.TemporaryDirectory(dir=place.parent) as scratch,
    ):
        say(f"downloading {PACKAGE} (77 MB)")
        source = download(PACKAGE, Path(scratch), option="--no-binary")
        _check_hash(source)
        _extract(source, place)
    return folder


def _check_hash(source: Path) -> None:
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(
            f"{source.name} has the SHA-256 {found}, expected {SHA256}; nothing was "
            "kept"
        )


def _extract(source: Path, folder: Path) -> None:
    with tarfile.open(source) as package:
        for member in package:
            path = PurePosixPath(member.name)
            if not member.isfile() or not path.match(MEMBERS):
                continue
            content = package.extractfile(member)
            assert content is not None
            with content, (folder / path.name).open("wb") as target:
                shutil.copyfileobj(content, target, COPY_BYTES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("fetch", "path", "remove"))
    command = parser.parse_args().command
    try:
        if command == "remove":
            shutil.rmtree(vocabularies_folder(), ignore_errors=True)
        else:
            print(fetch() if command == "fetch" else vocabularies_folder())
    except (RuntimeError, OSError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
