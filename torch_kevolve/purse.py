"""Purse: the seconds one torch.compile call may search."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FORWARD_SHARE = 0.5
"""A forward graph may spend this much of what is left: its backward comes later and is about two thirds of the work.
The rest is kept for the backward even where the forward spends more: a search confirms its best candidate after its
seconds are over, and on 2 cores that left 3 of 60 s to the backward of a cross-entropy."""
LEAST_S = 3.0
"""A search shorter than this would measure its baselines and nothing else."""
USEFUL_S = 15.0
"""What a search needs to come to anything: 5 to 11 s of baselines and a few candidates. With less for each, 60 s were
spent on eight regions and none of them was judged to its end; the coldest regions wait for another call instead."""
MOST_SHARE = 0.4
"""The hottest of several regions gets no more than this of what is left: a matrix product of 90 % of the predicted time
may have no room at all."""


class Purse:
    """Shared by all graphs and recompiles of one call. Wall-clock seconds are taken as they are spent.

    `closed`: Ctrl-C was pressed; nothing more is searched in this call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.closed = False
        self.turn = threading.Lock()
        """Held while one task is searched: two at once would disturb each other's clocks."""
        self._spent: dict[str, float] = {}

    @property
    def left(self) -> float:
        return 0.0 if self.closed else max(0.0, self.seconds - sum(self._spent.values()))

    def _room(self, phase: str) -> float:
        if phase == "forward":
            return self.left * FORWARD_SHARE
        if phase == "backward" and not self.closed:
            return max(self.left, self.seconds * (1 - FORWARD_SHARE) - self._spent.get(phase, 0.0))
        return self.left

    def allowance(self, shares: Sequence[float], phase: str) -> float:
        """Seconds for the first of several tasks with these shares of the predicted time; 0: not worth beginning."""
        room = self._room(phase)
        total = sum(shares)
        part = room * (shares[0] / total if total > 0 else 1.0 / max(1, len(shares)))
        if len(shares) > 1:
            part = min(part, max(MOST_SHARE * room, USEFUL_S))
        part = min(max(part, USEFUL_S), room)
        return part if part >= LEAST_S else 0.0

    @contextmanager
    def spending(self, phase: str) -> Iterator[None]:
        """Take what the block takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - started
