"""Exhibits: the inputs of one job, the right answers, and the memory that both may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.inputs import (
    DISTRIBUTIONS,
    FEW,
    FEW_SPECIAL,
    MANY,
    SPECIAL,
    Draw,
    draws,
    one,
    other_sizes,
    special_draws,
)
from torch_kevolve.evaluation.memory import Arena, checksum, describe, extent, place
from torch_kevolve.evaluation.reference import choices, interpret
from torch_kevolve.evaluation.verify import Pool, all_finite
from torch_kevolve.settings import Settings
from torch_kevolve.sizes import Json, evaluate
from torch_kevolve.task import FLOATS, KernelTask, Ref, TensorSpec

GATHERS = ("aten.embedding.default", "aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
TEMPORARIES = 3
"""fp64 values of the largest size that the reference holds at once: what a softmax or a cross-entropy needs."""


@dataclass
class Answer:
    """What outputs are compared with. `clean`: neither fp64 nor eager holds a NaN or an infinity.

    `sources`: for outputs that are chosen indices, what they are chosen from.
    """

    exact: tuple[Tensor, ...]
    twin: tuple[Tensor, ...]
    clean: tuple[bool, ...]
    sources: Mapping[int, Tensor]


@dataclass
class Exhibit:
    """One draw. `answer` None: too large to be kept, made again whenever it is asked for."""

    draw: Draw
    special: bool
    rows: list[Json] = field(default_factory=list)
    blocks: list[Tensor] = field(default_factory=list)
    inputs: tuple[Tensor, ...] = ()
    sums: list[tuple[int, ...]] = field(default_factory=list)
    answer: Answer | None = None
    twin_pools: list[Pool] = field(default_factory=list)


class Exhibits:
    """Everything the judge compares with. `begin` makes what the timed runs need, `finish` the rest and the answers.

    Raises EvaluationError when the job is larger than the memory that a search may use.
    """

    def __init__(self, job: Job, settings: Settings, seed: int) -> None:
        self.job, self.settings, self.seed = job, settings, seed
        self.arena: Arena | None = None
        self.all: list[Exhibit] = []
        self.outs: list[tuple[Tensor, Json]] = []
        self.twin_pools: list[Pool] = []
        self.choices = choices(job.task.graph)
        self._shared: list[tuple[Tensor, Json]] = []
        self._names, self._special, self.lean = self._budget()

    @property
    def task(self) -> KernelTask:
        return self.job.task

    @property
    def timed(self) -> list[int]:
        """The exhibits that timed runs alternate between: results left in memory by one are wrong for the other."""
        return [0] if self.lean or len(self.all) < 2 else [0, 1]

    def begin(self) -> None:
        self.arena = Arena(self.job.device)
        self.all = [Exhibit(draw, special) for draw, special in self._plan()]
        if self.lean:
            self._shared = [self._block(self._nbytes(spec)) for spec in self.task.graph.inputs]
        for exhibit in self.all[:2]:
            self._make(exhibit)
        bindings = [dict(exhibit.draw.binding) for exhibit in self.all]
        for spec in self.task.graph.output_specs:
            self.outs.append(self._block(max(evaluate(spec.nbytes, binding) for binding in bindings)))

    def finish(self) -> None:
        for exhibit in self.all[2:]:
            self._make(exhibit)
        self.twin_pools = [Pool() for _ in self.task.graph.outputs]
        for exhibit in self.all:
            self.fill(exhibit)
            answer = self.answer(exhibit)
            exhibit.twin_pools = [Pool() for _ in self.task.graph.outputs]
            for output, (twin, exact) in enumerate(zip(answer.twin, answer.exact, strict=True)):
                if twin.is_floating_point():
                    exhibit.twin_pools[output].add(twin, exact, twin)
                    if not exhibit.special:
                        self.twin_pools[output].add(twin, exact, twin)
            exhibit.answer = None if self.lean else answer

    def fill(self, exhibit: Exhibit) -> None:
        """Put an exhibit's inputs where the worker finds them; only shared blocks have lost them."""
        if self.lean:
            self.restore(exhibit)
            exhibit.sums = [checksum(block) for block in exhibit.blocks]

    def restore(self, exhibit: Exhibit) -> None:
        """Write an exhibit's inputs once more."""
        for number, home in enumerate(exhibit.inputs):
            made = one(self.task, exhibit.draw, number, self.job.device)
            _flat(home).copy_(_flat(made))

    def answer(self, exhibit: Exhibit) -> Answer:
        """The fp64 reference and eager's outputs; the exhibit's inputs must be in place."""
        if exhibit.answer is not None:
            return exhibit.answer
        task = self.task.at(dict(exhibit.draw.binding))
        with torch.no_grad():
            twin = interpret(task.twin or task.graph, exhibit.inputs)
            also = [choice.source for choice in self.choices.values()]
            found = interpret(task.graph, exhibit.inputs, exact=True, also=also)
        exact, sources = found[: len(twin)], found[len(twin) :]
        # For 16-bit outputs fp32 holds all that counts of the reference, in half the memory.
        exact = tuple(
            e.float() if t.is_floating_point() and t.element_size() == 2 else e
            for e, t in zip(exact, twin, strict=True)
        )
        clean = tuple(all_finite(e) and all_finite(t) for e, t in zip(exact, twin, strict=True))
        return Answer(exact, twin, clean, dict(zip(self.choices, sources, strict=True)))

    def wanted(self, exhibit: Exhibit, output: int) -> TensorSpec:
        """The spec of an output at an exhibit's sizes."""
        return self.task.at(dict(exhibit.draw.binding)).graph.output_specs[output]

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
        tables = {ref.index for op in graph.ops if op.target in GATHERS for ref in op.args[:1] if isinstance(ref, Ref)}
        inputs = [spec for number, spec in enumerate(graph.inputs) if number not in tables]
        return sum(self._nbytes(spec) for spec in (*inputs, *graph.output_specs))

    def setup_message(self, whole: bool) -> Json:
        """What a worker needs to begin: the timed draws, or all of them."""
        ready = self.all if whole else self.all[:2]
        return {
            "do": "setup",
            "task": self.task.to_json(),
            "device": self.job.device,
            "frozen": self.job.frozen,
            "draws": [exhibit.rows for exhibit in ready],
            "timed": self.timed,
            "outs": [handle for _, handle in self.outs],
        }

    def rest_message(self) -> Json:
        """The draws that `setup_message(False)` left out."""
        return {"do": "draws", "draws": [exhibit.rows for exhibit in self.all[2:]]}

    def close(self) -> None:
        self.all.clear()
        self.outs.clear()
        self._shared.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _plan(self) -> list[tuple[Draw, bool]]:
        binding = self.job.binding
        plan = [(draw, False) for draw in draws(binding, self.seed, self._names)]
        for number, other in enumerate(other_sizes(self.task.symbols, binding)):
            plan.append((draws(other, self.seed + 50 + number)[number % len(DISTRIBUTIONS)], False))
        plan.extend((draw, True) for draw in special_draws(binding, self.seed, self._special))
        return plan

    def _budget(self) -> tuple[Sequence[str], Sequence[str], bool]:
        """Which draws fit into the memory, and whether only one of them can be kept at a time."""
        graph = self.task.at(self.job.binding).graph
        specs = (*graph.inputs, *(out for op in graph.ops for out in op.outs))
        largest = max((int(spec.numel) for spec in specs), default=1)
        inputs = sum(int(spec.nbytes) for spec in graph.inputs)
        outs = sum(int(spec.nbytes) for spec in graph.output_specs)
        exact = sum(int(spec.numel) * (4 if spec.dtype in FLOATS[2:] else 8) for spec in graph.output_specs)
        work = TEMPORARIES * 8 * largest + outs
        few = largest > MANY
        allowed = self.memory_allowed()
        # Rather fewer draws that are kept than all of them made anew for every candidate: with five, the gradient of a
        # cross-entropy of 2048 x 32000 took 36 s a candidate on 2 cores.
        less = ((FEW, FEW_SPECIAL), (FEW[::2], FEW_SPECIAL), (FEW[::2], FEW_SPECIAL[:1]))
        for names, special in ((DISTRIBUTIONS, SPECIAL), *less):
            if few and names is DISTRIBUTIONS:
                continue
            # Other sizes are no larger than the job's.
            count = len(names) + len(special) + len(other_sizes(self.task.symbols, self.job.binding))
            if count * (inputs + outs + exact) + work <= allowed:
                return names, special, False
        if inputs + outs + exact + work > allowed:
            need = (inputs + outs + exact + work) / 2**30
            raise EvaluationError(detail=f"the job needs {need:.1f} GiB, a search may use {allowed / 2**30:.1f}")
        return FEW, FEW_SPECIAL, True

    def _make(self, exhibit: Exhibit) -> None:
        if self.lean:
            self._share(exhibit)
            return
        inputs = []
        for number, spec in enumerate(self.task.graph.inputs):
            first = self.all[0]
            if spec.frozen and exhibit.draw.weights is not None:
                exhibit.rows.append(first.rows[number])
                exhibit.blocks.append(first.blocks[number])
                inputs.append(first.inputs[number])
                continue
            made = one(self.task, exhibit.draw, number, self.job.device)
            size = extent(made) * made.element_size()
            walled = exhibit.draw.walled and self.job.device == "cpu"
            block, handle = self._block(size, walled)
            row = {**describe(made), "offset": block.numel() - size if walled else 0}
            # What lies beside an input is NaN: reading there is seen in the result.
            block[: row["offset"]] = 0xFF
            block[row["offset"] + size :] = 0xFF
            home = place(block, row)
            _flat(home).copy_(_flat(made))
            exhibit.rows.append({**row, "block": handle})
            exhibit.blocks.append(block)
            inputs.append(home)
        exhibit.inputs = tuple(inputs)
        exhibit.sums = [checksum(block) for block in exhibit.blocks]

    def _block(self, nbytes: int, walled: bool = False) -> tuple[Tensor, Json]:
        assert self.arena is not None
        return self.arena.block(nbytes, walled)

    def _share(self, exhibit: Exhibit) -> None:
        graph = self.task.at(dict(exhibit.draw.binding)).graph
        for spec, (block, handle) in zip(graph.inputs, self._shared, strict=True):
            row = {"dtype": spec.dtype, "shape": list(spec.shape), "strides": list(spec.strides), "offset": 0}
            exhibit.rows.append({**row, "block": handle})
            exhibit.blocks.append(block)
        exhibit.inputs = tuple(place(block, row) for block, row in zip(exhibit.blocks, exhibit.rows, strict=True))
        self.restore(exhibit)
        exhibit.sums = [checksum(block) for block in exhibit.blocks]

    def _nbytes(self, spec: TensorSpec) -> int:
        """Bytes from the first to the last element at the job's sizes."""
        shape = [evaluate(size, self.job.binding) for size in spec.shape]
        strides = [evaluate(stride, self.job.binding) for stride in spec.strides]
        like = torch.empty(0, dtype=getattr(torch, spec.dtype)).as_strided((0,), (1,))
        count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return count * like.element_size()


def _flat(tensor: Tensor) -> Tensor:
    """All elements from the first to the last that a strided tensor touches, gaps included."""
    return tensor.as_strided((extent(tensor),), (1,))
