"""Shapes: which atomic axes each dimension of each value runs over."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TypeAlias

import sympy

from torch_kevolve.sizes import Size, free_symbols, numel, simplify, symbol
from torch_kevolve.task import Op, Ref, TaskGraph

Dims: TypeAlias = "tuple[tuple[int, ...], ...]"
Groups: TypeAlias = "dict[int, Dims]"
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)


class Refusal(Exception):
    """Inside the analysis: the task is of another kind."""


def weight(size: Size) -> int:
    """A number that orders sizes and tells unlike expressions apart: every symbol stands for a prime of its own."""
    if isinstance(size, int):
        return size
    names = sorted(free_symbols([size]))
    return int(size.subs({symbol(n): _PRIMES[int(n[1:] or 0) % len(_PRIMES)] for n in names}))


def ratio_of(a: Size, b: Size) -> Size:
    """a / b where that is a whole number for every value of the symbols. Raises Refusal elsewhere."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0 or a % b:
            raise Refusal("shapes that have no common refinement")
        return a // b
    quotient = sympy.cancel(sympy.sympify(a, strict=True) / b)
    if quotient.as_numer_denom()[1] != 1:
        raise Refusal("shapes that have no common refinement")
    return simplify(quotient)


def propagate(
    graph: TaskGraph, views: Collection[str], reductions: Collection[str], gather: str, iota: str
) -> tuple[tuple[Size, ...], Groups]:
    """Sizes of the atomic axes, and for every value the axes of each of its dimensions. Raises Refusal."""
    base = len(graph.inputs)
    shapes: list[tuple[Size, ...]] = [s.shape for s in graph.inputs] + [op.outs[0].shape for op in graph.ops]
    computed = {base + n for n, op in enumerate(graph.ops) if op.target not in views}
    for op in graph.ops:
        if op.target not in views:
            computed |= {ref.index for ref in op.refs()}
    full = max((weight(numel(shapes[i])) for i in computed), default=0)
    if full == 0:
        raise Refusal("nothing is computed, or a size is zero")
    linear = {i for i in computed if weight(numel(shapes[i])) == full}
    sizes, cuts = _refine([shapes[i] for i in linear])
    groups: Groups = {i: _linear(shapes[i], cuts) for i in linear}
    changed = True
    while changed:
        changed = False
        for number, op in enumerate(graph.ops):
            changed |= _relate(op, base + number, shapes, groups, sizes, views, reductions, gather)
    for index, shape in enumerate(shapes):
        if index not in groups and all(size == 1 for size in shape):
            groups[index] = ((),) * len(shape)
    missing = [i for i in range(len(shapes)) if i not in groups]
    if missing:
        raise Refusal(f"value {missing[0]} cannot be laid over the axes")
    return sizes, groups


def _refine(shapes: Sequence[tuple[Size, ...]]) -> tuple[tuple[Size, ...], list[Size]]:
    """Axis sizes outermost first, and the suffix products at which they are cut, largest first."""
    cuts: dict[int, Size] = {}
    for shape in shapes:
        product: Size = 1
        cuts[1] = 1
        for size in reversed(shape):
            product = simplify(product * size)
            cuts[weight(product)] = product
    ordered = [cuts[w] for w in sorted(cuts, reverse=True)]
    sizes = tuple(ratio_of(a, b) for a, b in itertools.pairwise(ordered))
    return sizes, ordered


def _linear(shape: tuple[Size, ...], cuts: Sequence[Size]) -> Dims:
    """The axes of each dimension of a dense full-size shape."""
    place = {weight(cut): number for number, cut in enumerate(cuts)}
    dims: list[tuple[int, ...]] = []
    end: Size = 1
    for size in reversed(shape):
        start = simplify(end * size)
        dims.append(tuple(range(place[weight(start)], place[weight(end)])))
        end = start
    return tuple(reversed(dims))


def _relate(
    op: Op,
    out: int,
    shapes: Sequence[tuple[Size, ...]],
    groups: Groups,
    sizes: Sequence[Size],
    views: Collection[str],
    reductions: Collection[str],
    gather: str,
) -> bool:
    """Fill in what one operator says of its operands and its result; True when something new was learned."""
    known = len(groups)
    refs = list(op.refs())
    if op.target in views:
        if refs:
            _view(op, refs[0].index, out, shapes, groups, sizes)
    elif op.target in reductions:
        source = refs[0].index
        if source in groups and out not in groups:
            rank = len(shapes[source])
            given = op.args[1] if len(op.args) > 1 else None
            wanted = range(rank) if given is None or given == () else given if isinstance(given, tuple) else (given,)
            taken = {int(d) % rank for d in wanted} if rank else set()  # type: ignore[arg-type]
            kept = len(shapes[out]) == rank
            dims = [() if d in taken else axes for d, axes in enumerate(groups[source]) if kept or d not in taken]
            _learn(groups, out, tuple(dims))
    elif op.target == gather:
        source, index = refs[0].index, refs[1].index
        if source in groups:
            dim = int(op.args[1]) % len(shapes[source])  # type: ignore[arg-type]
            dims = [() if d == dim else axes for d, axes in enumerate(groups[source])]
            _learn(groups, out, tuple(dims))
            _learn(groups, index, tuple(dims))
    else:
        _pointwise(refs, out, shapes, groups)
    return len(groups) != known


def _learn(groups: Groups, index: int, dims: Dims) -> None:
    known = groups.setdefault(index, dims)
    if known != dims:
        raise Refusal("a tensor is read in two ways")


def _pointwise(refs: Sequence[Ref], out: int, shapes: Sequence[tuple[Size, ...]], groups: Groups) -> None:
    if out not in groups:
        dims: list[tuple[int, ...] | None] = [() if size == 1 else None for size in shapes[out]]
        for ref in refs:
            if ref.index in groups:
                offset = len(dims) - len(shapes[ref.index])
                for place, axes in enumerate(groups[ref.index]):
                    if axes:
                        dims[offset + place] = axes
        if all(axes is not None for axes in dims):
            groups[out] = tuple(axes or () for axes in dims)
    if out in groups:
        for ref in refs:
            shape = shapes[ref.index]
            offset = len(shapes[out]) - len(shape)
            dims_ = tuple(() if size == 1 else groups[out][offset + place] for place, size in enumerate(shape))
            _learn(groups, ref.index, dims_)


def _view(
    op: Op, source: int, out: int, shapes: Sequence[tuple[Size, ...]], groups: Groups, sizes: Sequence[Size]
) -> None:
    name = op.target.split(".")[1]
    if name == "permute":
        order = [int(d) % len(shapes[source]) for d in op.args[1]]  # type: ignore[union-attr, arg-type]
        if source in groups:
            _learn(groups, out, tuple(groups[source][d] for d in order))
        elif out in groups:
            dims = [groups[out][order.index(d)] for d in range(len(order))]
            _learn(groups, source, tuple(dims))
        return
    if name == "expand":
        offset = len(shapes[out]) - len(shapes[source])
        if out in groups:
            pairs = enumerate(shapes[source])
            _learn(groups, source, tuple(() if size == 1 else groups[out][offset + d] for d, size in pairs))
        return
    if source in groups:
        _learn(groups, out, _regroup(groups[source], shapes[out], sizes))
    elif out in groups:
        _learn(groups, source, _regroup(groups[out], shapes[source], sizes))


def _regroup(dims: Dims, shape: tuple[Size, ...], sizes: Sequence[Size]) -> Dims:
    """The same axes in the same order, dealt out to the dimensions of another shape."""
    axes = [axis for group in dims for axis in group]
    out: list[tuple[int, ...]] = []
    for size in shape:
        taken: list[int] = []
        product: Size = 1
        while weight(product) < weight(size) and axes:
            taken.append(axes.pop(0))
            product = simplify(product * sizes[taken[-1]])
        if weight(product) != weight(size):
            raise Refusal("a view across the axes")
        out.append(tuple(taken))
    if axes:
        raise Refusal("a view across the axes")
    return tuple(out)
