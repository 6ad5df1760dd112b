"""Verify: is an output as right as eager's, by the stated formulas.

With y an output, ref the fp64 reference, both pooled over all draws, rms(v) = sqrt(mean(v^2)):

    e = rms(y - ref) / rms(ref)        m = max|y - ref| / rms(ref)        u = half an ulp of y's type at rms(ref)

`default` asks for e <= 1.25 e_twin + u and m <= 2 m_twin + 4 u; `fast` for eight times that; `strict` for equal bits.
In the candidate's m, half of y's machine epsilon times |ref| is taken off: at an outlier 500 times rms(ref) adjacent
numbers lie 6e-5 rms(ref) apart, and where eager's was the nearer one by luck, a right GroupNorm was refused.
The same is asked once more with every draw divided by its own rms(ref): exp of a draw of large numbers is 1e30 times
that of an ordinary one, and would hide any error in it. e_twin and m_twin are themselves estimates; `chance` widens
them by what n values leave open, 2.4 times at n = 8 (a mean over 8 draws), 2.5 % at n = 10,000.
Where NaN and infinities stand is compared with the twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_kevolve.evidence import Errors

SLACK = {"default": 1.0, "fast": 8.0}
PIECE = 2**17
"""Elements compared at once on a CPU: the fp64 copy stays in cache (65 M elements in 0.1 s, against 0.6 s whole)."""


@dataclass
class Pool:
    """Sums over all draws for one output: enough for e and m, without keeping the tensors."""

    square_error: float = 0.0
    square_ref: float = 0.0
    worst: float = 0.0
    excess: float = 0.0
    """The largest error beyond the rounding of the element itself."""
    count: int = 0
    scaled_error: float = 0.0
    scaled_fourth: float = 0.0
    scaled_worst: float = 0.0
    scaled_excess: float = 0.0
    half_ulps: float = 0.0
    most_half_ulp: float = 0.0
    broken: int = 0
    """Elements that are NaN or infinite where reference and twin are finite."""

    def add(self, y: Tensor, ref: Tensor, twin: Tensor | None = None) -> None:
        """One draw. Elements where the reference or the twin is not finite are left to the pattern check."""
        sums = Sums()
        for part, exact, other in _pieces(y, ref, y if twin is None else twin):
            sums.add(part, exact, other, trust=twin is not None)
        scale = (sums.square_ref / max(1, sums.count)) ** 0.5
        u = half_ulp(scale, y.dtype)
        self.square_error += sums.square_error
        self.square_ref += sums.square_ref
        self.worst, self.excess = max(self.worst, sums.worst), max(self.excess, sums.excess)
        self.count += sums.count
        self.broken += sums.broken
        self.half_ulps += u * u * sums.count
        self.most_half_ulp = max(self.most_half_ulp, u)
        if scale > 0.0:
            self.scaled_error += sums.square_error / scale**2
            self.scaled_fourth += sums.fourth_error / scale**2 / scale**2
            self.scaled_worst = max(self.scaled_worst, sums.worst / scale)
            self.scaled_excess = max(self.scaled_excess, sums.excess / scale)
        elif sums.square_error > 0.0:
            self.scaled_error = self.scaled_worst = self.scaled_excess = math.inf

    def errors(self) -> Errors:
        """e and m over all draws."""
        scale = self.rms
        if scale == 0.0:
            return Errors(0.0 if self.square_error == 0 else math.inf, 0.0 if self.worst == 0 else math.inf)
        mean = self.square_error / max(1, self.count)
        return Errors(mean**0.5 / scale, self.worst / scale)

    def scaled(self) -> Errors:
        """e and m with every draw divided by its own rms(ref)."""
        return Errors((self.scaled_error / max(1, self.count)) ** 0.5, self.scaled_worst)

    @property
    def rms(self) -> float:
        return float((self.square_ref / max(1, self.count)) ** 0.5)

    @property
    def chance(self) -> float:
        """How far an equally good kernel's e may lie above this one's by luck: exp(2.5 / sqrt(n)).

        n counts independent errors: 3 (sum d^2)^2 / sum d^4, which is the count for a normal distribution.
        """
        if not 0.0 < self.scaled_fourth < math.inf:
            return 1.0
        return math.exp(2.5 / max(1.0, min(self.count, 3 * self.scaled_error**2 / self.scaled_fourth)) ** 0.5)


@dataclass
class Sums:
    """The same for one draw, piece by piece."""

    square_error: float = 0.0
    square_ref: float = 0.0
    fourth_error: float = 0.0
    worst: float = 0.0
    excess: float = 0.0
    count: int = 0
    broken: int = 0

    def add(self, y: Tensor, ref: Tensor, twin: Tensor, trust: bool) -> None:
        difference = y.double() - ref
        squares = difference.square()
        square_error, square_ref = float(squares.sum()), float(ref.double().square().sum())
        count = y.numel()
        if not (math.isfinite(square_error) and math.isfinite(square_ref)) or _beyond(ref, y.dtype):
            fine = ref.isfinite() & (ref.abs() <= torch.finfo(y.dtype).max) & ~_overflown(y, ref)
            fine = fine & twin.isfinite() if trust else fine
            lost = fine & ~y.isfinite()
            self.broken += int(lost.sum())
            # A non-finite y where the reference is finite is as wrong as can be.
            difference = torch.where(lost, math.inf, torch.where(fine, difference, 0.0))
            squares = difference.square()
            ref = torch.where(fine, ref, 0.0).double()
            square_error, square_ref, count = float(squares.sum()), float(ref.square().sum()), int(fine.sum())
        self.square_error += square_error
        self.square_ref += square_ref
        self.fourth_error += float(squares.square_().sum())
        self.count += count
        if difference.numel():
            size = difference.abs()
            self.worst = max(self.worst, float(size.max()))
            self.excess = max(self.excess, float(size.sub_(ref.abs(), alpha=0.5 * torch.finfo(y.dtype).eps).max()))


def _beyond(ref: Tensor, dtype: torch.dtype) -> bool:
    if dtype is torch.float64 or not ref.numel():
        return False
    low, high = ref.aminmax()
    return max(-float(low), float(high)) > torch.finfo(dtype).max


def _overflown(y: Tensor, ref: Tensor) -> Tensor:
    """Where y is the infinity of a number beyond half of the largest: the last factor of a product may be the one that
    brings it back. With exp(88.73) * 0.89 eager, whose exponent was rounded to bf16 before, came out finite.

    Not of fp16: what is held in fp32 on the way does not overflow there, and 40000 is a gradient like any other under
    a loss scaled by 65536.
    """
    if y.dtype is torch.float16:
        return torch.zeros_like(y, dtype=torch.bool)
    return (y == ref * math.inf) & (ref.abs() > 0.5 * torch.finfo(y.dtype).max)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = PIECE if tensors[0].device.type == "cpu" else 2**26
    yield from zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def half_ulp(scale: float, dtype: torch.dtype) -> float:
    """Half an ulp of `dtype` at `scale`, relative to `scale`; the least normal number bounds it below."""
    if scale == 0.0 or not math.isfinite(scale):
        return 0.0
    info = torch.finfo(dtype)
    power = 2.0 ** (math.frexp(scale)[1] - 1)
    return max(0.5 * info.eps * power, 0.5 * info.eps * info.tiny) / scale


def pooled_problem(mine: Pool, twin: Pool, dtype: torch.dtype, level: str) -> str:
    """Empty when the pooled errors pass; else the sentence that the evidence carries."""
    if mine.broken:
        return f"NaN or infinity at {mine.broken} elements where eager is finite"
    u = half_ulp(mine.rms, dtype)
    each_u = (mine.half_ulps / max(1, mine.count)) ** 0.5
    scaled = replace(mine.scaled(), worst=mine.scaled_excess)
    ours = replace(mine.errors(), worst=mine.excess / mine.rms) if mine.rms > 0.0 else mine.errors()
    return _bound(ours, twin.errors(), twin.chance, u, u, level, "") or _bound(
        scaled, twin.scaled(), twin.chance, each_u, mine.most_half_ulp, level, ", each draw by its own scale"
    )


def _bound(ours: Errors, theirs: Errors, chance: float, u: float, most_u: float, level: str, how: str) -> str:
    rms = SLACK[level] * (1.25 * chance * theirs.rms + u)
    worst = SLACK[level] * (2 * chance * theirs.worst + 4 * most_u)
    if not ours.rms <= rms:
        return f"rms error {ours.rms:.3g} above {rms:.3g} (eager's is {theirs.rms:.3g}{how})"
    if not ours.worst <= worst:
        return f"worst error {ours.worst:.3g} above {worst:.3g} (eager's is {theirs.worst:.3g}{how})"
    return ""


def pattern_problem(y: Tensor, twin: Tensor, ref: Tensor) -> str:
    """Empty when NaN and infinities stand where eager has them, or where exact arithmetic has them.

    The two differ where an intermediate value overflows on the way: another order of work overflows elsewhere. Where
    fp64 is finite and eager is not, any value passes; where fp64 is beyond half of the largest number, its infinity.
    """
    if not y.is_floating_point():
        return ""
    nans = others = 0
    for mine, eager, best in _pieces(y, twin, ref):
        if all_finite(mine) and all_finite(eager):
            continue  # alike; without this look 65 M elements take 0.8 s
        exact = best.to(y.dtype)
        asked = ~(exact.isfinite() & ~eager.isfinite())
        wrong = ~(_alike(mine, eager) | _alike(mine, exact) | _overflown(mine, exact)) & asked
        nans += int((wrong & (mine.isnan() | eager.isnan())).sum())
        others += int(wrong.sum())
    if nans:
        return f"NaN pattern differs from eager's at {nans} of {y.numel()} elements"
    return f"infinities differ from eager's at {others} of {y.numel()} elements" if others else ""


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; False too where the sum of finite ones overflows."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.sum(tensor, dtype=torch.float64 if tensor.element_size() == 8 else torch.float32).isfinite())


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Where both are finite, both NaN, or the same infinity."""
    return torch.where(a.isinf() | b.isinf(), a == b, a.isnan() == b.isnan())


def equal_problem(y: Tensor, twin: Tensor) -> str:
    """Empty when integer or bool outputs are equal."""
    if torch.equal(y, twin):
        return ""
    wrong = int((y != twin).sum())
    return f"{wrong} of {y.numel()} integers differ from eager's"


def choice_problem(y: Tensor, twin: Tensor, values: Tensor, dim: int | None, largest: bool, dtype: torch.dtype) -> str:
    """For argmax and its like: empty when the chosen value is the best one, within the rounding of `dtype`.

    `values`: what is chosen from, in fp64. The allowance is twice what eager itself falls short by, and 4 u.
    """
    if torch.equal(y, twin):
        return ""
    if dim is None:
        values, dim, y, twin = values.reshape(-1), 0, y.reshape(1), twin.reshape(1)
    elif y.dim() < values.dim():
        y, twin = y.unsqueeze(dim), twin.unsqueeze(dim)
    if bool(((y < 0) | (y >= values.shape[dim])).any()):
        return "an index lies outside the axis"
    best = values.amax(dim, keepdim=True) if largest else values.amin(dim, keepdim=True)
    short, twin_short = (_falls_short(best, values.gather(dim, index)) for index in (y, twin))
    scale = float(values[values.isfinite()].square().mean().sqrt()) if bool(values.isfinite().any()) else 0.0
    allowed = 2 * float(twin_short.max()) + 4 * half_ulp(scale, dtype) * scale
    wrong = int((short > allowed).sum())
    return f"{wrong} of {y.numel()} choices are not the best, by up to {float(short.max()):.3g}" if wrong else ""


def _falls_short(best: Tensor, chosen: Tensor) -> Tensor:
    """How far a chosen value lies from the best one. Where the best is a NaN, as eager has it, nothing else will do."""
    distance = torch.where(best == chosen, 0.0, (best - chosen).abs())
    return torch.where(best.isnan(), torch.where(chosen.isnan(), 0.0, math.inf), distance)


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


def agrees(
    actual: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor], level: str = "default"
) -> str:
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
    mine.add(y, ref.double(), twin)
    other.add(twin, ref.double(), twin)
    loose = "fast" if level == "default" else level
    return pattern_problem(y, twin, ref) or pooled_problem(mine, other, y.dtype, loose)
