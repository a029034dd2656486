"""Loaded from `PYTHONPATH` by each Python process, including those SGLang spawns."""

from absent_packages import stand_in

stand_in()
