"""`python -m sglang.srt.kv_canary.explain FILE`: an incident in plain words."""

from __future__ import annotations

import sys

from kv_canary.explain import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m sglang.srt.kv_canary.explain"))
