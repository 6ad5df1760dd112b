"""Progress: one line while a search runs."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Protocol

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


class Progress(Protocol):
    """Told about the search as it goes. Shows one line, keeps nothing."""

    def show(self, task: str, tried: int, best: float, seconds_left: float) -> None:
        """`task`: its short label; `best`: fastest right candidate so far as a ratio to the best baseline (0: none)."""
        ...

    def close(self) -> None:
        """Clear the line."""
        ...


class Quiet:
    """Shows nothing."""

    def show(self, task: str, tried: int, best: float, seconds_left: float) -> None:
        return None

    def close(self) -> None:
        return None


class LogLine:
    """A log record every few seconds: for pipes, notebooks and CI."""

    def __init__(self) -> None:
        self._last = 0.0

    def show(self, task: str, tried: int, best: float, seconds_left: float) -> None:
        now = time.monotonic()
        if now - self._last >= LOG_EVERY_S:
            self._last = now
            log.info(line(task, tried, best, seconds_left))

    def close(self) -> None:
        return None


class TerminalLine:
    """One line on stderr that is rewritten in place."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status: Any = Console(stderr=True).status("", spinner="dots")
        self._running = False

    def show(self, task: str, tried: int, best: float, seconds_left: float) -> None:
        self._status.update(line(task, tried, best, seconds_left))
        if not self._running:
            self._status.start()
            self._running = True

    def close(self) -> None:
        if self._running:
            self._status.stop()
            self._running = False


def line(task: str, tried: int, best: float, seconds_left: float) -> str:
    """What both members show."""
    found = f"best {best:.2f}x" if best > 0 else "none right yet"
    return f"kevolve {task}: {tried} tried, {found}, {max(0.0, seconds_left):.0f} s left (Ctrl-C keeps what is done)"


def open_progress(wanted: str) -> Progress:
    """`on`, `off` or `auto`: a line on a terminal, log records elsewhere."""
    if wanted == "off":
        return Quiet()
    if wanted == "on" or sys.stderr.isatty():
        return TerminalLine()
    return LogLine()
