"""Runner: the trusted hand inside the worker.

It maps the judge's tensors, compiles the baseline arms, runs the candidate and samples times. Every message is a plain
dict and so is every reply. What the candidate's code could do to this process is why the judge lives in another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices import current
from torch_kevolve.evaluation.guard import GuardedBuffers
from torch_kevolve.evaluation.measure import interleave
from torch_kevolve.evaluation.memory import attach, place
from torch_kevolve.evaluation.reference import to_module
from torch_kevolve.languages import LANGUAGES
from torch_kevolve.languages.base import Built, Launcher
from torch_kevolve.languages.replay import Replay
from torch_kevolve.sizes import Json, bind
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)
MODES: Mapping[str, str | None] = {"inductor": None, "max_autotune": "max-autotune-no-cudagraphs"}


class Runner:
    """One job at a time. `handle` never raises for a candidate's fault: the reply then has `problem`."""

    def __init__(self) -> None:
        self.task: KernelTask | None = None
        self.inputs: list[tuple[Tensor, ...]] = []
        self.outs: list[Tensor] = []
        self.arms: dict[str, Callable[[], Any]] = {}
        self.device = "cpu"
        self._launcher: Launcher | None = None
        self._candidate: Candidate | None = None

    def handle(self, message: Mapping[str, Any]) -> Json:
        verb = message["do"]
        if verb not in ("setup", "compile", "load", "run", "time"):
            return {"problem": f"unknown verb {verb!r}"}
        try:
            with torch.no_grad():
                reply: dict[str, Any] = getattr(self, f"_{verb}")(message)
                return reply
        except MemoryError:
            return {"problem": "out of memory"}
        except Exception as error:  # a candidate's failure is a value; a judge that reads it decides
            return {"problem": f"{type(error).__name__}: {error}"[:1000]}

    def _setup(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.task = KernelTask.from_json(message["task"])
        self.device = message["device"]
        self.inputs = [
            tuple(place(attach(row["block"]), row) for row in draw) for draw in message["draws"]
        ]
        self.outs = [attach(block) for block in message["outs"]]
        module = to_module(self._at(self.inputs[0]))
        self.arms = {"eager": lambda: module(*self.inputs[0])}
        return {}

    def _compile(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Compile one Inductor arm at the job's sizes."""
        name = message["arm"]
        module = to_module(self._at(self.inputs[0]))
        mode = MODES[name]
        compiled = torch.compile(module, dynamic=False, **({} if mode is None else {"mode": mode}))
        started = time.perf_counter()
        compiled(*self.inputs[0])
        current(self.device).synchronize()
        self.arms[name] = lambda: compiled(*self.inputs[0])
        return {"seconds": time.perf_counter() - started}

    def _load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        candidate = Candidate.from_json(message["candidate"])
        self._candidate, self._launcher = candidate, None
        if candidate.plan.kernels:
            built = Built(Path(message["artifact"]))
            self._launcher = LANGUAGES[candidate.language]().load(built, candidate)
        replay = self._replay()
        self.arms["candidate"] = lambda: replay(*self.inputs[0])
        return {}

    def _run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run on one draw; outputs are copied to the judge's blocks. `ghost`: launches do nothing."""
        buffers = GuardedBuffers(message.get("poison"))
        inputs = self.inputs[message["draw"]]
        replay = self._replay(buffers, ghost=bool(message.get("ghost")))
        outputs = replay(*inputs)
        current(self.device).synchronize()
        rows = []
        for out, block in zip(outputs, self.outs, strict=True):
            strides = list(torch.empty(out.shape, device="meta").stride())
            row = {"dtype": str(out.dtype).removeprefix("torch."), "shape": list(out.shape), "strides": strides}
            rows.append({**row, "own": list(out.stride())})
            if out.numel() * out.element_size() > block.numel():
                return {"problem": f"an output of {list(out.shape)} is larger than the task's"}
            place(block, row).copy_(out)
        current(self.device).synchronize()
        return {"outs": rows, "launches": replay.launches, "damaged": buffers.damaged()}

    def _time(self, message: Mapping[str, Any]) -> dict[str, Any]:
        arms = {name: self.arms[name] for name in message["arms"]}
        return {"samples": interleave(arms, current(self.device), message["seconds"], message.get("least", 7))}

    def _replay(self, buffers: GuardedBuffers | None = None, ghost: bool = False) -> Replay:
        assert self.task is not None and self._candidate is not None
        launcher = (lambda *_: None) if ghost else self._launcher
        allocate = buffers if buffers is not None else torch.empty_strided
        return Replay(self._candidate.plan, self.task, launcher, allocate)

    def _at(self, inputs: tuple[Tensor, ...]) -> KernelTask:
        assert self.task is not None
        specs = self.task.graph.inputs
        return self.task.at(bind((s.shape, tuple(t.shape)) for s, t in zip(specs, inputs, strict=True)))
