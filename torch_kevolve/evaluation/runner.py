"""Runner: the trusted hand inside the worker.

It maps the judge's tensors, compiles the baseline arms, runs the candidate and samples times. Every message is a plain
dict and so is every reply. What the candidate's code could do to this process is why the judge lives in another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices import current
from torch_kevolve.evaluation.guard import GuardedBuffers
from torch_kevolve.evaluation.measure import interleave
from torch_kevolve.evaluation.memory import attach, place
from torch_kevolve.evaluation.reference import to_module
from torch_kevolve.evaluation.switches import Switches
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
        self.frozen = False
        self.timed: list[int] = [0]
        self._turn = 0
        self._blocks: dict[str, Tensor] = {}
        self._launcher: Launcher | None = None
        self._candidate: Candidate | None = None

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        """All blocks that inputs lie in."""
        return tuple(self._blocks.values())

    def handle(self, message: Mapping[str, Any]) -> Json:
        verb = message["do"]
        if verb not in ("setup", "draws", "compile", "load", "run", "time"):
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
        Switches.of(dict(self.task.flags)).put()
        self.device, self.frozen = message["device"], bool(message["frozen"])
        self.inputs, self.timed = [], [int(number) for number in message["timed"]]
        self._draws(message)
        self.outs = [attach(block) for block in message["outs"]]
        module = to_module(self._at(self.inputs[0]))
        self.arms = {"eager": self._alternating(module)}
        return {}

    def _draws(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """More inputs. A block that two draws share (weights) is mapped once: its address says that it is the same."""
        for draw in message["draws"]:
            self.inputs.append(tuple(place(self._block(row["block"]), row) for row in draw))
        return {}

    def _block(self, handle: Mapping[str, Any]) -> Tensor:
        key = repr(handle)
        if key not in self._blocks:
            self._blocks[key] = attach(handle)
        return self._blocks[key]

    def _alternating(self, call: Callable[..., Any], skip: frozenset[int] = frozenset()) -> Callable[[], Any]:
        """An arm: one call on the next of the timed draws, without the inputs that it holds as constants."""
        sets = [tuple(x for number, x in enumerate(self.inputs[draw]) if number not in skip) for draw in self.timed]

        def arm() -> Any:
            self._turn += 1
            return call(*sets[self._turn % len(sets)])

        return arm

    def _compile(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Compile one Inductor arm at the job's sizes; frozen jobs with freezing really on."""
        name = message["arm"]
        task = self._at(self.inputs[0])
        weights = {n: self.inputs[0][n] for n, spec in enumerate(task.graph.inputs) if spec.frozen and self.frozen}
        module = to_module(task, weights=weights).eval()
        compiled = torch.compile(module, dynamic=False, mode=MODES[name])
        arm = self._alternating(compiled, frozenset(weights))
        started = time.perf_counter()
        with torch._inductor.config.patch(freezing=bool(weights)):
            arm()
        device = current(self.device)
        device.synchronize()
        device.give_back()  # autotuning leaves some GB that the judge's references need
        self.arms[name] = arm
        return {"seconds": time.perf_counter() - started}

    def _load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        candidate = Candidate.from_json(message["candidate"])
        self._candidate, self._launcher = candidate, None
        if candidate.plan.kernels:
            built = Built(Path(message["artifact"]))
            self._launcher = LANGUAGES[candidate.language]().load(built, candidate)
        self.arms["candidate"] = self._alternating(self._replay())
        return {}

    def _run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run on one draw; outputs are copied to the judge's blocks. `ghost`: launches do nothing."""
        buffers = GuardedBuffers(message.get("poison"))
        replay = self._replay(buffers, ghost=bool(message.get("ghost")))
        outputs = replay(*self.inputs[message["draw"]])
        current(self.device).synchronize()
        rows = self._deliver(outputs)
        return {"outs": rows, "launches": replay.launches, "damaged": buffers.damaged()}

    def _time(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Samples of all arms; then one more call of the candidate, in the same state of memory, for the judge."""
        arms = {name: self.arms[name] for name in message["arms"]}
        device = current(self.device)
        samples = interleave(arms, device, message["seconds"], message.get("least", 7), lock=False)
        reply: dict[str, Any] = {"samples": samples}
        if "candidate" in arms:
            outputs = self._replay()(*self.inputs[self.timed[-1]])
            device.synchronize()
            reply["outs"] = self._deliver(outputs)
        return reply

    def _deliver(self, outputs: Sequence[Tensor]) -> list[Json]:
        """Copy outputs, dense, to the judge's blocks, and say what they are."""
        rows = []
        for out, block in zip(outputs, self.outs, strict=True):
            strides = list(torch.empty(out.shape, device="meta").stride())
            row = {"dtype": str(out.dtype).removeprefix("torch."), "shape": list(out.shape), "strides": strides}
            rows.append({**row, "own": list(out.stride())})
            if out.numel() * out.element_size() <= block.numel():
                place(block, row).copy_(out)
        current(self.device).synchronize()
        return rows

    def _replay(self, buffers: GuardedBuffers | None = None, ghost: bool = False) -> Replay:
        assert self.task is not None and self._candidate is not None
        launcher = (lambda *_: None) if ghost else self._launcher
        allocate = buffers if buffers is not None else torch.empty_strided
        return Replay(self._candidate.plan, self.task, launcher, allocate)

    def _at(self, inputs: tuple[Tensor, ...]) -> KernelTask:
        assert self.task is not None
        specs = self.task.graph.inputs
        return self.task.at(bind((s.shape, tuple(t.shape)) for s, t in zip(specs, inputs, strict=True)))
