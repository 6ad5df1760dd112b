"""Cost: FLOPs and bytes as expressions, and the time they predict.

Predictions rank regions and tell hot from cold; no kernel is kept on a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from torch_kevolve.devices.base import Ceilings
from torch_kevolve.lowering.kinds import Kind, kind_of, name_of, tensors_of
from torch_kevolve.sizes import Size, evaluate, numel, simplify
from torch_kevolve.task import Op, Ref, TaskGraph

VECTOR_SHARE = 8
"""Pointwise work runs at about an eighth of the matmul peak: one operation a lane, no fused multiply-adds in tiles."""
LAUNCH_S = 2e-6
_HEAVY = frozenset(
    ["exp", "log", "erf", "tanh", "sigmoid", "pow", "sin", "cos", "rsqrt", "sqrt", "div", "log1p", "expm1", "erfinv"]
)


@dataclass(frozen=True)
class Cost:
    """Matmul FLOPs, other operations, and bytes that cross the region's boundary; sizes over the task's symbols."""

    matmul_flops: Size
    other_flops: Size
    bytes: Size
    half: bool = False

    def seconds(self, binding: Mapping[str, int], ceilings: Ceilings) -> float:
        """Predicted time of one perfect kernel at these sizes."""
        moved = evaluate(self.bytes, binding)
        bandwidth = ceilings.cache_bytes_s if moved < ceilings.cache_bytes / 2 else ceilings.copy_bytes_s
        peak = ceilings.bf16_flops if self.half else ceilings.fp32_flops
        arithmetic = evaluate(self.matmul_flops, binding) / peak
        arithmetic += evaluate(self.other_flops, binding) / (ceilings.fp32_flops / VECTOR_SHARE)
        return max(moved / bandwidth, arithmetic) + LAUNCH_S


def cost(graph: TaskGraph) -> Cost:
    """The cost of a task as one kernel: what it must compute, and its inputs and outputs once."""
    matmul: Size = 0
    other: Size = 0
    for op in graph.ops:
        flops = _matmul_flops(op, graph)
        if flops is not None:
            matmul = matmul + flops
        else:
            other = other + _other_flops(op, graph)
    moved: Size = sum(_read(graph), start=0) + sum((spec.nbytes for spec in graph.output_specs), start=0)
    half = any(spec.dtype in ("bfloat16", "float16") for spec in graph.inputs)
    return Cost(simplify(matmul), simplify(other), simplify(moved), half)


def _read(graph: TaskGraph) -> list[Size]:
    """Bytes of each input; of a table that is only indexed, as many rows as are read."""
    rows: dict[int, Size] = {}
    for op in graph.ops:
        table = op.args[0] if op.args else None
        if op.target.startswith(("aten.embedding.", "aten._embedding_bag")) and isinstance(table, Ref):
            index = op.args[1]
            assert isinstance(index, Ref)
            rows[table.index] = numel(graph.spec(index).shape) * numel(graph.spec(table).shape[1:])
    out: list[Size] = []
    for place, spec in enumerate(graph.inputs):
        whole = spec.nbytes
        if place in rows:
            width = simplify(whole / spec.numel) if spec.numel != 0 else 1
            touched = simplify(rows[place] * width)
            both_plain = isinstance(touched, int) and isinstance(whole, int)
            out.append(min(touched, whole) if both_plain else touched)  # type: ignore[type-var]
        else:
            out.append(whole)
    return out


def _matmul_flops(op: Op, graph: TaskGraph) -> Size | None:
    name = op.target.split(".")[1]
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return None
    first = op.args[1 if name in ("addmm", "baddbmm") else 0]
    assert isinstance(first, Ref)
    return 2 * op.outs[0].numel * graph.spec(first).shape[-1]


def _other_flops(op: Op, graph: TaskGraph) -> Size:
    name = op.target.split(".")[1]
    if name in ("reshape", "expand", "permute", "full", "iota", "slice", "select"):
        return 0
    sizes = [graph.spec(ref).numel for ref in op.refs()] + [spec.numel for spec in op.outs]
    if name in ("embedding", "gather"):
        sizes = [op.outs[0].numel]
    window = 1
    if "pool" in name and len(op.args) > 1 and isinstance(op.args[1], tuple):
        window = int(sympy.prod([k for k in op.args[1] if isinstance(k, int)]))
        sizes = [op.outs[0].numel]
    plain = [size for size in sizes if isinstance(size, int)]
    most: Size = max(plain) if len(plain) == len(sizes) and plain else sizes[-1] if not plain else _largest(sizes)
    return (10 if name in _HEAVY else 1) * window * most


def _largest(sizes: list[Size]) -> Size:
    symbolic = [size for size in sizes if not isinstance(size, int)]
    return max(symbolic, key=lambda size: len(str(size)))


def node_seconds(node: fx.Node, ceilings: Ceilings) -> float:
    """Predicted time of one FX node where it stands, fused by Inductor if it can be: half a read and half a write."""
    outs = tensors_of(node.meta.get("val"))
    kind = kind_of(node)
    if node.op != "call_function" or not outs or kind in (Kind.VIEW, Kind.MAKE, Kind.PICK):
        return 0.0
    reads = [t for x in node.all_input_nodes for t in tensors_of(x.meta.get("val"))]
    moved = sum(nbytes(t) for t in (*reads, *outs))
    if kind is Kind.POINTWISE:
        return 0.5 * nbytes(outs[0]) / ceilings.copy_bytes_s
    flops = node_flops(node, reads, outs)
    peak = ceilings.bf16_flops if outs[0].dtype in (torch.bfloat16, torch.float16) else ceilings.fp32_flops
    return max(moved / ceilings.copy_bytes_s, flops / peak) + LAUNCH_S


def node_flops(node: fx.Node, reads: list[torch.Tensor], outs: list[torch.Tensor]) -> float:
    """FLOPs of matmul, convolution and attention at this call's sizes; 0 for the rest."""
    name = name_of(node)
    if name in ("mm", "addmm", "bmm", "baddbmm") and len(reads) >= 2:
        first = reads[1] if name in ("addmm", "baddbmm") else reads[0]
        return 2.0 * elements(outs[0]) * hint(first.shape[-1])
    if name.startswith("convolution") and len(reads) >= 2:
        passes = 2.0 if name == "convolution_backward" else 1.0
        weight = reads[2] if passes == 2.0 and len(reads) > 2 else reads[1]
        field = elements(weight) / max(1, hint(weight.shape[0]))
        return passes * 2.0 * elements(reads[0] if passes == 2.0 else outs[0]) * field
    if "scaled_dot_product" in name and len(reads) >= 2:
        return 4.0 * elements(reads[0]) * hint(reads[1].shape[-2]) * (2.5 if "backward" in name else 1.0)
    return 0.0


def hint(size: int | torch.SymInt) -> int:
    """This call's number for a size; 4096 where there is none."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else 4096


def elements(t: torch.Tensor) -> int:
    """Elements of a tensor at this call's sizes."""
    total = 1
    for size in t.shape:
        total *= hint(size)
    return total


def nbytes(t: torch.Tensor) -> int:
    """Bytes of a tensor at this call's sizes."""
    return elements(t) * t.element_size()
