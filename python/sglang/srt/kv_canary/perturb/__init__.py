"""Fault injection: the door of the room `sglang.faults`.

`opened` plants what environment variables ask for; `driver_of` gives the driver of one
canary, which plants a fault of the catalogue on demand.
"""

from sglang.faults.attachment import driver_of, drivers_of, join_recording
from sglang.faults.driver import PerturbDriver
from sglang.faults.room import opened

__all__ = ["PerturbDriver", "driver_of", "drivers_of", "join_recording", "opened"]
