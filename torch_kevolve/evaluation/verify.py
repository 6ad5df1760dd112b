"""Verify: is an output as right as eager's, by the stated formulas.

With y an output, ref the fp64 reference, both pooled over all draws, rms(v) = sqrt(mean(v^2)):

    e = rms(y - ref) / rms(ref)        m = max|y - ref| / rms(ref)        u = half an ulp of y's type at rms(ref)

`default` asks for e <= 1.25 e_twin + u and m <= 2 m_twin + 4 u; `fast` for eight times that; `strict` for equal bits.
Draws with NaN and infinities are compared by pattern with the twin, value by value elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_kevolve.evidence import Errors

SLACK = {"default": 1.0, "fast": 8.0}


@dataclass
class Pool:
    """Sums over all draws for one output: enough for e and m, without keeping the tensors."""

    square_error: float = 0.0
    square_ref: float = 0.0
    worst: float = 0.0
    count: int = 0

    def add(self, y: Tensor, ref: Tensor) -> None:
        """Elements where the reference is not finite, or overflows y's type, are left to the pattern check."""
        limit = torch.finfo(y.dtype).max
        fine = ref.isfinite() & (ref.abs() <= limit)
        difference = torch.where(fine, y.double() - ref, 0.0)
        # A non-finite y where the reference is finite is as wrong as can be.
        difference = torch.where(difference.isfinite(), difference, float("inf"))
        kept = torch.where(fine, ref, 0.0)
        self.square_error += float(difference.square().sum())
        self.square_ref += float(kept.square().sum())
        if difference.numel():
            self.worst = max(self.worst, float(difference.abs().max()))
        self.count += int(fine.sum())

    def errors(self) -> Errors:
        scale = self.rms
        if scale == 0.0:
            return Errors(0.0 if self.square_error == 0 else float("inf"), 0.0 if self.worst == 0 else float("inf"))
        mean = self.square_error / max(1, self.count)
        return Errors(mean**0.5 / scale, self.worst / scale)

    @property
    def rms(self) -> float:
        return float((self.square_ref / max(1, self.count)) ** 0.5)


def half_ulp(scale: float, dtype: torch.dtype) -> float:
    """Half an ulp of `dtype` at `scale`, relative to `scale`; the least normal number bounds it below."""
    if scale == 0.0:
        return 0.0
    info = torch.finfo(dtype)
    power = 2.0 ** torch.frexp(torch.tensor(scale, dtype=torch.float64)).exponent.item() / 2
    return max(0.5 * info.eps * power, 0.5 * info.eps * info.tiny) / scale


def pooled_problem(mine: Pool, twin: Pool, dtype: torch.dtype, level: str) -> str:
    """Empty when the pooled errors pass; else the sentence that the evidence carries."""
    ours, theirs = mine.errors(), twin.errors()
    slack = SLACK[level]
    u = half_ulp(mine.rms, dtype)
    if not ours.rms <= slack * (1.25 * theirs.rms + u):
        return f"rms error {ours.rms:.3g} above {slack * (1.25 * theirs.rms + u):.3g} (eager's is {theirs.rms:.3g})"
    if not ours.worst <= slack * (2 * theirs.worst + 4 * u):
        return f"worst error {ours.worst:.3g} above {slack * (2 * theirs.worst + 4 * u):.3g} (eager's is {theirs.worst:.3g})"
    return ""


def pattern_problem(y: Tensor, twin: Tensor, ref: Tensor) -> str:
    """Empty when NaN and infinities stand where eager has them.

    Elements that are finite in fp64 and not in eager are left out: there eager overflowed on the way, and a kernel that
    does not, or does so differently, is no worse.
    """
    if not y.is_floating_point():
        return ""
    judged = ~(ref.isfinite() & ~twin.isfinite())
    wrong = (y.isnan() != twin.isnan()) & judged
    if bool(wrong.any()):
        return f"NaN pattern differs from eager's at {int(wrong.sum())} of {y.numel()} elements"
    inf = twin.isinf() & ref.isinf()
    if not torch.equal(y.isinf() & ref.isinf() & judged, inf):
        return "infinities differ from eager's"
    same = torch.where(inf & y.isinf(), y.sign() == twin.sign(), True)
    return "" if bool(same.all()) else "signs of infinities differ from eager's"


def equal_problem(y: Tensor, twin: Tensor) -> str:
    """Empty when integer or bool outputs are equal."""
    if torch.equal(y, twin):
        return ""
    wrong = int((y != twin).sum())
    return f"{wrong} of {y.numel()} integers differ from eager's"


def strict_problem(y: Tensor, twin: Tensor) -> str:
    """Empty when all bits are equal, NaN and -0.0 included."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[y.element_size()]
    if torch.equal(y.contiguous().view(kind), twin.contiguous().view(kind)):
        return ""
    both = y.isnan() & twin.isnan() if y.is_floating_point() else torch.zeros_like(y, dtype=torch.bool)
    wrong = int(((y.contiguous().view(kind) != twin.contiguous().view(kind)) & ~both).sum())
    return f"{wrong} of {y.numel()} elements differ from eager's bits" if wrong else ""


def relative_rms(y: Tensor, ref: Tensor) -> float:
    """e of one output; for integers the share that differs."""
    if not y.is_floating_point():
        return float((y != ref).double().mean()) if y.numel() else 0.0
    pool = Pool()
    pool.add(y, ref.double())
    return pool.errors().rms


def agrees(actual: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor], level: str = "default") -> str:
    """The judge's verdict on one set of outputs against eager's and the fp64 ones; empty: they agree.

    For whole models, of which one draw is all there is: the bounds are those of `fast`, since eager's error on one
    draw is itself a random number (26 % of equally good summation orders exceed twice it).
    """
    for place, (y, twin, ref) in enumerate(zip(actual, expected, exact, strict=True)):
        if y.shape != twin.shape or y.dtype != twin.dtype:
            return f"output {place} is {y.dtype}{list(y.shape)}, eager's is {twin.dtype}{list(twin.shape)}"
        problem = _one(y, twin, ref, level)
        if problem:
            return f"output {place}: {problem}"
    return ""


def _one(y: Tensor, twin: Tensor, ref: Tensor, level: str) -> str:
    if not y.is_floating_point():
        return equal_problem(y, twin)
    mine, other = Pool(), Pool()
    mine.add(y, ref.double())
    other.add(twin, ref.double())
    loose = "fast" if level == "default" else level
    return pattern_problem(y, twin, ref) or pooled_problem(mine, other, y.dtype, loose)
