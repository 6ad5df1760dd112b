"""Graph key: what names one Dynamo graph for ever.

The hash covers operators, arguments, input specs with renamed symbols and their ranges, and whatever the caller adds
(settings, flags, device). Node names, parameter names, stack traces, paths and object addresses leave no trace.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torch_kevolve.lowering.buckets import Buckets
from torch_kevolve.sizes import Json
from torch_kevolve.task import digest


class Unnamed(Exception):
    """Something in the graph has no lasting name, so neither has the graph."""


def graph_key(gm: fx.GraphModule, facts: Mapping[str, Json], buckets: bool = False) -> str | None:
    """sha256 in hex over the graph, its inputs' specs, torch's flags and `facts`; None where no lasting name exists.

    Input specs are read off the placeholders: the example inputs hold numbers where sizes are symbolic. `buckets`: the
    ranges of sizes are those of this call's buckets, which the graph's tasks will have.
    """
    naming = _Naming(buckets)
    try:
        graph = naming.graph(gm)
    except Unnamed:
        return None
    # Without an input that asks for a gradient, grad mode makes no difference to the graph.
    switches = {**flags(), "grad": naming.wants_grad and torch.is_grad_enabled()}
    return digest({"graph": graph, "ranges": naming.ranges(), "flags": switches, "facts": dict(facts)})


def flags() -> dict[str, Json]:
    """torch's switches that change what a compiled graph computes or how fast a kernel of it is."""
    backends: Any = torch.backends
    cuda, mkldnn, cudnn = backends.cuda.matmul, backends.mkldnn, backends.cudnn
    return {
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": _said(torch.get_float32_matmul_precision, cuda, mkldnn.matmul),
        "tf32": [
            _said(lambda: bool(cuda.allow_tf32), cuda),
            _said(lambda: bool(cudnn.allow_tf32), cudnn.conv, cudnn.rnn),
        ],
        "bf16_reduction": str(cuda.allow_bf16_reduced_precision_reduction),
        "fp16_reduction": str(cuda.allow_fp16_reduced_precision_reduction),
        "mkldnn": bool(mkldnn.enabled),
        "threads": torch.get_num_threads(),
        "autocast": {kind: _autocast(kind) for kind in ("cpu", "cuda")},
    }


def _said(old: Callable[[], Json], *new: Any) -> Json:
    """What torch's older switch says. It raises where the newer ones, `fp32_precision`, contradict each other: then
    what they say."""
    try:
        return old()
    except RuntimeError:
        return [str(each.fp32_precision) for each in new]


def _autocast(kind: str) -> Json:
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


class _Naming:
    """Gives every symbol its canonical name in the order in which the inputs show them."""

    def __init__(self, buckets: bool = False) -> None:
        self._bucketed = buckets
        self._buckets: Buckets | None = None
        self._symbols: dict[Any, str] = {}
        self._range_of: dict[str, tuple[str, str]] = {}
        self.wants_grad = False

    def ranges(self) -> Json:
        return self._range_of

    def graph(self, gm: fx.GraphModule) -> Json:
        place: dict[fx.Node, int] = {}
        rows: list[Json] = []
        for node in gm.graph.nodes:
            place[node] = len(place)
            rows.append([node.op, self._target(gm, node), self._args(node.args, place), self._args(node.kwargs, place)])
        return rows

    def _target(self, gm: fx.GraphModule, node: fx.Node) -> Json:
        if node.op in ("placeholder", "output"):
            return None if node.op == "output" else self._placeholder(node)
        if node.op == "call_method":
            return str(node.target)
        if node.op == "call_function":
            return self.callable(node.target)
        held = functools.reduce(getattr, str(node.target).split("."), gm)
        if node.op == "call_module" and not isinstance(held, fx.GraphModule):
            tensors = [self.value(t) for t in (*held.parameters(), *held.buffers())]
            return [type(held).__module__, type(held).__qualname__, held.extra_repr(), tensors]
        return self.value(held)

    def _placeholder(self, node: fx.Node) -> Json:
        for name in ("example_value", "val"):
            if name in node.meta:
                return self.value(node.meta[name])
        raise Unnamed("a placeholder without a spec")

    def callable(self, target: Any) -> Json:
        if isinstance(target, torch._ops.OperatorBase):
            return str(target)
        module = getattr(target, "__module__", None)
        name = getattr(target, "__qualname__", getattr(target, "__name__", None))
        if name is None or "<locals>" in name or "<lambda>" in name:
            # torch.nn.functional.max_pool2d is a function made inside another; it has a lasting name all the same.
            name = str(getattr(target, "__name__", ""))
            if getattr(sys.modules.get(str(module)), name, None) is not target:
                raise Unnamed(repr(target))
        return f"{module}.{name}"

    def _args(self, value: Any, place: Mapping[fx.Node, int]) -> Json:
        if isinstance(value, fx.Node):
            return {"node": place[value]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, *(self._args(v, place) for v in value)]
        if isinstance(value, dict):
            return {"dict": [[str(k), self._args(v, place)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self._args(v, place) for v in (value.start, value.stop, value.step)]}
        return self.value(value)

    def value(self, value: Any) -> Json:
        """The JSON name of a leaf: a number, a tensor's spec, a dtype, a nested graph ... Raises Unnamed."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float | complex):
            return {"number": repr(value)}
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return {"size": self._size(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.Size):
            return str(value)
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, fx.GraphModule):
            return {"graph": self.graph(value)}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return self.callable(value)
        if isinstance(value, torch._ops.OperatorBase):
            return str(value)
        raise Unnamed(repr(type(value)))

    def _tensor(self, t: torch.Tensor) -> Json:
        strides = [self._size(s) for s in t.stride()] if t.layout is torch.strided else None
        self.wants_grad = self.wants_grad or t.requires_grad
        return {
            "tensor": [str(t.dtype), t.device.type, str(t.layout), t.requires_grad],
            "class": "Tensor" if _plain(t) else type(t).__qualname__,
            "shape": [self._size(s) for s in t.shape],
            "strides": strides,
        }

    def _size(self, size: Any) -> Json:
        if isinstance(size, int):
            return size
        node = size.node
        expr = node.expr
        for name in sorted(expr.free_symbols, key=str):
            if name not in self._symbols:
                canonical = f"s{len(self._symbols)}"
                self._symbols[name] = canonical
                found = self._range(node.shape_env, name)
                self._range_of[canonical] = ("", "") if found is None else (str(found.lower), str(found.upper))
        import sympy

        return str(expr.xreplace({old: sympy.Symbol(new, integer=True) for old, new in self._symbols.items()}))

    def _range(self, env: Any, name: Any) -> Any:
        if self._bucketed:
            # One for the graph: to make it walks over all of the program's inputs.
            if self._buckets is None or self._buckets.env is not env:
                self._buckets = Buckets.of(env)
            return self._buckets.range_of(name)
        return getattr(env, "var_to_range", {}).get(name)


def _plain(t: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(t) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
