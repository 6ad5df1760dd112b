"""Template: a parametric family of kernels for a kind of task."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.task import KernelTask

Choice: TypeAlias = "int | float | bool | str"
Point: TypeAlias = Mapping[str, Choice]


@dataclass(frozen=True)
class Space:
    """What a family offers for one task: named axes with their choices, good starting points first, a renderer.

    `valid(point)` is False for points that cannot work (too much shared memory, a tile above the row ...).
    `render(point)` is pure: equal points give equal candidates. `strategies(point)` are the named moves in it.
    """

    family: str
    language: str
    axes: Mapping[str, tuple[Choice, ...]]
    render: Callable[[Point], Candidate]
    start: tuple[Point, ...] = ()
    valid: Callable[[Point], bool] = field(default=lambda point: True)
    strategies: Callable[[Point], tuple[str, ...]] = field(default=lambda point: ())

    @property
    def size(self) -> int:
        """Number of points, valid or not."""
        total = 1
        for choices in self.axes.values():
            total *= len(choices)
        return total

    def points(self) -> list[Point]:
        """All valid points; of a space above 4096 points, the starting points and a fixed random sample."""
        if self.size <= 4096:
            rows = itertools.product(*self.axes.values())
            return [point for row in rows if self.valid(point := dict(zip(self.axes, row, strict=True)))]
        dice = random.Random(0)
        sample = [{name: dice.choice(choices) for name, choices in self.axes.items()} for _ in range(4096)]
        return [*self.start, *(point for point in sample if self.valid(point))]

    def neighbours(self, point: Point) -> list[Point]:
        """Valid points that differ in one axis by one step."""
        out: list[Point] = []
        for name, choices in self.axes.items():
            place = choices.index(point[name])
            for step in (-1, 1):
                if 0 <= place + step < len(choices):
                    other = {**point, name: choices[place + step]}
                    if self.valid(other):
                        out.append(other)
        return out


class Family(Protocol):
    """A member of the template axis. It reads the TaskGraph and knows neither FX nor files."""

    name: str
    language: str

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        """The space for this task on this device, or None when the task is not of this family. Never raises."""
        ...
