"""Exact: a graph carried out in fp64 at small sizes, to tell whether two compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_kevolve.errors import PlanError
from torch_kevolve.languages.replay import operator, unsaid
from torch_kevolve.sizes import Size
from torch_kevolve.task import FLOATS, Arg, DType, KernelTask, Op, Ref, TaskGraph, TensorSpec

SMALL = 2**18
"""Elements above which an input is cut before a proof: 64 operators over 2 MB of fp64 take about 20 ms."""
_CAST = "prims.convert_element_type.default"
_SHAPE_ARG = {"aten.reshape.default": 1, "aten.expand.default": 1, "aten.full.default": 0, "prims.iota.default": 0}


def same(one: TaskGraph, other: TaskGraph, task: KernelTask) -> bool:
    """Two graphs over the same inputs agree on random fp64 inputs of small size, up to 1e-9 of the largest value."""
    for left, right in _small((one, other), task):
        outcome = _compare(left, right)
        if outcome is not None:
            return outcome
    return False


def _small(graphs: Sequence[TaskGraph], task: KernelTask) -> Iterator[tuple[TaskGraph, ...]]:
    """Graphs over the same inputs at small sizes, the ones that change least first."""
    inside = {s.name: min(s.upper, max(s.lo, 3) + 2 * place) for place, s in enumerate(task.symbols)}
    below = {s.name: min(s.upper, 3 + 2 * place) for place, s in enumerate(task.symbols)}
    # A range that begins high makes large inputs. The graphs are then tried below it, where most of them run too.
    large = _largest(KernelTask(graphs[0], task.symbols).at(inside).graph) > SMALL
    for sizes in (below, inside) if large and below != inside else (inside,):
        whole = [KernelTask(graph, task.symbols).at(sizes).graph for graph in graphs]
        for change in _shrinks(whole[0]):
            made = tuple(_resize(graph, change) for graph in whole)
            if _largest(made[0]) <= 4 * SMALL:
                yield made


def _largest(graph: TaskGraph) -> int:
    return max((int(spec.numel) for spec in graph.inputs), default=0)


def _compare(one: TaskGraph, other: TaskGraph) -> bool | None:
    """None: the graph does not run at these sizes.

    Two draws, of either sign and positive: the root of a negative variance is NaN, and NaN agrees with every NaN. At
    least one draw must give results that are mostly finite.
    """
    telling = False
    for positive in (False, True):
        inputs = _offsets(one, _inputs(one, positive))
        want, got = _attempt(one, inputs), _attempt(other, inputs)
        if want is None:
            return None
        if got is None or not all(_close(a, b) for a, b in zip(want, got, strict=True)):
            return False
        telling |= all(float(x.isfinite().double().mean()) > 0.5 for x in want if x.numel())
    return telling


def runs(graph: TaskGraph, task: KernelTask, device: torch.device) -> bool:
    """The graph runs with its own types on a device, at a small size, and gives the types that it says.

    In fp64 all floats are alike: a library call may refuse the mixture of types that a region has.
    """
    for (trial,) in _small((graph,), task):
        drawn = _offsets(trial, _inputs(trial, positive=True))
        pairs = zip(drawn, trial.inputs, strict=True)
        inputs = [x.to(device, getattr(torch, spec.dtype)) for x, spec in pairs]
        try:
            made = run(trial, inputs, exact=False)
        except (RuntimeError, PlanError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        wanted = [getattr(torch, spec.dtype) for spec in trial.output_specs]
        return [y.dtype for y in made] == wanted
    return False


def _inputs(graph: TaskGraph, positive: bool) -> list[Tensor]:
    dice = torch.Generator().manual_seed(7)
    drawn = [_draw(spec, dice) for spec in graph.inputs]
    return [x.abs() if positive and x.is_floating_point() else x for x in drawn]


def _attempt(graph: TaskGraph, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    try:
        return run(graph, inputs)
    except (RuntimeError, PlanError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


def run(graph: TaskGraph, inputs: Sequence[Tensor], exact: bool = True) -> list[Tensor]:
    """Every operator in turn. `exact`: all floats in fp64, casts between floats left out."""
    values: list[tuple[Any, ...]] = [(x.double() if exact and x.is_floating_point() else x,) for x in inputs]
    device = inputs[0].device if inputs else torch.device("cpu")

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return values[arg.index][arg.item]
        if isinstance(arg, DType):
            return torch.float64 if exact and arg.name in FLOATS else getattr(torch, arg.name)
        return [real(each) for each in arg] if isinstance(arg, tuple) else arg

    for op in graph.ops:
        if exact and op.target == _CAST and op.outs[0].dtype in FLOATS:
            values.append((real(op.args[0]).double(),))
            continue
        kwargs = {name: real(value) for name, value in op.kwargs}
        function = operator(op.target)
        kwargs.update(unsaid(function, kwargs, device))
        made = function(*map(real, op.args), **kwargs)
        values.append(tuple(made) if isinstance(made, tuple | list) else (made,))
    return [values[ref.index][ref.item] for ref in graph.outputs]


def _close(want: Tensor, got: Tensor) -> bool:
    if not isinstance(got, Tensor) or want.shape != got.shape:
        return False
    if not want.is_floating_point():
        return bool(torch.equal(want.double(), got.double()))
    finite = want[want.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return bool(torch.allclose(want.double(), got.double(), rtol=1e-9, atol=1e-9 * max(scale, 1e-30), equal_nan=True))


def _draw(spec: TensorSpec, dice: torch.Generator) -> Tensor:
    shape = [int(s) for s in spec.shape]
    if spec.dtype in FLOATS:
        # Away from 0: saved statistics (a standard deviation, a weight total) stand among the inputs.
        values = torch.randn(shape, generator=dice, dtype=torch.float64)
        return values.sign() * (values.abs() + 0.05)
    if spec.dtype == "bool":
        return torch.randint(2, shape, generator=dice).bool()
    low = 0 if spec.low is None else spec.low
    high = 2 if spec.high is None else int(spec.high)
    return torch.randint(low, max(low, high) + 1, shape, generator=dice, dtype=getattr(torch, spec.dtype))


def _offsets(graph: TaskGraph, inputs: list[Tensor]) -> list[Tensor]:
    """Offsets of an embedding bag do not fall and begin at 0."""
    for op in graph.ops:
        offsets = op.args[2] if op.target.startswith("aten._embedding_bag") else None
        if isinstance(offsets, Ref) and offsets.index < len(inputs):
            sorted_ = inputs[offsets.index].sort().values
            if sorted_.numel():
                sorted_[0] = 0
            inputs[offsets.index] = sorted_
    return inputs


def _shrinks(graph: TaskGraph) -> list[dict[int, int]]:
    """Ways to make the graph small, the one that changes least first: which size becomes which."""
    if _largest(graph) <= SMALL:
        return [{}]
    leading = [int(spec.shape[0]) for spec in graph.inputs if len(spec.shape) > 1]
    sizes = sorted({int(s) for spec in graph.inputs for s in spec.shape if int(s) > 8}, reverse=True)
    first = {size: 4 for size in leading if size > 8}
    ways: list[dict[int, int]] = [first]
    for size in sizes:
        if size not in first:
            first = {**first, size: 8}
            ways.append(first)
    return [way for way in ways if way]


def _resize(graph: TaskGraph, change: dict[int, int]) -> TaskGraph:
    if not change:
        return graph

    def size(value: Size) -> Size:
        return change.get(value, value) if isinstance(value, int) else value

    def spec(s: TensorSpec) -> TensorSpec:
        high = (
            None
            if s.high is None
            else change[s.high + 1] - 1
            if isinstance(s.high, int) and s.high + 1 in change
            else s.high
        )
        return replace(s, shape=tuple(map(size, s.shape)), high=high)

    def op(o: Op) -> Op:
        place = _SHAPE_ARG.get(o.target)
        args = list(o.args)
        if place is not None and place < len(args):
            given = args[place]
            args[place] = tuple(size(x) for x in given) if isinstance(given, tuple) else size(given)  # type: ignore[arg-type]
        if o.target == "aten.native_layer_norm.default":
            args[1] = tuple(size(x) for x in args[1])  # type: ignore[union-attr, arg-type]
        if o.target == "aten.native_group_norm.default":
            args[3:6] = [size(x) for x in args[3:6]]  # type: ignore[arg-type]
        return replace(o, args=tuple(args), outs=tuple(map(spec, o.outs)))

    return TaskGraph(tuple(map(spec, graph.inputs)), tuple(map(op, graph.ops)), graph.outputs)
