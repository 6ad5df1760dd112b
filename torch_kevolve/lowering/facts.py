"""Facts: what is known of a task's inputs and of the flags it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_kevolve.lowering.canon import RESHAPE
from torch_kevolve.sizes import Size
from torch_kevolve.task import Ref, TaskGraph

_THROUGH = frozenset({RESHAPE, "aten.expand.default", "aten.where.self", "prims.convert_element_type.default",
                      "aten.permute.default", "aten.clone.default"})  # fmt: skip
_MATMULS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})


def index_bounds(graph: TaskGraph) -> TaskGraph:
    """Inputs that are used as indices, with the closed bounds that the operator demands.

    The bounds hold where the value is used: an index that a `where` replaces (ignore_index) may lie outside.
    """
    found: dict[int, tuple[int, Size]] = {}
    for op in graph.ops:
        for ref, bounds in _demands(graph, op.target, op.args):
            for index in _sources(graph, ref):
                found.setdefault(index, bounds)
    inputs = list(graph.inputs)
    for index, (low, high) in found.items():
        inputs[index] = replace(inputs[index], low=low, high=high)
    return replace(graph, inputs=tuple(inputs))


def _demands(graph: TaskGraph, target: str, args: tuple[object, ...]) -> list[tuple[Ref, tuple[int, Size]]]:
    def size(place: int, axis: int) -> Size:
        ref = args[place]
        assert isinstance(ref, Ref)
        return graph.spec(ref).shape[axis]

    def bound(place: int, high: Size) -> list[tuple[Ref, tuple[int, Size]]]:
        ref = args[place] if place < len(args) else None
        return [(ref, (0, high))] if isinstance(ref, Ref) else []

    if target == "aten.embedding.default":
        return bound(1, size(0, 0) - 1)
    if target in ("aten.gather.default", "aten.index_select.default") and isinstance(args[1], int):
        return bound(2, size(0, args[1]) - 1)
    if target.startswith("aten._embedding_bag"):
        return [*bound(1, size(0, 0) - 1), *bound(2, size(1, 0))]
    if target == "aten.index.Tensor" and isinstance(args[1], tuple):
        pairs = [(ref, axis) for axis, ref in enumerate(args[1]) if isinstance(ref, Ref)]
        return [(ref, (0, size(0, axis) - 1)) for ref, axis in pairs if graph.spec(ref).dtype != "bool"]
    return []


def _sources(graph: TaskGraph, start: Ref) -> list[int]:
    out, stack = [], [start]
    while stack:
        ref = stack.pop()
        op = graph.op(ref)
        if op is None:
            if graph.spec(ref).dtype in ("int64", "int32"):
                out.append(ref.index)
        elif op.target in _THROUGH:
            stack.extend(op.refs())
    return out


def fp32_products(device: str) -> str:
    """How products of fp32 are made, in the words of `torch.set_float32_matmul_precision`.

    Its getter raises where `fp32_precision`, the newer switch, was set for one backend alone.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        return {"tf32": "high", "bf16": "medium"}.get(backend.matmul.fp32_precision, "highest")


def task_flags(graph: TaskGraph, device: torch.device) -> tuple[tuple[str, str], ...]:
    """torch's switches that change what is right for this task; those at their default are not named."""
    flags: dict[str, str] = {}
    if torch.are_deterministic_algorithms_enabled():
        flags["deterministic"] = "1"
    matmul = any(op.target in _MATMULS for op in graph.ops)
    half = any(spec.dtype in ("bfloat16", "float16") for spec in graph.inputs)
    if matmul and device.type == "cuda":
        backend = torch.backends.cuda.matmul
        if not half and fp32_products("cuda") != "highest":
            flags["tf32"] = "1"
        if half and not backend.allow_bf16_reduced_precision_reduction:
            flags["bf16_reduction"] = "0"
    if matmul and device.type == "cpu" and not half and fp32_products("cpu") == "medium":
        flags["precision"] = "medium"
    return tuple(sorted(flags.items()))
