"""Vocabularies of published models with the token ids that are right, for tests.

    scripts/gguf_vocabularies.py fetch

The source distribution of llama-cpp-python carries llama.cpp's vocabularies: GGUF files
without tensors, and beside each its texts (.inp) and their token ids (.out); and its
stock grammars (.gbnf). `fetch` has pip download it, compares its hash and keeps those
files; `path` prints their folder. They are for tests only: they have the licences of
their projects.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.real_models import (  # noqa: E402
    COPY_BYTES,
    models_folder,
    say,
    unfinished,
)
from scripts.source_packages import LLAMA_CPP_PYTHON  # noqa: E402

FILES = r"^[^/]+/vendor/llama\.cpp/(models/ggml-vocab-[^/]*|grammars/[^/]*\.gbnf)$"


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
    with unfinished(folder) as place:
        say("downloading the source distribution of llama-cpp-python (77 MB)")
        for name, content in LLAMA_CPP_PYTHON.files(FILES):
            with (place / name).open("wb") as target:
                shutil.copyfileobj(content, target, COPY_BYTES)
    return folder


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
