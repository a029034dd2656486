"""`python -m sglang.srt.kv_canary.replay INCIDENT`: a name of `sglang.srt.replay`.

That package is of a higher layer: it is run, and not imported.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("sglang.srt.replay", run_name="__main__")
