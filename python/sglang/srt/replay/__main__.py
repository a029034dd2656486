"""`python -m sglang.srt.replay INCIDENT`: replay an incident to see if it recurs."""

from __future__ import annotations

import sys

from sglang.srt.replay.playing.command import main

if __name__ == "__main__":
    sys.exit(main())
