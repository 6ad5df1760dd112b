"""Embedding C++: rows of a table, and sums or means over bags of them.

A bag keeps U vectors of columns in registers while it walks over its indices; rows some indices ahead are asked for
early, since neither their addresses nor their lines can be guessed by the machine. Indices are clamped: eager raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import Arg, KernelTask, Op, Ref
from torch_kevolve.templates.anchor_cpp import (
    Args,
    aligned,
    cpp_space,
    index_of,
    lanes_of,
    load_text,
    statements,
    stores,
)
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of, spread
from torch_kevolve.templates.base import Choice, Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS

NAME = "embedding_cpp"
BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
SMALL = 16384
"""Elements below which a second thread costs more than it brings."""


@dataclass(frozen=True)
class Lookup:
    """Leaves of the anchor; `flat` the indices' stride per row (per index of a bag); `mode` 0 sum, 1 mean.

    `domain`: the result's sizes, over which `body` stands; its rows together are `rows`.
    """

    table: Leaf
    indices: Leaf
    flat: Size
    rows: Size
    columns: Size
    domain: tuple[Size, ...]
    body: Body
    offsets: Leaf | None = None
    weights: Leaf | None = None
    mode: int = 0
    padding: int = -1
    last: bool = False


class EmbeddingCpp:
    """`embedding`, and `_embedding_bag` in sum and mean, with what is done to their rows."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        found = _find(task) if device.type == "cpu" else None
        return None if found is None else _space(task, found, lanes_of(device))


def _find(task: KernelTask) -> Lookup | None:
    graph = task.graph
    places = [i for i, op in enumerate(graph.ops) if name_of(op) in ("embedding", *BAGS)]
    if len(places) != 1:
        return None
    op = graph.ops[places[0]]
    out = op.outs[0].shape
    table, indices = _leaf(task, op, 0), _leaf(task, op, 1)
    if table is None or indices is None or not out or 0 in (*out, *table.shape):
        return None
    rows, columns = simplify(numel(out[:-1])), out[-1]
    body = after(graph, {(len(graph.inputs) + places[0], 0): "acc"}, out, "cpp")
    if body is None or table.dtype not in HELD_FLOATS or indices.dtype not in ("int64", "int32"):
        return None
    if name_of(op) == "embedding":
        flat = spread((*indices.shape, 1), (*indices.strides, 0), (rows, 1))
        return None if flat is None else Lookup(table, indices, flat[0], rows, columns, out, body)
    return _bag(
        task, op, Lookup(table, indices, indices.strides[0] if indices.strides else 0, rows, columns, out, body)
    )


def _bag(task: KernelTask, op: Op, found: Lookup) -> Lookup | None:
    mode, padding = _arg(op, 4, "mode", 0), _arg(op, 8, "padding_idx", -1)
    offsets, weights = _leaf(task, op, 2), _leaf(task, op, 6)
    weighted = _arg(op, 6, "per_sample_weights", None) is not None
    if mode not in (0, 1) or not isinstance(padding, int) or len(found.indices.shape) != 1 or offsets is None:
        return None
    if offsets.dtype not in ("int64", "int32") or weighted != (weights is not None):
        return None
    if weights is not None and weights.dtype not in HELD_FLOATS:
        return None
    last = bool(_arg(op, 7, "include_last_offset", False))
    return Lookup(found.table, found.indices, found.flat, found.rows, found.columns, found.domain, found.body,
                  offsets, weights, int(mode), padding, last)  # fmt: skip


def _arg(op: Op, place: int, name: str, default: Arg) -> Arg:
    return op.args[place] if len(op.args) > place else dict(op.kwargs).get(name, default)


def _leaf(task: KernelTask, op: Op, place: int) -> Leaf | None:
    ref = op.args[place] if len(op.args) > place else None
    return leaf(task.graph, ref) if isinstance(ref, Ref) else None


def _space(task: KernelTask, found: Lookup, lanes: int) -> Space | None:
    stream = aligned(found.body, len(found.domain) - 1, lanes) and any(
        store.dtype == "float32" for store in found.body.stores
    )
    axes: dict[str, tuple[Choice, ...]] = {
        "U": (1, 2, 4, 8, 16),
        "AHEAD": (0, 4, 8, 16, 32),
        "LINES": ("all", "first"),
        "NT": (0, 1) if stream else (0,),
        "DEGREE": (7, 6),
    }
    columns = found.columns

    def valid(point: Point) -> bool:
        if point["LINES"] == "first" and not point["AHEAD"]:
            return False
        return point["U"] == 1 or not isinstance(columns, int) or int(point["U"]) * lanes <= columns

    far = axes["NT"][-1]
    good = [
        (16, 16, "first", far, 7),
        (16, 16, "all", far, 7),
        (8, 8, "all", 0, 7),
        (8, 8, "all", far, 7),
        (16, 8, "all", 0, 7),
        (4, 16, "all", 0, 7),
        (4, 0, "all", 0, 7),
        (2, 8, "all", 0, 7),
        (1, 8, "all", 0, 7),
    ]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in dict.fromkeys(good)]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        outs = [builder.empty_output(place) for place in range(len(found.body.stores))]
        return _Writer(found, args, outs, point, lanes).text(), outs

    def moves(point: Point) -> tuple[str, ...]:
        return (*(["prefetch-rows"] if point["AHEAD"] else []), *(["stream-stores"] if point["NT"] else []))

    return cpp_space(NAME, task, lanes, axes, start, make, valid, moves)


class _Writer:
    def __init__(self, found: Lookup, args: Args, outs: list[Tensor], point: Point, lanes: int) -> None:
        self.found, self.args, self.outs, self.lanes = found, args, outs, lanes
        self.unroll, self.ahead, self.stream = int(point["U"]), int(point["AHEAD"]), bool(point["NT"])
        self.first_line = point["LINES"] == "first"
        self.table = args.input(found.table.index)
        self.rows, self.columns = args.size(found.rows), args.size(found.columns)
        ranks = len(found.domain)
        self.names = [*(["i0"] if ranks == 2 else [f"r{d}" for d in range(ranks - 1)]), "i1"]
        self.row_step, self.column_step = found.table.strides[0], found.table.strides[1]

    def text(self) -> str:
        found, args = self.found, self.args
        wide = self.unroll * self.lanes
        work = args.size(simplify(found.rows * found.columns))
        count = args.size(found.table.shape[0])
        indices = f"{args.input(found.indices.index)}[(k) * {args.size(found.flat)}]"
        return "\n".join([
            f"const auto place = [&](int64_t k) __attribute__((always_inline)) {{ const int64_t i = {indices};",
            f"return i < 0 ? (int64_t)0 : i < {count} ? i : (int64_t){count} - 1; }}; (void)place;",
            *([f"const int64_t total = {args.size(found.indices.shape[0])};"] if found.offsets else []),
            *([f"const int64_t total = {self.rows};"] if not found.offsets else []),
            f"#pragma omp parallel for schedule(static) if ({work} > {SMALL})",
            f"for (int64_t i0 = 0; i0 < {self.rows}; i0++) {{",
            *(index_of(args, found.domain[:-1], self.names[:-1], "i0") if len(self.names) > 2 else []),
            *self.bounds(),
            "int64_t from = 0;",
            f"for (; from + {wide} <= {self.columns}; from += {wide}) {{",
            *self.strip(self.unroll, ""),
            "}",
            *([f"for (; from + {self.lanes} <= {self.columns}; from += {self.lanes}) {{", *self.strip(1, ""), "}"]
              if self.unroll > 1 else []),
            f"if (from < {self.columns}) {{ const int n = (int)({self.columns} - from);",
            *self.strip(1, "n"),
            "}",
            *(["kv::fence();"] if self.stream else []),
            "}",
        ])  # fmt: skip

    def bounds(self) -> list[str]:
        """First and last index of a bag; both inside the indices whatever the offsets say."""
        found = self.found
        if found.offsets is None:
            return ["const int64_t first = i0, last = i0 + 1;"]
        offsets = self.args.input(found.offsets.index)
        step = self.args.size(found.offsets.strides[0])
        end = f"(int64_t){offsets}[(i0 + 1) * {step}]"
        if not found.last:
            end = f"i0 + 1 < {self.rows} ? {end} : total"
        return [
            f"int64_t first = {offsets}[i0 * {step}], last = {end};",
            "first = first < 0 ? 0 : first; last = last > total ? total : last;",
        ]

    def strip(self, u: int, tail: str) -> list[str]:
        """U vectors of columns of one row or bag."""
        loop = f"for (int u = 0; u < {u}; u++)"
        unroll = f"#pragma GCC unroll {u}"
        lines = [f"kv::vf a[{u}];", f"{loop} a[u] = kv::vf(0.0f);", *self.walk(u, tail)]
        if self.found.mode == 1:
            lines.append(f"{{ const kv::vf by((float)(many ? many : 1)); {loop} a[u] = a[u] / by; }}")
        lane = len(self.names) - 1
        return [
            *lines,
            unroll,
            f"{loop} {{ const int64_t i1 = from + u * {self.lanes}; (void)i1; const kv::vf acc = a[u];",
            *statements(self.args, self.found.body, self.names, lane, tail),
            *stores(self.args, self.found.body, self.names, lane, self.outs, tail, self.stream),
            "}",
        ]

    def walk(self, u: int, tail: str) -> list[str]:
        found, args = self.found, self.args
        row = (
            f"{self.table} + i * {args.size(self.row_step)} + (from + u * {self.lanes}) * {args.size(self.column_step)}"
        )
        value = load_text(args, row, self.column_step, tail)
        if found.offsets is None:
            early = self.early("i0", "total", u)
            return [
                f"{{ const int64_t i = place(i0); {early}",
                f"#pragma GCC unroll {u}",
                f"for (int u = 0; u < {u}; u++) a[u] = {value}; }}",
            ]
        lines = [
            "int64_t many = 0; (void)many;",
            "for (int64_t k = first; k < last; k++) {",
            "const int64_t i = place(k);",
        ]
        # Past the end of the bag too: what follows is the next bag's, whose first rows would else be waited for
        # (bags of 32 rows, 16 ahead: 3.15 ms beside eager's 3.3).
        lines.append(self.early("k", "total", u))
        if found.padding >= 0:
            lines.append(f"if (i == {found.padding}) continue;")
        if found.weights is not None:
            step = args.size(found.weights.strides[0])
            lines.append(f"const auto scale = kv::load_one({args.input(found.weights.index)} + k * {step});")
            value = f"{value} * scale"
        return [
            *lines,
            "many++;",
            f"#pragma GCC unroll {u}",
            f"for (int u = 0; u < {u}; u++) a[u] = a[u] + {value};",
            "}",
        ]

    def early(self, at: str, end: str, u: int) -> str:
        """Ask for the cache lines of a later row.

        For the first one only, if the processor's own prefetcher fetches the rest: its requests are the second-level
        cache's, of which there are more at a time than a core's own (bags of 32 rows of 512 bytes on Zen 3: 2.69 ms;
        2.91 with all lines asked for, eager 3.01).
        """
        if not self.ahead:
            return ""
        step = u if self.first_line else max(1, 16 // self.lanes)
        row_step, column_step = self.args.size(self.row_step), self.args.size(self.column_step)
        row = f"{self.table} + place({at} + {self.ahead}) * {row_step} + from * {column_step}"
        loop = f"for (int u = 0; u < {u}; u += {step}) __builtin_prefetch({row} + u * {self.lanes});"
        return f"if ({at} + {self.ahead} < {end}) {loop}"
