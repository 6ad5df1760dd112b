"""Processes: whether one that was killed is gone."""

import time

import psutil


def ends(pid: int, seconds: float = 30.0) -> bool:
    """Whether it ends; one that nobody has waited for yet has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
