"""Exhibits: the inputs, references and buffers of one job, and what a candidate's outputs must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.inputs import Draw, draws, make, nbytes, other_sizes, special_draws
from torch_kevolve.evaluation.memory import Arena, checksum, describe, extent, place
from torch_kevolve.evaluation.port import Port
from torch_kevolve.evaluation.reference import interpret
from torch_kevolve.evaluation.verify import (
    Pool,
    equal_problem,
    pattern_problem,
    pooled_problem,
    strict_problem,
)
from torch_kevolve.evidence import Errors, Stage
from torch_kevolve.settings import Settings
from torch_kevolve.sizes import Json, evaluate
from torch_kevolve.task import KernelTask, Ref

MANY = 2**22
"""Above this many elements an output's pooled errors are steady, and three draws tell what eight would."""
GATHERS = ("aten.embedding.default", "aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
POISONS = (0xFF, 0x3C)
"""0xFF.. is a NaN in every float type and -1 in every integer; 0x3C.. a small positive number."""


@dataclass
class Exhibit:
    """One draw: inputs in shared blocks, the fp64 reference, eager's outputs and the inputs' checksums."""

    draw: Draw
    inputs: tuple[Tensor, ...]
    rows: list[Json]
    blocks: list[Tensor]
    exact: tuple[Tensor, ...]
    twin: tuple[Tensor, ...]
    special: bool
    sums: list[int] = field(default_factory=list)


class Exhibits:
    """Everything the judge compares with. `renew` makes all of it again from another seed."""

    def __init__(self, job: Job, settings: Settings, seed: int) -> None:
        self.job, self.settings, self.seed = job, settings, seed
        self.arena = Arena(job.device)
        self.all: list[Exhibit] = []
        self._outs: list[tuple[Tensor, Json]] = []
        self._mine: list[Pool] = []
        self._twin: list[Pool] = []
        self.renew(seed)

    @property
    def task(self) -> KernelTask:
        return self.job.task

    def renew(self, seed: int) -> None:
        """Raises EvaluationError when the job is larger than the memory that a search may use."""
        self.seed = seed
        self.arena.close()
        self.arena = Arena(self.job.device)
        allowed = self.memory_allowed()
        # Inputs, outputs, and fp64 copies of what the reference holds at once: about eight times the job's bytes.
        if 8 * nbytes(self.task, self.job.binding) > allowed:
            raise EvaluationError(detail=f"the job needs more than {allowed / 2**30:.1f} GiB, the share it may use")
        self.all = [self._exhibit(draw, special) for draw, special in self._plan()]
        largest = [0] * len(self.task.graph.outputs)
        for exhibit in self.all:
            for index, out in enumerate(exhibit.twin):
                largest[index] = max(largest[index], out.numel() * out.element_size())
        self._outs = [self.arena.block(size) for size in largest]

    def memory_allowed(self) -> int:
        """Bytes that a search may use: a share of what is free."""
        if self.job.device.startswith("cuda"):
            free = torch.cuda.mem_get_info(torch.device(self.job.device))[0]
        else:
            free = psutil.virtual_memory().available
        return int(self.settings.memory_fraction * free)

    def bytes_moved(self) -> int:
        """The least traffic: every input and output once, gathered tables not counted."""
        graph = self.task.graph
        tables = {_index(op.args[0]) for op in graph.ops if op.target in GATHERS}
        inputs = [spec for place_, spec in enumerate(graph.inputs) if place_ not in tables]
        return sum(evaluate(spec.nbytes, self.job.binding) for spec in (*inputs, *graph.output_specs))

    def setup_message(self) -> Json:
        return {
            "do": "setup",
            "task": self.task.to_json(),
            "device": self.job.device,
            "draws": [exhibit.rows for exhibit in self.all],
            "outs": [handle for _, handle in self._outs],
        }

    def errors(self) -> tuple[Errors, ...]:
        return tuple(pool.errors() for pool in self._mine)

    def errors_twin(self) -> tuple[Errors, ...]:
        return tuple(pool.errors() for pool in self._twin)

    def close(self) -> None:
        self.all.clear()
        self._outs.clear()
        self.arena.close()

    def verify(self, candidate: Candidate, port: Port, seconds: float) -> tuple[Stage, str]:
        """Run every draw. The stage that refused and why; (DONE, "") when all is right."""
        self._mine = [Pool() for _ in self.task.graph.outputs]
        self._twin = [Pool() for _ in self.task.graph.outputs]
        first: list[Tensor] = []
        for number, exhibit in enumerate(self.all):
            stage, why, outs = self._run(port, number, exhibit, POISONS[number % 2], seconds)
            if why:
                return stage, why
            why = self._compare(exhibit, outs)
            if why:
                return Stage.VERIFY, f"{why} ({exhibit.draw.distribution}, sizes {dict(exhibit.draw.binding) or 'fixed'})"
            if number == 0:
                first = [out.clone() for out in outs]
        why = self._pooled()
        if why:
            return Stage.VERIFY, why
        return self._probe(candidate, port, seconds, first)

    def _plan(self) -> list[tuple[Draw, bool]]:
        binding = self.job.binding
        pooled = draws(binding, self.seed)
        if max((evaluate(spec.numel, binding) for spec in self.task.graph.output_specs), default=0) > MANY:
            pooled = [pooled[0], pooled[3], pooled[5]]
        plan = [(draw, False) for draw in pooled]
        for number, other in enumerate(other_sizes(self.task.symbols, binding)):
            plan.append((draws(other, self.seed + 50 + number)[number % 8], False))
        plan.extend((draw, True) for draw in special_draws(binding, self.seed))
        return plan

    def _exhibit(self, draw: Draw, special: bool) -> Exhibit:
        device = self.job.device
        rows, blocks, inputs = [], [], []
        for made in make(self.task, draw, device):
            block, handle = self.arena.block(extent(made) * made.element_size())
            row = describe(made)
            home = place(block, row)
            if made.numel():
                flat = made.as_strided((extent(made),), (1,))
                block[: flat.numel() * flat.element_size()].view(made.dtype).copy_(flat)
            rows.append({**row, "block": handle})
            blocks.append(block)
            inputs.append(home)
        task = self.task.at(dict(draw.binding))
        with torch.no_grad():
            twin = interpret(task.twin or task.graph, inputs)
            exact = interpret(task.graph, inputs, exact=True)
        sums = [checksum(block) for block in blocks]
        return Exhibit(draw, tuple(inputs), rows, blocks, exact, twin, special, sums)

    def _run(
        self, port: Port, number: int, exhibit: Exhibit, poison: int, seconds: float, ghost: bool = False
    ) -> tuple[Stage, str, list[Tensor]]:
        for block, _ in self._outs:
            block.fill_(poison)
        message = {"do": "run", "draw": number, "poison": poison, "ghost": ghost}
        reply = port.call(message, seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return Stage.LAUNCH, str(why), []
        try:
            outs = self._outputs(reply, exhibit)
        except EvaluationError as error:
            return Stage.VERIFY, str(error), []
        if reply.get("damaged"):
            return Stage.PROBE, str(reply["damaged"]), []
        if [checksum(block) for block in exhibit.blocks] != exhibit.sums:
            self._restore(exhibit)
            return Stage.PROBE, "an input was changed", []
        return Stage.DONE, "", outs

    def _outputs(self, reply: dict[str, Any], exhibit: Exhibit) -> list[Tensor]:
        rows = reply.get("outs")
        if not isinstance(rows, list) or len(rows) != len(exhibit.twin):
            raise EvaluationError(detail="the reply names no outputs")
        outs = []
        for place_, (row, (block, _), twin) in enumerate(zip(rows, self._outs, exhibit.twin, strict=True)):
            want = describe(torch.empty(twin.shape, dtype=twin.dtype, device="meta"))
            if not isinstance(row, dict) or any(row.get(name) != want[name] for name in want):
                raise EvaluationError(detail=f"output {place_} is not {want['dtype']}{want['shape']}")
            outs.append(place(block, want))
        return outs

    def _restore(self, exhibit: Exhibit) -> None:
        for home, made in zip(exhibit.blocks, make(self.task, exhibit.draw, self.job.device), strict=True):
            if made.numel():
                flat = made.as_strided((extent(made),), (1,))
                home[: flat.numel() * flat.element_size()].view(made.dtype).copy_(flat)

    def _compare(self, exhibit: Exhibit, outs: Sequence[Tensor]) -> str:
        for place_, (y, twin, exact) in enumerate(zip(outs, exhibit.twin, exhibit.exact, strict=True)):
            if self.task.numerics == "strict":
                why = strict_problem(y, twin)
            elif not y.is_floating_point():
                why = equal_problem(y, twin)
            else:
                why = pattern_problem(y, twin, exact)
                if not exhibit.special:
                    self._mine[place_].add(y, exact)
                    self._twin[place_].add(twin, exact)
            if why:
                return f"output {place_}: {why}"
        return ""

    def _pooled(self) -> str:
        for place_, (mine, twin) in enumerate(zip(self._mine, self._twin, strict=True)):
            spec = self.task.graph.output_specs[place_]
            if mine.count and self.task.numerics != "strict":
                why = pooled_problem(mine, twin, getattr(torch, spec.dtype), self.task.numerics)
                if why:
                    return f"output {place_}: {why}"
        return ""

    def _probe(self, candidate: Candidate, port: Port, seconds: float, first: list[Tensor]) -> tuple[Stage, str]:
        """The other poison and a repeated run must give the same bits; without its launches the outputs must change."""
        for poison in (POISONS[1], POISONS[0]):
            stage, why, outs = self._run(port, 0, self.all[0], poison, seconds)
            if why:
                return stage, why
            for place_, (now, before) in enumerate(zip(outs, first, strict=True)):
                if strict_problem(now, before):
                    return Stage.PROBE, f"output {place_} differs between runs on equal inputs"
        if candidate.plan.kernels and all(out.numel() for out in first):
            _, why, outs = self._run(port, 0, self.all[0], POISONS[0], seconds, ghost=True)
            if not why and not any(strict_problem(now, before) for now, before in zip(outs, first, strict=True)):
                return Stage.PROBE, "the outputs do not depend on the kernel"
        return Stage.DONE, ""


def _index(arg: object) -> int:
    return arg.index if isinstance(arg, Ref) else -1
