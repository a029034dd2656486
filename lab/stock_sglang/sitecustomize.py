"""Found on `PYTHONPATH` by each Python process, also those that SGLang spawns."""

from absent_packages import stand_in

stand_in()
