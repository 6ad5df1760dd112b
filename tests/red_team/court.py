"""Court: a judge for small tasks whose layers of defence can be left out one at a time.

The judge and its references live in this process, the worker in one of its own, as in a search. Eager is the only
rival: nothing here is about speed, and samples are as short as they can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evaluation import exhibits, judge, probes
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.port import ProcessPort
from torch_kevolve.evidence import Evidence
from torch_kevolve.languages import triton
from torch_kevolve.languages.triton_source import Checked
from torch_kevolve.plan import build
from torch_kevolve.settings import Settings
from torch_kevolve.task import KernelTask

SETTINGS = Settings.make({"candidate_s": 8, "memory_fraction": 0.1}, {})


class Door:
    """A port to a shared worker; `off` names the layers of the worker's side that are left out."""

    def __init__(self, port: ProcessPort) -> None:
        self.port, self.off = port, frozenset[str]()
        self.fresh = True

    def call(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        message = dict(message)
        if "lock" in self.off and message["do"] == "load":
            message["lock"] = False
        if "limit" in self.off and message["do"] == "limit":
            return {}
        if message["do"] == "run":
            if "ghost" in self.off and message["ghost"]:
                return {"problem": "left out"}
            message["sealed"] = message["sealed"] and "seal" not in self.off
            message["poison"] = 0 if "poison" in self.off else message["poison"]
        if "walls" in self.off and message["do"] in ("setup", "draws"):
            message["draws"] = [[_without_wall(row) for row in draw] for draw in message["draws"]]
        reply = self.port.call(message, seconds)
        if "bands" in self.off:
            reply.pop("damaged", None)
        if "died" in reply:
            self.fresh = True
            self.port.spare()
        return reply

    def restart(self) -> None:
        self.port.restart()
        self.fresh = True

    def spare(self) -> None:
        """The next worker is started when one has died."""

    def settle(self, seconds: float) -> None:
        """Nothing here is about speed."""

    def close(self) -> None:
        """The worker is shared."""


def _without_wall(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "block": {**row["block"], "walled": False}}


class Same:
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _nothing(*args: Any, **more: Any) -> str:
    return ""


def _unchecked(source: str) -> Checked:
    names = tuple(line[4:].split("(")[0] for line in source.splitlines() if line.startswith("def "))
    return Checked(source, names)


HERE: dict[str, list[tuple[Any, str, Any]]] = {
    "text": [(judge, "problem_of", _nothing), (triton, "check", _unchecked)],
    "object": [(judge, "object_problem", _nothing)],
    "plan": [(judge, "plan_problem", _nothing)],
    "inputs": [(probes, "checksum", lambda block: Same())],
    "numerics": [(probes, "pooled_problem", _nothing)],
    "pattern": [(probes, "pattern_problem", _nothing)],
    "equal": [(probes, "equal_problem", _nothing)],
    "choice": [(probes, "choice_problem", _nothing)],
    "in place": [(probes.Proof, "_in_place", _nothing)],
    "timed": [(probes.Proof, "timed_problem", _nothing)],
    "strides": [(probes.Proof, "_fits", lambda *args: True)],
    "sizes": [(exhibits, "other_sizes", lambda *args: [])],
}
"""Layers of the judge's side: what is replaced, and by what."""
THERE = {"lock", "limit", "ghost", "seal", "poison", "walls", "bands"}
AT_OPENING = {"sizes", "walls", "limit"}
"""Layers that are put up when a job is opened."""


@contextmanager
def without(*layers: str) -> Iterator[None]:
    assert set(layers) <= set(HERE) | THERE, layers
    with pytest.MonkeyPatch.context() as patch:
        for layer in layers:
            for home, name, instead in HERE.get(layer, []):
                patch.setattr(home, name, instead)
        yield


class Court:
    """One worker for many jobs, one judge at a time."""

    def __init__(self) -> None:
        self.port = ProcessPort()
        self._open: dict[str, tuple[judge.Judge, Door]] = {}

    def evidence(self, task: KernelTask, binding: dict[str, int], candidate: Candidate, *off: str) -> Evidence:
        """The judge's verdict with some layers left out."""
        with without(*off):
            key = task.key + repr(binding) + repr(sorted(AT_OPENING & set(off)))
            made, door = self._judge(key, task, binding, frozenset(off))
            door.off = frozenset(off)
            if "lock" in off:
                self.port.restart()
                door.fresh = True
            ((_, evidence),) = made.evaluate([candidate])
            if "inputs" in off:
                for exhibit in made.exhibits.all:
                    made.exhibits.restore(exhibit)
            if "lock" in off:
                self.port.restart()
                door.fresh = True
        return evidence

    def close(self) -> None:
        for made, _ in self._open.values():
            made.close()
        self._open.clear()
        self.port.close()

    def _judge(
        self, key: str, task: KernelTask, binding: dict[str, int], off: frozenset[str]
    ) -> tuple[judge.Judge, Door]:
        if key not in self._open:
            door = Door(self.port)
            door.off = off
            made = judge.Judge(Job(task, binding, "cpu", time.monotonic() + 3000), SETTINGS, door)
            made._compile_arms = lambda wanted, needed=False: ""  # type: ignore[method-assign]
            made.open()
            self._open[key] = made, door
        for _, other in self._open.values():
            # The worker holds one job at a time: whoever comes next says it again.
            other.fresh = other.fresh or other is not self._open[key][1]
        return self._open[key]


@dataclass(frozen=True)
class Case:
    """A cheat. `row`: where it stands in the catalogue of known ones. `first`: the layer that catches it, at `stage`,
    with `word` in the note. `then`: what catches it with that layer off, or ONLY."""

    name: str
    row: str
    task: KernelTask
    candidate: Candidate
    first: str
    stage: Any
    word: str
    then: Any
    binding: dict[str, int] = field(default_factory=dict)


ONLY = "only layer"
NOT_RUN = "only layer, and not left out: the machine that runs the tests would pay for it"


def cpp(task: KernelTask, source: str, launch: Callable[..., Any]) -> Candidate:
    return Candidate("cpp", source, build(task, launch), Provenance("scripted"))
