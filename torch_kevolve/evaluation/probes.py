"""Probes: a candidate against all exhibits, and against what a wrong kernel can hide behind.

Every run: outputs and scratch are poisoned, all buffers stand between guard bands, inputs are compared afterwards.
Then once more with the other poison (memory that was read before it was written shows), once more the same (a race
shows), once on the same addresses with other content (a result kept by address shows), once with the launches left out
(a kernel that does not matter shows), and once with inputs that cannot be written (one that is changed and put right
again shows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_kevolve.candidate import Candidate
from torch_kevolve.evaluation.exhibits import Answer, Exhibit, Exhibits
from torch_kevolve.evaluation.memory import checksum, place
from torch_kevolve.evaluation.port import Port
from torch_kevolve.evaluation.verify import (
    Pool,
    choice_problem,
    equal_problem,
    pattern_problem,
    pooled_problem,
    strict_problem,
)
from torch_kevolve.evidence import Errors, Stage

POISONS = (0xFF, 0x3C)
"""0xFF.. is a NaN in every float type and -1 in every integer; 0x3C.. a small positive number."""
Verdict = tuple[Stage, str]
RIGHT: Verdict = (Stage.DONE, "")


class Proof:
    """The examination of one candidate that a worker has loaded. `run` once; then the errors can be read."""

    def __init__(self, exhibits: Exhibits, candidate: Candidate, port: Port, seconds: float) -> None:
        self.exhibits, self.candidate, self.port, self.seconds = exhibits, candidate, port, seconds
        self._pools = [Pool() for _ in exhibits.task.graph.outputs]

    def run(self) -> Verdict:
        """The stage that refused and why; (DONE, "") when all is right."""
        first: list[Tensor] = []
        for number, exhibit in enumerate(self.exhibits.all):
            self.exhibits.fill(exhibit)
            verdict, outs = self._once(number, POISONS[number % 2])
            if verdict[1]:
                return verdict
            why = self._compare(exhibit, outs)
            if why:
                sizes = f", sizes {dict(exhibit.draw.binding)}" if exhibit.draw.binding else ""
                return Stage.VERIFY, f"{why} (draw: {exhibit.draw.distribution}{sizes})"
            if number == 0:
                first = [out.clone() for out in outs]
        why = self._pooled()
        return (Stage.VERIFY, why) if why else self._probe(first)

    @property
    def errors(self) -> tuple[Errors, ...]:
        return tuple(pool.errors() for pool in self._pools)

    @property
    def errors_twin(self) -> tuple[Errors, ...]:
        return tuple(pool.errors() for pool in self.exhibits.twin_pools)

    def poison(self, value: int) -> None:
        """Fill the blocks that outputs come back in: an output that was never copied is seen."""
        for block, _ in self.exhibits.outs:
            block.fill_(value)

    def read(self, reply: Mapping[str, Any], exhibit: Exhibit) -> tuple[str, list[Tensor]]:
        """What is wrong with the outputs that a reply describes, and the outputs. Nothing in a reply is trusted."""
        rows = reply.get("outs")
        specs = [self.exhibits.wanted(exhibit, number) for number in range(len(self.exhibits.outs))]
        if not isinstance(rows, list) or len(rows) != len(specs):
            return "the reply names no outputs", []
        outs = []
        for number, (row, spec, (block, _)) in enumerate(zip(rows, specs, self.exhibits.outs, strict=True)):
            shape = [int(size) for size in spec.shape]
            if not isinstance(row, dict) or row.get("dtype") != spec.dtype or row.get("shape") != shape:
                got = _printable(f"{row.get('dtype')}{row.get('shape')}") if isinstance(row, dict) else "nothing"
                return f"output {number} is {got}, not {spec.dtype}{shape}", []
            own, wanted = row.get("own"), [int(stride) for stride in spec.strides]
            if not self._fits(own, wanted, shape) and not self._fits(own, self._twin_strides(exhibit, number), shape):
                return f"output {number} has strides {_printable(repr(own))}, the task's are {wanted}", []
            strides = list(torch.empty(shape, device="meta").stride())
            outs.append(place(block, {"dtype": spec.dtype, "shape": shape, "strides": strides}))
        return "", outs

    def timed_problem(self, reply: Mapping[str, Any]) -> str:
        """What is wrong with the outputs of the last timed call. One draw: the bounds are those of `fast`."""
        exhibit = self.exhibits.all[self.exhibits.timed[-1]]
        why, outs = self.read(reply, exhibit)
        return why or self._alone(exhibit, self.exhibits.answer(exhibit), outs)

    def _once(
        self, number: int, poison: int, ghost: bool = False, sealed: bool = False
    ) -> tuple[Verdict, list[Tensor]]:
        exhibit = self.exhibits.all[number]
        self.poison(poison)
        message = {"do": "run", "draw": number, "poison": poison, "ghost": ghost, "sealed": sealed}
        reply = self.port.call(message, self.seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return (Stage.LAUNCH, str(why)[:1000]), []
        if [checksum(block) for block in exhibit.blocks] != exhibit.sums:
            self.exhibits.restore(exhibit)
            return (Stage.PROBE, "an input was changed"), []
        if reply.get("damaged"):
            return (Stage.PROBE, str(reply["damaged"])[:300]), []
        why, outs = self.read(reply, exhibit)
        return ((Stage.VERIFY, why) if why else RIGHT), outs

    def _compare(self, exhibit: Exhibit, outs: Sequence[Tensor]) -> str:
        answer = self.exhibits.answer(exhibit)
        if exhibit.special:
            return self._alone(exhibit, answer, outs)
        for number, y in enumerate(outs):
            why = self._pattern(number, y, answer)
            if why:
                return f"output {number}: {why}"
            if y.is_floating_point():
                self._pools[number].add(y, answer.exact[number], answer.twin[number])
        return ""

    def _pattern(self, number: int, y: Tensor, answer: Answer) -> str:
        """What can be said of one output of one draw without pooling."""
        twin, exact = answer.twin[number], answer.exact[number]
        if self.exhibits.task.numerics == "strict":
            return strict_problem(y, twin)
        if y.is_floating_point():
            return "" if answer.clean[number] else pattern_problem(y, twin, exact)
        choice = self.exhibits.choices.get(number)
        if choice is None:
            return equal_problem(y, twin)
        spec = self.exhibits.task.graph.spec(choice.source)
        return choice_problem(y, twin, answer.sources[number], choice.dim, choice.largest, getattr(torch, spec.dtype))

    def _alone(self, exhibit: Exhibit, answer: Answer, outs: Sequence[Tensor]) -> str:
        """A draw judged by itself: patterns, and values within the bounds of `fast`."""
        for number, y in enumerate(outs):
            why = self._pattern(number, y, answer)
            if not why and y.is_floating_point() and self.exhibits.task.numerics != "strict":
                mine = Pool()
                mine.add(y, answer.exact[number], answer.twin[number])
                why = pooled_problem(mine, exhibit.twin_pools[number], y.dtype, "fast")
            if why:
                return f"output {number}: {why}"
        return ""

    def _pooled(self) -> str:
        level = self.exhibits.task.numerics
        for number, (mine, twin) in enumerate(zip(self._pools, self.exhibits.twin_pools, strict=True)):
            spec = self.exhibits.task.graph.output_specs[number]
            if (mine.count or mine.broken) and level != "strict":
                why = pooled_problem(mine, twin, getattr(torch, spec.dtype), level)
                if why:
                    return f"output {number}: {why}"
        return ""

    def _probe(self, first: list[Tensor]) -> Verdict:
        self.exhibits.fill(self.exhibits.all[0])
        for poison in (POISONS[1], POISONS[0]):
            verdict, outs = self._once(0, poison)
            if verdict[1]:
                return verdict
            for number, (now, before) in enumerate(zip(outs, first, strict=True)):
                if strict_problem(now, before):
                    return Stage.PROBE, f"output {number} differs between runs on equal inputs"
        why = self._in_place()
        if why:
            return Stage.PROBE, why
        if self.candidate.plan.kernels and all(out.numel() for out in first):
            verdict, outs = self._once(0, POISONS[0], ghost=True)
            if not verdict[1] and not any(strict_problem(now, old) for now, old in zip(outs, first, strict=True)):
                return Stage.PROBE, "the outputs do not depend on the kernel"
        if self.candidate.plan.kernels:
            (stage, why), _ = self._once(0, POISONS[0], sealed=True)
            if why:
                return Stage.PROBE, why if stage is Stage.PROBE else f"with inputs that cannot be written it {why}"
        return RIGHT

    def _in_place(self) -> str:
        """The second draw's numbers at the first draw's addresses: empty, or what is wrong with the outputs."""
        if self.exhibits.lean or len(self.exhibits.all) < 2:
            return ""  # where inputs are shared, every draw stands at the addresses of the one before
        first, second = self.exhibits.all[:2]
        if second.special or first.draw.binding != second.draw.binding:
            return ""
        pairs = [(a, b) for a, b in zip(first.inputs, second.inputs, strict=True) if a.data_ptr() != b.data_ptr()]
        kept = [a.clone(memory_format=torch.preserve_format) for a, _ in pairs]
        sums = first.sums
        try:
            self._write(pairs)
            first.sums = [checksum(block) for block in first.blocks]
            verdict, outs = self._once(0, POISONS[1])
            why = verdict[1] or self._alone(second, self.exhibits.answer(second), outs)
            return f"{why} (other inputs at the same addresses)" if why else ""
        finally:
            self._write([(a, old) for (a, _), old in zip(pairs, kept, strict=True)])
            first.sums = sums

    @staticmethod
    def _write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for home, content in pairs:
            # An expanded input has one copy of what it repeats, which takes one copy only.
            once = [slice(0, 1) if stride == 0 else slice(None) for stride in home.stride()]
            home[tuple(once)].copy_(content[tuple(once)])

    def _twin_strides(self, exhibit: Exhibit, number: int) -> list[int]:
        return [] if exhibit.answer is None else list(exhibit.answer.twin[number].stride())

    @staticmethod
    def _fits(own: object, wanted: Sequence[int], shape: Sequence[int]) -> bool:
        """Equal strides, where a stride means something."""
        if not isinstance(own, list) or len(own) != len(shape) or len(wanted) != len(shape):
            return False
        return 0 in shape or all(a == b for a, b, size in zip(own, wanted, shape, strict=True) if size > 1)


def _printable(text: str) -> str:
    """Text of a worker's that a file can hold."""
    return text[:100].encode(errors="replace").decode()
