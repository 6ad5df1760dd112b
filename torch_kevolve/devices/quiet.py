"""Quiet: wait for others to leave the processor before something is measured on it."""

from __future__ import annotations

import time

from torch_kevolve.devices.base import Device

BUSY = 0.15
"""Share of all cores at which others disturb a measurement: at 0.5 of two, medians of equal arms differed by 8 %."""


def wait_for_quiet(device: Device, seconds: float) -> float:
    """Wait, for so many seconds at most, until others take less than BUSY of a CPU; what they still take, 0 to 1.

    Processes of our own count as others: one that starts in the background takes 2 of 2 cores for 3 s, in which the
    race of a compiled graph saw 8.0, 9.2 and 14.6 ms for arms of 1.1 to 1.2 ms.
    """
    until = time.monotonic() + seconds
    load = device.load()
    while device.name == "cpu" and load > BUSY and time.monotonic() < until:
        time.sleep(0.1)
        load = device.load()
    return load
