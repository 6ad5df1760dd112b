"""Reference: the task carried out exactly, and as a module that torch can compile."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_kevolve.languages.replay import operator, unsaid
from torch_kevolve.sizes import bind, evaluate
from torch_kevolve.task import FLOATS, Arg, DType, KernelTask, Op, Ref, TaskGraph

CAST = "prims.convert_element_type.default"
CASTS = (CAST, "aten._to_copy.default")


HALF_TO_FLOAT = ("aten._softmax.default", "aten._log_softmax.default")
CHOICES = {"aten.argmax.default": (0, True), "aten.argmin.default": (0, False), "aten.max.dim": (1, True),
           "aten.min.dim": (1, False)}  # fmt: skip
"""Operators that choose an index: which of their results it is, and whether the largest value is chosen."""
MOMENTS = "aten.var_mean.correction"
ATTENTION = ("aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
             "aten._scaled_dot_product_cudnn_attention.default",
             "aten._scaled_dot_product_flash_attention_for_cpu.default")  # fmt: skip
"""Attention kernels of half types: no fp64 form exists of most, so the reference writes them out."""


@dataclass(frozen=True)
class Choice:
    """An output that is an index: what it is chosen from, along which axis (None: of all), largest or least."""

    source: Ref
    dim: int | None
    largest: bool


def choices(graph: TaskGraph) -> dict[int, Choice]:
    """Outputs that are indices of best values, where the values are computed (an input's own order is exact)."""
    out: dict[int, Choice] = {}
    for place, ref in enumerate(graph.outputs):
        op = graph.op(ref)
        if op is None or op.target not in CHOICES or CHOICES[op.target][0] != ref.item:
            continue
        source = op.args[0]
        if isinstance(source, Ref) and source.index >= len(graph.inputs):
            dim = op.args[1] if len(op.args) > 1 else None
            out[place] = Choice(source, dim if isinstance(dim, int) else None, CHOICES[op.target][1])
    return out


def interpret(
    graph: TaskGraph, inputs: Sequence[Tensor], exact: bool = False, also: Sequence[Ref] = ()
) -> tuple[Tensor, ...]:
    """Run a graph operator by operator, at the sizes of `inputs`. The values of `also` follow the outputs.

    `exact`: all floating values in fp64. A cast between floating types is then the identity, unless the program
    wrote it or its result is an output: those round to their type and are kept in fp64.
    """
    values: dict[int, tuple[Any, ...]] = {place: (tensor,) for place, tensor in enumerate(inputs)}
    binding = bind((spec.shape, tuple(t.shape)) for spec, t in zip(graph.inputs, inputs, strict=True))

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            value = values[arg.index][arg.item]
            if exact and arg.index < len(inputs) and value.is_floating_point():
                # At the first read, not before: a 2 GB bf16 input is 8 GB in fp64.
                value = value.double()
                values[arg.index] = (value,)
            return value
        if isinstance(arg, DType):
            return torch.float64 if exact and arg.name in FLOATS else getattr(torch, arg.name)
        if isinstance(arg, tuple):
            return [real(each) for each in arg]
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        return evaluate(arg, binding)

    device = inputs[0].device if inputs else torch.device("cpu")
    outputs = {ref.index for ref in graph.outputs}
    kept = outputs | {ref.index for ref in also}
    last = {ref.index: number for number, op in enumerate(graph.ops) for ref in op.refs()}
    for number, op in enumerate(graph.ops):
        index = len(graph.inputs) + number
        values[index] = _run(op, real, exact, index in outputs, device)
        for ref in op.refs():
            if last[ref.index] == number and ref.index not in kept:
                values.pop(ref.index, None)
    results = tuple(_rounded(values[ref.index][ref.item], graph, ref, exact) for ref in graph.outputs)
    found = (*results, *(real(ref) for ref in also))
    # `real` calls itself, so it and what it holds are a cycle that only the collector would free: 3 times the input for
    # every draw, 50 GB of a GPU before it came round.
    values.clear()
    return found


def _run(op: Op, real: Callable[[Arg], Any], exact: bool, is_output: bool, device: torch.device) -> tuple[Any, ...]:
    args = [real(arg) for arg in op.args]
    if exact and op.target in CASTS and op.outs[0].dtype in FLOATS:
        source = args[0]
        if source.is_floating_point() and (op.written or is_output):
            return (source.to(getattr(torch, op.outs[0].dtype)).double(),)
        return (source.double(),)
    kwargs = {name: real(value) for name, value in op.kwargs}
    if exact and op.target in HALF_TO_FLOAT and len(args) > 2:
        args[2] = False
    if exact and op.target in ATTENTION:
        return _attention(op, args, kwargs)
    function = operator(op.target)
    kwargs.update(unsaid(function, kwargs, device))
    result = function(*args, **kwargs)
    if exact and op.target == MOMENTS:
        # torch's mean is a running one, which an infinity makes NaN, but for the last element's.
        return result[0], args[0].mean(args[1] if len(args) > 1 else None, keepdim=kwargs.get("keepdim", False))
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _attention(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """softmax(scale q k^T + bias) v, and the logarithm of the sums that the softmax divides by.

    Without dropout. The other results of these operators (seeds, offsets) are no outputs of a task.
    """
    names = [a.name for a in operator(op.target)._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    scale = given.get("scale") or query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    bias = given.get("attn_bias", given.get("attn_mask"))
    if bias is not None:
        scores = scores + bias
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    sums = scores.logsumexp(-1)
    return (torch.matmul(torch.exp(scores - sums.unsqueeze(-1)), value), sums, *[None] * (len(op.outs) - 2))


def _rounded(value: Tensor, graph: TaskGraph, ref: Ref, exact: bool) -> Tensor:
    """An fp64 result keeps its digits; where another type came out than the graph says, its type is set right."""
    want = getattr(torch, graph.spec(ref).dtype)
    if exact and value.is_floating_point():
        return value.double()
    return value if value.dtype == want else value.to(want)


def to_module(task: KernelTask, twin: bool = True, weights: Mapping[int, Tensor] | None = None) -> fx.GraphModule:
    """The task at concrete sizes as a GraphModule: what Inductor compiles, and what eager runs.

    With `twin`, the library operators of the eager twin where the task has one. Inputs that `weights` holds, by their
    place, become parameters; the module takes the others.
    """
    root = torch.nn.Module()
    graph = task.twin if twin and task.twin is not None else task.graph
    made = fx.Graph()
    nodes: dict[int, Any] = {}
    for place in range(len(graph.inputs)):
        if weights is not None and place in weights:
            frozen = weights[place]
            root.register_parameter(f"x{place}", torch.nn.Parameter(frozen, requires_grad=False))
            nodes[place] = made.get_attr(f"x{place}")
        else:
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
        kwargs = {**kwargs, **unsaid(function, kwargs, None)}
        if "device" in kwargs:
            kwargs["device"] = fx_device(made, nodes)
        nodes[len(graph.inputs) + number] = made.call_function(function, tuple(real(a) for a in op.args), kwargs)
    made.output(tuple(real(ref) for ref in graph.outputs))
    return fx.GraphModule(root, made)


def fx_device(graph: fx.Graph, nodes: Mapping[int, Any]) -> Any:
    """The device of the first input, asked at run time: a task names no device."""
    if not nodes:
        return torch.device("cpu")
    return graph.call_function(getattr, (nodes[0], "device"))
