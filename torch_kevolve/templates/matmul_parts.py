"""Matmul parts: what the matmul families share.

The anchor with its operands as seen through views and what follows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import KernelTask, Ref, TaskGraph
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of
from torch_kevolve.templates.matmul_rows import RowTail, row_tail

ANCHORS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Matmul:
    """`left` [B, M, K], `right` [B, K, N] and a bias, as leaves; `first`, `second`, `bias_strides` are strides over
    (B, M, K), (B, K, N), (B, M, N). Without a batch, B is 1 with stride 0. `body` ends at the outputs, or, with
    `tail`, at the value whose rows the tail reduces."""

    left: Leaf
    right: Leaf
    bias: Leaf | None
    first: tuple[Size, Size, Size]
    second: tuple[Size, Size, Size]
    bias_strides: tuple[Size, Size, Size]
    sizes: tuple[Size, Size, Size, Size]
    dtype: str
    body: Body
    tail: RowTail | None = None


def find(task: KernelTask, language: str = "triton") -> Matmul | None:
    """The one matmul of a task with everything around it, as statements of a language; None where something
    does not fit."""
    graph = task.graph
    places = [i for i, op in enumerate(graph.ops) if name_of(op) in ANCHORS]
    if len(places) != 1:
        return None
    op = graph.ops[places[0]]
    name, args = name_of(op), list(op.args)
    if dict(op.kwargs) or len(args) != (3 if name in ("addmm", "baddbmm") else 2):
        return None  # alpha and beta other than 1
    bias_ref = args.pop(0) if name in ("addmm", "baddbmm") else None
    left, right = _leaf(graph, args[0]), _leaf(graph, args[1])
    bias = _leaf(graph, bias_ref) if bias_ref is not None else None
    if left is None or right is None or (bias_ref is not None and bias is None):
        return None
    batch: Size = left.shape[0] if len(left.shape) == 3 else 1
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    index = len(graph.inputs) + places[0]
    domain = (batch, m, n) if len(left.shape) == 3 else (m, n)
    first, second = _three(left.strides), _three(right.strides)
    over = (0, 0, 0) if bias is None else _bias(bias, op.outs[0].shape)
    tail = row_tail(graph, index, (m, n), language) if len(domain) == 2 else None
    ends = graph if tail is None else replace(graph, outputs=(tail.x,))
    body = after(ends, {(index, 0): "acc"}, domain, language)
    if body is None:
        return None
    return Matmul(left, right, bias, first, second, over, (batch, m, n, k), left.dtype, body, tail)


def _leaf(graph: TaskGraph, ref: object) -> Leaf | None:
    return leaf(graph, ref) if isinstance(ref, Ref) else None


def _three(strides: tuple[Size, ...]) -> tuple[Size, Size, Size]:
    return (strides[0] if len(strides) == 3 else 0, strides[-2], strides[-1])


def _bias(bias: Leaf, out: tuple[Size, ...]) -> tuple[Size, Size, Size]:
    pad = 3 - len(bias.shape)
    wide = [*[0] * pad, *(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.strides, strict=True))]
    return (wide[0], wide[1], wide[2])


def in_bytes(size: Size, by: int) -> bool:
    """Whether a stride of so many elements of `by` bytes is a known multiple of 16 bytes."""
    return isinstance(size, int) and size * by % 16 == 0


def flops(found: Matmul) -> float:
    total = simplify(2 * numel(found.sizes))
    return float(total) if isinstance(total, int) else math.inf


TILE = """
@triton.jit
def tile_of(t, nm, nn, GROUP: tl.constexpr):
    wide = GROUP * nn
    first = (t // wide) * GROUP
    height = tl.minimum(nm - first, GROUP)
    return first + (t % wide) % height, (t % wide) // height
"""
"""Tiles in groups of GROUP rows, so that their columns are still in L2."""
