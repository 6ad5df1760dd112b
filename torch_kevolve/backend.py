"""Backend: the door of torch.compile."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_kevolve.devices import current
from torch_kevolve.log import configure
from torch_kevolve.lowering import inductor
from torch_kevolve.lowering.graph_key import graph_key
from torch_kevolve.lowering.hooks import Choice, Hooks, Wanted
from torch_kevolve.lowering.options import split
from torch_kevolve.purse import Purse
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.session import Session
from torch_kevolve.settings import VERSION, Settings
from torch_kevolve.sizes import Json
from torch_kevolve.tally import TALLY
from torch_kevolve.task import digest

log = logging.getLogger(__name__)
WAYS: Mapping[str, Mapping[str, object]] = {"max_autotune": {"max_autotune": True, "max_autotune_gemm": True}}
"""Inductor's own option sets that change no semantics, raced beside the kernels when the user asked for no mode."""

_LOCK = threading.Lock()
_REGIONS: list[RegionVerdict] = []
_PURSES: dict[int, Purse] = {}


def kevolve(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph: `torch.compile(model, backend="kevolve", mode=..., options={...})`.

    Raises UnknownOption and BadSetting for options that cannot be used, and whatever Inductor raises. A failure of our
    own leaves its region to Inductor unless `kevolve.on_error` is "raise".
    """
    configure()
    settings, patches = split(how.get("mode"), how.get("options"))
    call = _Call(gm, inputs, settings, patches, _purse(settings, how))
    return call.compile()


def metrics() -> dict[str, Any]:
    """Counters of this process: regions, replaced, hits, misses, searches, candidates; `left`: {reason: count}."""
    return TALLY.read()


def report_regions() -> list[RegionVerdict]:
    """The verdict of every region compiled in this process since the last `reset_metrics`, in order."""
    with _LOCK:
        return list(_REGIONS)


def reset_metrics() -> None:
    """Set all counters to zero and forget the regions."""
    TALLY.clear()
    with _LOCK:
        _REGIONS.clear()


def explain(model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Compile `model` for these inputs and say what became of each region.

    Returns `{"regions": [{"task", "status", "reason", "kernel", "ratio", ...}]}`. Searches as far as the effort in
    `options` or the environment allows; with effort none it searches nothing.
    """
    before = len(report_regions())
    torch._dynamo.reset()
    given: dict[str, Any] = {"options": dict(options)} if options else {}
    with torch.no_grad() if not _trains(model, args) else torch.enable_grad():
        torch.compile(model, backend="kevolve", **given)(*args, **kwargs)
    return {"regions": [_row(verdict) for verdict in report_regions()[before:]]}


def _row(verdict: RegionVerdict) -> dict[str, Any]:
    return {
        "task": verdict.task,
        "status": verdict.status,
        "reason": verdict.reason,
        "kernel": verdict.kernel,
        "ratio": verdict.ratio,
        "anchor": verdict.anchor,
        "phase": verdict.phase,
        "share": verdict.share,
        "detail": verdict.detail,
    }


def _trains(model: object, args: Sequence[Any]) -> bool:
    tensors = [*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *args]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


@dataclass
class _Call:
    """One graph on its way through the backend. Forward and backward come at different times and share the record."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    settings: Settings
    patches: dict[str, Any]
    purse: Purse
    phases: dict[str, tuple[RegionVerdict, ...]] = field(default_factory=dict)
    gates: dict[str, Json] = field(default_factory=dict)
    recorded: GraphRecord | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self) -> Callable[..., Any]:
        try:
            session = Session.open(self.settings)
            device = _device(self.inputs, self.gm)
            key = graph_key(self.gm, self._facts(device))
            record = None if key is None else session.store.get_record(key)
            hooks = self._hooks(session, device, key, record)
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            log.warning("Inductor alone compiles this graph: %s: %s", type(error).__name__, error)
            TALLY.leave("backend")
            hooks = Hooks()
        made = inductor.compile(self.gm, self.inputs, hooks, self.patches)
        if self.recorded is not None:
            # Inductor's caches answered, so the pass did not run: the record says what is in the graph.
            with self.lock:
                absent = [r for r in self.recorded.regions if r.phase not in self.phases]
                self.phases.update({r.phase: () for r in absent})
            _count(absent)
        return made

    def _facts(self, device: str) -> dict[str, Json]:
        return {
            "kevolve": VERSION,
            "settings": self.settings.semantic,
            "patches": {name: repr(value) for name, value in sorted(self.patches.items())},
            "device": current(device).fingerprint().key,
        }

    def _hooks(self, session: Session, device: str, key: str | None, record: GraphRecord | None) -> Hooks:
        uuid = None if record is None else self._uuid(session, device, record)
        self.recorded = record if uuid is not None else None
        skip = tuple(word.strip() for word in self.settings.skip.split(",") if word.strip())
        known = {} if record is None or uuid is None else {p: str(g["kept"]) for p, g in record.gate.items() if "kept" in g}
        return Hooks(
            claims=lambda task, binding: session.claims(task, binding, device),
            choose=lambda wanted: self._choose(session, wanted),
            note=lambda phase, verdicts: self._note(session, device, key, phase, verdicts),
            gate=lambda phase, verdict: self._gate(phase, verdict),
            fault=self._fault,
            uuid=uuid,
            numerics=self.settings.numerics,
            gate_on=self.settings.gate == "on",
            arms={} if self.patches else WAYS,
            known_gate=known,
            skip=skip,
        )

    def _uuid(self, session: Session, device: str, record: GraphRecord) -> str | None:
        """None while this effort may still change a verdict; else a digest of what the pass would put in."""
        if self.settings.effort != "none" and record.undecided:
            return None
        fingerprint = current(device).fingerprint()
        kernels = {}
        for task in record.tasks:
            kernel = session.store.get(task, fingerprint)
            kernels[task] = None if kernel is None else kernel.key
        was = {r.task: r.kernel for r in record.regions if r.task is not None and r.status == "replaced"}
        gained = [task for task, now in kernels.items() if now is not None and now != was.get(task)]
        left = {r.task for r in record.regions if r.status == "left" and r.reason == "graph-not-faster"}
        if [task for task in gained if task not in left]:
            return None  # a kernel came since: run the pass and the gate again
        return digest({"kevolve": VERSION, "settings": self.settings.semantic, "kernels": kernels, "was": sorted(map(str, was.values()))})

    def _choose(self, session: Session, wanted: Sequence[Wanted]) -> Mapping[str, Choice]:
        try:
            return session.choose(wanted, self.purse)
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            self._fault("session", error)
            return {each.task.key: Choice(reason="session", undecided=True, detail=str(error)[:300]) for each in wanted}

    def _note(
        self, session: Session, device: str, key: str | None, phase: str, verdicts: Sequence[RegionVerdict]
    ) -> None:
        with self.lock:
            counted = phase in self.phases and self.recorded is not None
        if not counted:
            _count(verdicts)
        with self.lock:
            self.phases[phase] = tuple(verdicts)
            regions = tuple(v for name in sorted(self.phases) for v in self.phases[name])
            gates = dict(self.gates)
        if key is not None:
            session.store.put_record(GraphRecord(key, current(device).fingerprint().key, regions, gates))

    def _gate(self, phase: str, verdict: Mapping[str, Json]) -> None:
        with self.lock:
            self.gates[phase] = dict(verdict)

    def _fault(self, reason: str, error: Exception) -> None:
        TALLY.leave(reason)
        log.warning("left to Inductor (%s): %s: %s", reason, type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
        if self.settings.on_error == "raise":
            raise error


def _count(verdicts: Sequence[RegionVerdict]) -> None:
    with _LOCK:
        _REGIONS.extend(verdicts)
    for verdict in verdicts:
        TALLY.add("regions")
        if verdict.status == "replaced":
            TALLY.add("replaced")
        else:
            TALLY.leave(verdict.reason)


def _device(inputs: Sequence[Any], gm: fx.GraphModule) -> str:
    """The device of the graph: a GPU if any tensor is on one."""
    found = [x.device for x in (*inputs, *gm.parameters(), *gm.buffers()) if isinstance(x, torch.Tensor)]
    gpu = [device for device in found if device.type == "cuda"]
    if gpu:
        return str(gpu[0])
    return "cpu"


def _purse(settings: Settings, how: Mapping[str, Any]) -> Purse:
    """The purse of the torch.compile call we are in: found by the wrapper object that Dynamo calls us through."""
    owner = _owner(how)
    with _LOCK:
        purse = _PURSES.get(owner)
        if purse is None or purse.seconds != settings.budget.seconds:
            purse = _PURSES[owner] = Purse(settings.budget.seconds)
        return purse


def _owner(how: Mapping[str, Any]) -> int:
    frame = sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("self") if frame.f_code.co_name == "__call__" else None
        if type(held).__name__ == "_TorchCompileWrapper":
            return id(held)
        frame = frame.f_back  # type: ignore[assignment]
    return id(how.get("options"))

