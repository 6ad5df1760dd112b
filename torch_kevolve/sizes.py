"""Sizes: integer expressions over ranged symbols.

A size is an `int` or a sympy expression over positive integer symbols. Text never goes through sympy's parser
(which evaluates Python): the JSON form is a tree, `["*", "s0", 2]`, read and written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, ModularIndexing
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from torch_kevolve.errors import TaskError

Size: TypeAlias = "int | sympy.Expr"
Json: TypeAlias = Any

_UNBOUNDED = 2**48


@dataclass(frozen=True)
class Symbol:
    """A size that is not known at compile time: its canonical name and closed range. `hi` None: unbounded."""

    name: str
    lo: int = 2
    hi: int | None = None

    @property
    def upper(self) -> int:
        return _UNBOUNDED if self.hi is None else self.hi


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol that stands for the size called `name` everywhere in this project."""
    return sympy.Symbol(name, integer=True, positive=True)


class NextPow2(sympy.Function):
    """The smallest power of two that is not below the argument."""

    nargs = (1,)
    is_integer = True
    is_positive = True

    @classmethod
    def eval(cls, value: sympy.Expr) -> sympy.Expr | None:
        if value.is_Integer:
            return sympy.Integer(next_power_of_2(int(value)))
        return None


def next_power_of_2(value: int) -> int:
    return 1 if value <= 1 else 1 << (value - 1).bit_length()


def simplify(size: Any) -> Size:
    """An `int` where the expression is a number, else the sympy expression."""
    if isinstance(size, int):
        return size
    expr = sympy.sympify(size, strict=True)
    return int(expr) if expr.is_Integer else expr


_MAKE: dict[str, Callable[..., sympy.Expr]] = {
    "+": lambda *a: sympy.Add(*a),
    "*": lambda *a: sympy.Mul(*a),
    "^": lambda a, b: sympy.Pow(a, b),
    "//": lambda a, b: FloorDiv(a, b),
    "%": lambda a, b: Mod(a, b),
    "mod": lambda a, b, c: ModularIndexing(a, b, c),
    "ceil": lambda a, b: CeilDiv(a, b),
    "min": lambda *a: Min(*a),
    "max": lambda *a: Max(*a),
    "pow2": lambda a: NextPow2(a),
}
_KIND: tuple[tuple[Any, str], ...] = (
    (sympy.Add, "+"),
    (sympy.Mul, "*"),
    (sympy.Pow, "^"),
    (FloorDiv, "//"),
    (Mod, "%"),
    (ModularIndexing, "mod"),
    ((Min, sympy.Min), "min"),
    ((Max, sympy.Max), "max"),
    (NextPow2, "pow2"),
)


def encode(size: Size) -> Json:
    """The JSON tree of a size. Raises TaskError for an expression that has no form."""
    if isinstance(size, int):
        return size
    expr = sympy.sympify(size, strict=True)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Rational:
        return ["*", int(expr.p), ["^", int(expr.q), -1]]
    if expr.is_Symbol:
        return expr.name
    for kind, mark in _KIND:
        if isinstance(expr, kind):
            args = [encode(arg) for arg in expr.args]
            if mark in ("+", "*", "min", "max"):
                args.sort(key=repr)
            return [mark, *args]
    raise TaskError(detail=f"size {expr} has an operator ({type(expr).__name__}) that no form exists for")


def decode(tree: Json) -> Size:
    """The size a JSON tree stands for. Raises TaskError for a tree that is none."""
    return simplify(_decode(tree))


def _decode(tree: Json) -> Any:
    if isinstance(tree, bool) or tree is None or isinstance(tree, float):
        raise TaskError(detail=f"{tree!r} is no size")
    if isinstance(tree, int):
        return sympy.Integer(tree)
    if isinstance(tree, str):
        if not tree.isidentifier():
            raise TaskError(detail=f"{tree!r} is no symbol")
        return symbol(tree)
    if isinstance(tree, list) and tree and tree[0] in _MAKE:
        args = [_decode(arg) for arg in tree[1:]]
        if tree[0] == "^" and args[1] == -1 and args[0].is_Integer:
            return sympy.Rational(1, int(args[0]))
        return _MAKE[tree[0]](*args)
    raise TaskError(detail=f"{tree!r} is no size")


def free_symbols(sizes: Iterable[Size]) -> set[str]:
    return {s.name for size in sizes if not isinstance(size, int) for s in size.free_symbols}


def evaluate(size: Size, binding: Mapping[str, int]) -> int:
    """The number a size is under a binding of symbol names. Raises TaskError if a symbol is unbound."""
    if isinstance(size, int):
        return size
    value = size.subs({symbol(name): number for name, number in binding.items()})
    if not value.is_number:
        raise TaskError(detail=f"size {size} is not bound by {dict(binding)}")
    return int(value)


def bind(shapes: Iterable[tuple[tuple[Size, ...], tuple[int, ...]]]) -> dict[str, int]:
    """The binding under which symbolic shapes equal the actual ones.

    A symbol is read off the first place where it stands alone. Raises TaskError on a rank or size that differs.
    """
    pairs = [(s, a) for symbolic, actual in shapes for s, a in _zip(symbolic, actual)]
    binding = {s.name: a for s, a in reversed(pairs) if not isinstance(s, int) and s.is_Symbol}
    for want, actual in pairs:
        if evaluate(want, binding) != actual:
            raise TaskError(detail=f"size {want} is {evaluate(want, binding)} under {binding}, the tensor has {actual}")
    return binding


def _zip(symbolic: tuple[Size, ...], actual: tuple[int, ...]) -> list[tuple[Size, int]]:
    if len(symbolic) != len(actual):
        raise TaskError(detail=f"rank differs: {symbolic} against {actual}")
    return list(zip(symbolic, actual, strict=True))


def upper_bound(size: Size, symbols: Iterable[Symbol]) -> int | None:
    """A number that the size is never above; None where a symbol has no bound, or none is found.

    By intervals, since not every size grows with its symbols: s0 - s1, s0 % 8 and s0 // s1 do not.
    """
    if isinstance(size, int):
        return size
    ranges = {s.name: s for s in symbols}
    names = {s.name for s in size.free_symbols}
    if any(name not in ranges or ranges[name].hi is None for name in names):
        return None
    if size.has(NextPow2):  # torch has no interval for it; it stands in plans, around sizes that grow
        return evaluate(size, {name: ranges[name].upper for name in names})
    held = {s: ValueRanges(ranges[s.name].lo, ranges[s.name].upper) for s in size.free_symbols}
    bound = bound_sympy(size, held).upper
    return int(bound) if bound.is_Integer else None


def numel(shape: Iterable[Size]) -> Size:
    """The product of the sizes (1 for a scalar)."""
    sizes = list(shape)
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)
    return simplify(sympy.prod([sympy.sympify(size, strict=True) for size in sizes]))


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides, in elements, of a row-major dense tensor. A size-0 or size-1 dimension counts as 1, as in torch."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = simplify(step * (max(size, 1) if isinstance(size, int) else size))
    return tuple(reversed(strides))
