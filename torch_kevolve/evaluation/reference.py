"""Reference: the task carried out exactly, and as a module that torch can compile."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_kevolve.languages.replay import operator
from torch_kevolve.sizes import bind, evaluate
from torch_kevolve.task import FLOATS, Arg, DType, KernelTask, Op, Ref, TaskGraph

CAST = "prims.convert_element_type.default"
CASTS = (CAST, "aten._to_copy.default")


def interpret(graph: TaskGraph, inputs: Sequence[Tensor], exact: bool = False) -> tuple[Tensor, ...]:
    """Run a graph operator by operator, at the sizes of `inputs`.

    `exact`: all floating values in fp64. A cast between floating types is then the identity, unless the program wrote it
    or its result is an output: those round to their type and are kept in fp64.
    """
    values: dict[int, tuple[Any, ...]] = {}
    for place, tensor in enumerate(inputs):
        values[place] = (tensor.double() if exact and tensor.is_floating_point() else tensor,)
    binding = bind((spec.shape, tuple(t.shape)) for spec, t in zip(graph.inputs, inputs, strict=True))
    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return values[arg.index][arg.item]
        if isinstance(arg, DType):
            return torch.float64 if exact and arg.name in FLOATS else getattr(torch, arg.name)
        if isinstance(arg, tuple):
            return [real(each) for each in arg]
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        return evaluate(arg, binding)

    device = inputs[0].device if inputs else torch.device("cpu")
    outputs = {ref.index for ref in graph.outputs}
    last = _last_reads(graph)
    for number, op in enumerate(graph.ops):
        index = len(graph.inputs) + number
        values[index] = _run(op, real, exact, index in outputs, device)
        for ref in op.refs():
            if last[ref.index] == number and ref.index not in outputs:
                values.pop(ref.index, None)
    return tuple(_rounded(values[ref.index][ref.item], graph, ref, exact) for ref in graph.outputs)


def _run(op: Op, real: Callable[[Arg], Any], exact: bool, is_output: bool, device: torch.device) -> tuple[Any, ...]:
    args = [real(arg) for arg in op.args]
    if exact and op.target in CASTS and op.outs[0].dtype in FLOATS:
        source = args[0]
        if source.is_floating_point() and (op.written or is_output):
            return (source.to(getattr(torch, op.outs[0].dtype)).double(),)
        return (source.double(),)
    kwargs = {name: real(value) for name, value in op.kwargs}
    function = operator(op.target)
    kwargs.update(_unsaid(function, kwargs, device))
    result = function(*args, **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _unsaid(function: Any, said: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Arguments that a task leaves out because they are no part of what is computed."""
    names = {argument.name for argument in function._schema.arguments}
    out: dict[str, Any] = {"device": device} if "device" in names else {}
    if "requires_grad" in names and "requires_grad" not in said:
        out["requires_grad"] = False
    return out


def _rounded(value: Tensor, graph: TaskGraph, ref: Ref, exact: bool) -> Tensor:
    """An fp64 result keeps its digits; where another type came out than the graph says, its type is set right."""
    want = getattr(torch, graph.spec(ref).dtype)
    if exact and value.is_floating_point():
        return value.double()
    return value if value.dtype == want else value.to(want)


def _last_reads(graph: TaskGraph) -> dict[int, int]:
    return {ref.index: number for number, op in enumerate(graph.ops) for ref in op.refs()}


def to_module(task: KernelTask, twin: bool = True) -> fx.GraphModule:
    """The task at concrete sizes as a GraphModule: what Inductor compiles, and what eager runs.

    With `twin`, the library operators of the eager twin where the task has one.
    """
    graph = task.twin if twin and task.twin is not None else task.graph
    made = fx.Graph()
    nodes: dict[int, Any] = {}
    for place in range(len(graph.inputs)):
        nodes[place] = made.placeholder(f"x{place}")

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            op = graph.op(arg)
            if op is None or len(op.outs) == 1:
                return nodes[arg.index]
            return made.call_function(python.getitem, (nodes[arg.index], arg.item))
        if isinstance(arg, DType):
            return getattr(torch, arg.name)
        if isinstance(arg, tuple):
            return [real(each) for each in arg]
        return arg

    for number, op in enumerate(graph.ops):
        kwargs: dict[str, Any] = {name: real(value) for name, value in op.kwargs}
        function = operator(op.target)
        kwargs = {**kwargs, **_unsaid(function, kwargs, None)}
        if "device" in kwargs:
            kwargs["device"] = fx_device(made, nodes)
        nodes[len(graph.inputs) + number] = made.call_function(function, tuple(real(a) for a in op.args), kwargs)
    made.output(tuple(real(ref) for ref in graph.outputs))
    module = fx.GraphModule(torch.nn.Module(), made)
    return module


def fx_device(graph: fx.Graph, nodes: Mapping[int, Any]) -> Any:
    """The device of the first input, asked at run time: a task names no device."""
    if not nodes:
        return torch.device("cpu")
    return graph.call_function(getattr, (nodes[0], "device"))
