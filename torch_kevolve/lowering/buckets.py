"""Buckets: the dynamic sizes that one compilation with kernels serves.

A kernel is placed for the bucket of this call's sizes, and Dynamo is told so by a guard: it compiles again, or finds
what it compiled before, for a size of another bucket. A task's range follows from the buckets of the shape
environment's symbols, not from a bucket of its own: so equal graph keys mean equal task keys, and the guards are plain
bounds on symbols, which every cache of torch stores and evaluates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

WIDTH = 16
"""From one end to the next: four doublings, over which one choice of blocks is reasonable. Much less, and one dynamic
size alone would need more compilations than Dynamo's limit of 8 leaves room for."""
LAST = WIDTH**4
"""Above it is one bucket without end: no block spans such a row, so kernels loop there whatever its length."""


def bucket(size: int) -> tuple[int, int | None]:
    """The ends of a size's bucket, both included: 0 to 16, 17 to 256, 257 to 4096, 4097 to 65536, 65537 and more.

    A power of two ends a bucket instead of beginning one: it is the cap of real sizes (a batch of 256 and the smaller
    one at the end, lengths up to 4096), and as an upper bound it is the block that a kernel needs for it.
    """
    if size > LAST:
        return LAST + 1, None
    low, high = 0, WIDTH
    while size > high:
        low, high = high + 1, high * WIDTH
    return low, high


@dataclass
class Buckets:
    """The ranges of one shape environment's symbols, narrowed. What was once said of a symbol stands."""

    env: Any
    strict: frozenset[sympy.Symbol]
    _known: dict[sympy.Symbol, ValueRanges[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, env: Any) -> Buckets:
        return cls(env, strict_symbols(env))

    @classmethod
    def now(cls) -> Buckets | None:
        """Of the graph that is compiled in this thread; None where a guard would be lost."""
        env = getattr(getattr(torch._guards.TracingContext.try_get(), "fake_mode", None), "shape_env", None)
        return None if env is None or env.frozen or env._suppress_guards_tls() else cls.of(env)

    def range_of(self, name: sympy.Symbol) -> ValueRanges[Any]:
        """The symbol's own range in its bucket. The whole of it where a guard would be an error: the user promised all
        of it to Dynamo, or only one size would be left."""
        if name not in self._known:
            own = self.env.var_to_range.get(name, ValueRanges.unknown_int())
            narrow = own & (self.bucket_of(name) or own)
            self._known[name] = own if name in self.strict or narrow.is_singleton() else narrow
        return self._known[name]

    def bucket_of(self, name: sympy.Symbol) -> ValueRanges[Any] | None:
        """The bucket of this call's size. None for a negative one, as an integer input of the program may be."""
        size = self.size(name)
        if size is None or size < 0:
            return None
        low, high = bucket(size)
        return ValueRanges(low, int_oo if high is None else high)

    def size(self, name: sympy.Symbol) -> int | None:
        """This call's; None where there is none yet."""
        # torch 2.11 calls it var_to_val.
        sizes = self.env.backed_var_to_val if hasattr(self.env, "backed_var_to_val") else self.env.var_to_val
        found = sizes.get(name)
        return int(found) if isinstance(found, int | sympy.Integer) else None

    def bounds(self, expr: sympy.Expr) -> ValueRanges[Any]:
        """The range of an expression whose symbols stay in their buckets."""
        return bound_sympy(expr, {name: self.range_of(name) for name in expr.free_symbols})

    def guard(self, exprs: Iterable[sympy.Expr]) -> None:
        """Dynamo shall compile again when a symbol of these leaves its bucket."""
        for name in sorted({name for expr in exprs for name in expr.free_symbols}, key=str):
            for bound in finite_bounds(name, self.range_of(name)):
                self.env.evaluate_expr(bound)


def finite_bounds(name: sympy.Symbol, held: ValueRanges[Any]) -> list[Any]:
    """What a range says of a symbol. Torch's infinity has no form in a guard."""
    ends = ((sympy.Ge, held.lower), (sympy.Le, held.upper))
    return [says(name, end) for says, end in ends if getattr(end, "is_Integer", False)]


def strict_symbols(env: Any) -> frozenset[sympy.Symbol]:
    """Symbols of dimensions that were marked with min= or max=: there any narrower guard is a ConstraintViolation."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    found: set[sympy.Symbol] = set()
    for each in env.tracked_fakes or ():
        constraints = getattr(each.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(each.fake, "shape", ()), constraints, strict=False):
            if isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
                found |= size.node.expr.free_symbols
    return frozenset(found)
