"""Matmul parts: what the matmul families share.

The anchor with its operands as seen through views, the logsumexp that may follow it, and texts that load tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of

ANCHORS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Matmul:
    """`left` [B, M, K], `right` [B, K, N] and a bias, as leaves; `first`, `second`, `bias_strides` are strides over
    (B, M, K), (B, K, N), (B, M, N). Without a batch, B is 1 with stride 0. `body` ends at the outputs, or, with
    `tail`, at the value whose row logsumexp the tail starts from."""

    left: Leaf
    right: Leaf
    bias: Leaf | None
    first: tuple[Size, Size, Size]
    second: tuple[Size, Size, Size]
    bias_strides: tuple[Size, Size, Size]
    sizes: tuple[Size, Size, Size, Size]
    dtype: str
    body: Body
    tail: Body | None = None


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
    ends = logsumexp(graph, index) if len(domain) == 2 else None
    if ends is None:
        body = after(graph, {(index, 0): "acc"}, domain, language)
        return (
            None if body is None else Matmul(left, right, bias, first, second, over, (batch, m, n, k), left.dtype, body)
        )
    head, end = ends
    body = after(replace(graph, outputs=(head,)), {(index, 0): "acc"}, domain, language)
    tail = after(graph, {(end.index, 0): "acc"}, (m,), language)
    if body is None or tail is None:
        return None
    return Matmul(left, right, bias, first, second, over, (batch, m, n, k), left.dtype, body, tail)


def logsumexp(graph: TaskGraph, anchor: int) -> tuple[Ref, Ref] | None:
    """(value, result) of `max + log(sum(exp(value - max)))` over the last dimension, in the form of its
    decomposition."""
    for place, op in enumerate(graph.ops):
        if name_of(op) != "log" or len(graph.inputs) + place <= anchor:
            continue
        total = _made(graph, op.args[0], "sum")
        power = _made(graph, total.args[0], "exp") if total else None
        less = _made(graph, power.args[0], "sub") if power else None
        if total is None or less is None or not _last(graph, total):
            continue
        value, peak = less.args[0], _strip(graph, less.args[1])
        chosen = _op(graph, peak)
        if chosen is not None and name_of(chosen) == "where":
            peak = chosen.args[2]
        top = _made(graph, peak, "amax")
        if top is None or top.args[0] != value or not _last(graph, top) or not isinstance(value, Ref):
            continue
        for other, last in enumerate(graph.ops):
            if name_of(last) != "add" or dict(last.kwargs):
                continue
            pair = [_strip(graph, arg) for arg in last.args]
            log = Ref(len(graph.inputs) + place)
            if log in pair and _strip(graph, less.args[1]) in pair:
                return value, Ref(len(graph.inputs) + other)
    return None


def _op(graph: TaskGraph, value: object) -> Op | None:
    return graph.op(value) if isinstance(value, Ref) else None


def _made(graph: TaskGraph, value: object, name: str) -> Op | None:
    op = _op(graph, _strip(graph, value))
    return op if op is not None and name_of(op) == name else None


def _strip(graph: TaskGraph, value: object) -> object:
    op = _op(graph, value)
    while op is not None and name_of(op) in ("squeeze", "unsqueeze", "view", "expand", "reshape"):
        value = op.args[0]
        op = _op(graph, value)
    return value


def _last(graph: TaskGraph, op: Op) -> bool:
    source = op.args[0]
    rank = len(graph.spec(source).shape) if isinstance(source, Ref) else 0
    dims = op.args[1] if len(op.args) > 1 else None
    return isinstance(dims, tuple) and dims in ((-1,), (rank - 1,))


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
