"""`python -m sglang.srt.replay INCIDENT`: does it happen again?"""

from __future__ import annotations

import sys

from sglang.srt.replay.playing.command import main

if __name__ == "__main__":
    sys.exit(main())
