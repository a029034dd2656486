"""`python -m sglang.srt.kv_canary.explain FILE`: an incident in plain words."""

from __future__ import annotations

import sys

from kv_canary.explain import main
from sglang.version import VERSION_TEXT

PROG = "python -m sglang.srt.kv_canary.explain"

if __name__ == "__main__":
    sys.exit(main(prog=PROG, version=VERSION_TEXT))
