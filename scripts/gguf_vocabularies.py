"""Vocabularies of published models with reference token ids, for tests.

    scripts/gguf_vocabularies.py fetch

The source distribution of llama-cpp-python carries llama.cpp's vocabularies: GGUF files
without tensors, and beside each its texts (.inp) and their token ids (.out); and its
stock grammars (.gbnf). `fetch` has pip download it, compares its hash and keeps those
files; `path` prints their folder. They are for tests only, under the licences of their
projects.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.fetched_files import FetchedFiles  # noqa: E402
from scripts.source_packages import LLAMA_CPP_PYTHON  # noqa: E402

VOCABULARIES = FetchedFiles(
    name="gguf-vocabularies",
    patterns={
        LLAMA_CPP_PYTHON: r"^[^/]+/vendor/llama\.cpp/"
        r"(models/ggml-vocab-[^/]*|grammars/[^/]*\.gbnf)$"
    },
)


if __name__ == "__main__":
    sys.exit(VOCABULARIES.main(__doc__))
