"""Locations of the demo model's files: the defaults of every script.

Knows nothing about the files' contents.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
CORPUS = BUILD / "corpus"
PACK = BUILD / "pack"
RUN = BUILD / "run"
ASSETS = HERE.parents[1] / "python" / "sglang" / "assets" / "demo_model"

ENDOFTEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
# The order fixes the ids: 0, 1, 2.
SPECIAL_TOKENS = (ENDOFTEXT, IM_START, IM_END)
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = range(3)
