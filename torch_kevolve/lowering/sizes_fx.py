"""Sizes in FX: a task's size as nodes of the graph that the kernel is put into."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torch_kevolve.errors import PlanError
from torch_kevolve.sizes import Json, Size, encode
from torch_kevolve.task import TensorSpec

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip


class SizeNodes:
    """Makes nodes before the graph's insertion point. Symbols are read off the inputs, so it works in a backward graph
    and adds no guard: every node's value is a size that the shape environment already holds."""

    def __init__(self, graph: fx.Graph, inputs: tuple[fx.Node, ...], specs: tuple[TensorSpec, ...]) -> None:
        self.graph = graph
        self._at: dict[str, tuple[fx.Node, int]] = {}
        self._made: dict[str, fx.Node] = {}
        for node, spec in zip(inputs, specs, strict=True):
            for axis, size in enumerate(spec.shape):
                if not isinstance(size, int) and size.is_Symbol:
                    self._at.setdefault(size.name, (node, axis))

    def value(self, size: Size) -> int | torch.SymInt:
        """The size as a number or symbolic number, for `meta["val"]`."""
        held = self.node(size)
        return held.meta["val"] if isinstance(held, fx.Node) else held

    def node(self, size: Size) -> int | fx.Node:
        """A number, or the node that computes it. Raises PlanError for a size that has no form in FX."""
        return self._tree(encode(size))

    def _tree(self, tree: Json) -> int | fx.Node:
        if isinstance(tree, int):
            return tree
        if isinstance(tree, str):
            if tree not in self._at:
                raise PlanError(detail=f"size {tree} cannot be read off an input")
            node, axis = self._at[tree]
            return self._call(torch.ops.aten.sym_size.int, (node, axis), node.meta["val"].shape[axis])
        mark, *rest = tree
        args = [self._tree(each) for each in rest]
        if mark == "ceil":
            return self._binary("//", self._binary("+", args[0], self._binary("+", args[1], -1)), args[1])
        if mark == "mod":
            return self._binary("%", self._binary("//", args[0], args[1]), args[2])
        if mark == "^" and isinstance(args[1], int) and 0 < args[1] < 8:
            mark, args = "*", [args[0]] * args[1]
        if mark not in _OPERATORS:
            raise PlanError(detail=f"size operator {mark!r} has no form in FX")
        out = args[0]
        for arg in args[1:]:
            out = self._binary(mark, out, arg)
        return out

    def _binary(self, mark: str, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
        function = _OPERATORS[mark]
        value = function(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b)))
        return value if isinstance(value, int) else self._call(function, (a, b), value)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> int | fx.Node:
        if isinstance(value, int):
            return value
        name = f"{getattr(function, '__name__', function)}{args!r}"
        if name not in self._made:
            node = self.graph.call_function(function, args)
            node.meta["val"] = value
            self._made[name] = node
        return self._made[name]
