"""One graph: its record, the pass's name, the hooks.

A graph's forward and backward are compiled at different times, the backward lazily; they share one record, one frozen
uuid and one purse.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torch_kevolve.devices import current
from torch_kevolve.lowering import inductor
from torch_kevolve.lowering.dispatch import Dispatch
from torch_kevolve.lowering.graph_key import graph_key
from torch_kevolve.lowering.hooks import Choice, Hooks, Wanted
from torch_kevolve.purse import Purse
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.session import BROKEN, Session
from torch_kevolve.settings import VERSION, Settings
from torch_kevolve.sizes import Json
from torch_kevolve.tally import TALLY
from torch_kevolve.task import digest

log = logging.getLogger(__name__)
WAYS: Mapping[str, Mapping[str, object]] = {"max_autotune": {"max_autotune": True, "coordinate_descent_tuning": True}}
"""Inductor's own option sets that change no semantics, raced beside the kernels when the user asked for no mode."""


@dataclass
class OneGraph:
    """One Dynamo graph on its way through the backend."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    settings: Settings
    patches: dict[str, Any]
    purse: Purse
    phases: dict[str, tuple[RegionVerdict, ...]] = field(default_factory=dict)
    gates: dict[str, Json] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    recorded: dict[str, RegionVerdict] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self) -> Callable[..., Any]:
        """The compiled graph. Raises what Inductor raises; a failure of our own only under on_error "raise"."""
        record = dispatch = None
        try:
            session = Session.open(self.settings)
            device = device_of(self.inputs, self.gm)
            dispatch = Dispatch.now() if self.settings.buckets == "on" else None
            buckets = dispatch is not None and dispatch.bucketed
            key = graph_key(self.gm, self._facts(device), buckets)
            record = None if key is None else session.store.get_record(key)
            hooks = replace(self._hooks(session, device, key, record), buckets=buckets)
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            log.warning("Inductor alone compiles this graph: %s: %s", type(error).__name__, error)
            TALLY.leave("backend")
            hooks = Hooks(uuid=digest({"kevolve": VERSION, "puts in": "nothing"}))
        gm, inputs = self.gm, self.inputs
        # The hooks live as long as the backward may still be compiled; the user's tensors shall not.
        self.gm, self.inputs = fx.GraphModule({}, fx.Graph()), ()
        made = inductor.compile(gm, inputs, hooks, self.patches)
        self._settle(dispatch)
        if hooks.uuid is not None:
            self._count_the_rest()
        return made

    def _settle(self, dispatch: Dispatch | None) -> None:
        try:
            if dispatch is not None:
                dispatch.settle()
        except Exception as error:
            self._fault("dispatch", error)

    def _count_the_rest(self) -> None:
        """Where Inductor's caches answered, the pass did not run: the record says what is in the graph."""
        with self.lock:
            rest = {phase: rows for phase, rows in self.phases.items() if phase not in self.counted}
            self.counted.update(rest)
        for rows in rest.values():
            TALLY.note(rows)

    def _facts(self, device: str) -> dict[str, Json]:
        return {
            "kevolve": VERSION,
            "settings": self.settings.semantic,
            "patches": {name: repr(value) for name, value in sorted(self.patches.items())},
            "device": current(device).fingerprint().key,
        }

    def _hooks(self, session: Session, device: str, key: str | None, record: GraphRecord | None) -> Hooks:
        uuid = None if record is None else self._uuid(session, device, record)
        known: dict[str, str] = {}
        if record is not None and uuid is not None:
            # What is not compiled anew this time stays as it was recorded.
            self.gates.update(record.gate)
            for verdict in record.regions:
                self.phases[verdict.phase] = (*self.phases.get(verdict.phase, ()), verdict)
                if verdict.task is not None:
                    self.recorded[verdict.task] = verdict
            known = {phase: str(gate["kept"]) for phase, gate in record.gate.items() if "kept" in gate}
        return Hooks(
            claims=lambda task, binding: session.claims(task, binding, device),
            choose=lambda wanted: self._choose(session, wanted),
            note=lambda phase, verdicts: self._note(session, device, key, phase, verdicts),
            gate=self._gate,
            fault=self._fault,
            uuid=uuid,
            numerics=self.settings.numerics,
            gate_on=self.settings.gate == "on",
            arms={} if self.patches else WAYS,
            known_gate=known,
            skip=tuple(word.strip() for word in self.settings.skip.split(",") if word.strip()),
        )

    def _uuid(self, session: Session, device: str, record: GraphRecord) -> str | None:
        """None while this effort may change a verdict, or where a kernel came or went; else what the pass puts in."""
        # Where nothing is searched nothing is open: of a pipeline's ranks each has graphs that no other one compiles.
        left = record.open_to(self.settings.effort, self.settings.budget.seconds) if session.may_search else ()
        for verdict in left:
            if verdict.reason not in BROKEN or not session.given_up(str(verdict.task), device):
                return None
        fingerprint = current(device).fingerprint()
        found = {task: session.store.get(task, fingerprint) for task in record.tasks}
        kernels = {task: None if kernel is None else kernel.key for task, kernel in found.items()}
        # A region whose kernel did not make the graph faster holds that kernel's key and is not raced again for it.
        known = {r.task: r.kernel for r in record.regions if r.task is not None}
        gone = any(r.status == "replaced" and kernels[str(r.task)] is None for r in record.regions)
        if gone or any(now is not None and now != known.get(task) for task, now in kernels.items()):
            return None
        verdicts = sorted(f"{r.phase} {r.task} {r.status} {r.kernel}" for r in record.regions)
        gates = {phase: gate.get("kept") for phase, gate in record.gate.items()}
        return digest({
            "kevolve": VERSION, "settings": self.settings.semantic, "soft": current(device).soft(),
            "kernels": kernels, "verdicts": verdicts, "gates": gates,
        })  # fmt: skip

    def _choose(self, session: Session, wanted: Sequence[Wanted]) -> Mapping[str, Choice]:
        try:
            # The frozen name says what is in the graph: nothing is searched for under it.
            known = [each for each in wanted if each.task.key in self.recorded]
            settled = session.settled(known, self.recorded, self.purse)
            rest = [each for each in wanted if each.task.key not in settled]
            return {**session.choose(rest, self.purse, self._fault), **settled}
        except Exception as error:
            self._fault("session", error)
            return {each.task.key: session.broken(each, error) for each in wanted}

    def _note(
        self, session: Session, device: str, key: str | None, phase: str, verdicts: Sequence[RegionVerdict]
    ) -> None:
        stamped = tuple(self._stamped(verdict) for verdict in verdicts)
        with self.lock:
            new = phase not in self.counted
            self.counted.add(phase)
            self.phases[phase] = stamped
            regions = tuple(v for name in sorted(self.phases) for v in self.phases[name])
            gates = dict(self.gates)
        if new:
            TALLY.note(stamped)
        if key is not None:
            session.store.put_record(GraphRecord(key, current(device).fingerprint().key, regions, gates))

    def _stamped(self, verdict: RegionVerdict) -> RegionVerdict:
        """A region that was left says how hard it was searched for; what a closed record said of it stands."""
        if verdict.status != "left":
            return verdict
        old = self.recorded.get(verdict.task or "")
        if old is not None and old.reason == verdict.reason:
            return replace(verdict, effort=old.effort, budget_s=old.budget_s)
        return replace(verdict, effort=self.settings.effort, budget_s=self.settings.budget.seconds)

    def _gate(self, phase: str, verdict: Mapping[str, Json]) -> None:
        with self.lock:
            self.gates[phase] = dict(verdict)
        TALLY.raced(phase, verdict)

    def _fault(self, reason: str, error: Exception) -> None:
        if self.settings.on_error == "raise":
            raise error
        TALLY.leave(reason)
        trace = error if log.isEnabledFor(logging.DEBUG) else None
        log.warning("left to Inductor (%s): %s: %s", reason, type(error).__name__, error, exc_info=trace)


def device_of(inputs: Sequence[Any], gm: fx.GraphModule) -> str:
    """The device of a graph, as torch writes it: a GPU if any tensor is on one."""
    found = [x.device for x in (*inputs, *gm.parameters(), *gm.buffers()) if isinstance(x, torch.Tensor)]
    return next((str(device) for device in found if device.type == "cuda"), "cpu")
