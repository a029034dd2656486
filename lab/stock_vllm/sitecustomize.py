"""Loaded from `PYTHONPATH` by each Python process, including those vLLM spawns."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "stock_sites"))

from absent import VLLM  # noqa: E402
from absent_packages import stand_in  # noqa: E402

stand_in(VLLM)
