"""Hooks: what lowering asks of whoever compiles.

Lowering finds regions and puts kernels in; who writes, proves and keeps the kernels is not its business. The backend
hands it these callables. All of them may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_kevolve.kernel import Kernel
from torch_kevolve.record import RegionVerdict
from torch_kevolve.sizes import Json
from torch_kevolve.task import KernelTask


@dataclass(frozen=True)
class Wanted:
    """One task of one graph that a kernel could serve. Equal regions are one Wanted with a `count`.

    `binding`: the sizes of this call. `share`: of the graph's predicted time, all `count` regions together, 0 to 1.
    `seconds`: predicted time of one region at the device's ceilings. `phase`: inference, forward or backward.
    `device`: as torch writes it. `frozen`: the graph's weights are constants.
    """

    task: KernelTask
    binding: Mapping[str, int]
    share: float
    count: int
    phase: str
    device: str
    seconds: float = 0.0
    anchor: str = ""
    frozen: bool = False


@dataclass(frozen=True)
class Choice:
    """What shall stand in a region. `kernel` None: the region stays with Inductor and `reason` says why, as a slug.

    `ratio`: measured speed over the best baseline. `undecided`: a later, harder search may still change the verdict.
    """

    kernel: Kernel | None = None
    reason: str = ""
    ratio: float | None = None
    undecided: bool = False
    detail: str = ""


def _no_claim(task: KernelTask, binding: Mapping[str, int]) -> bool:
    return False


def _no_kernel(wanted: Sequence[Wanted]) -> dict[str, Choice]:
    return {each.task.key: Choice(reason="no-kernel") for each in wanted}


def _no_note(phase: str, verdicts: Sequence[RegionVerdict]) -> None:
    return None


def _no_gate(phase: str, verdict: Mapping[str, Json]) -> None:
    return None


def _no_fault(reason: str, error: Exception) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """The callables of one `torch.compile` call.

    claims(task, binding): does any family have a space for this task? Asked for grown regions first, then smaller.
    choose(wanted): a Choice for the key of every Wanted; it may search, and take its time.
    note(phase, verdicts): the regions of one graph, once it is decided which of them were replaced.
    gate(phase, verdict): the whole-graph gate's outcome: `{"kept": arm, "ms": {arm: median}, ...}`.
    fault(reason, error): a failure of our own that left something to Inductor. Raise from it to make it an error.
    uuid: names what the pass will do to the graph, for Inductor's caches; None bypasses them, so the pass always runs.
    `gate_on` False: kernels stay without a whole-graph race. `arms`: option sets to race besides, by name.
    `known_gate`: the arm that a record says won, by phase: nothing is raced again.
    `buckets`: kernels may be for the bucket of this call's dynamic sizes, and a guard may say so.
    `skip`: operator names and task key prefixes that are left alone. `min_share`: colder regions are not asked for.
    """

    claims: Callable[[KernelTask, Mapping[str, int]], bool] = _no_claim
    choose: Callable[[Sequence[Wanted]], Mapping[str, Choice]] = _no_kernel
    note: Callable[[str, Sequence[RegionVerdict]], None] = _no_note
    gate: Callable[[str, Mapping[str, Json]], None] = _no_gate
    fault: Callable[[str, Exception], None] = _no_fault
    uuid: str | None = None
    numerics: str = "default"
    gate_on: bool = True
    arms: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    known_gate: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    min_share: float = 0.005
    buckets: bool = False
