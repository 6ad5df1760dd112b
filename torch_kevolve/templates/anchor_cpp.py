"""Anchor C++: what the C++ families with one anchor operator share.

Arguments in one order for the signature and the plan, the pointwise work around the anchor as vector statements, and
the space that renders them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.errors import KevolveError
from torch_kevolve.plan import PlanArg, PlanBuilder, Tensor
from torch_kevolve.sizes import Size, free_symbols, simplify, symbol
from torch_kevolve.task import KernelTask, Ref, TaskGraph
from torch_kevolve.templates.around import Body, after
from torch_kevolve.templates.base import Choice, Point, Space
from torch_kevolve.templates.cpp_text import size_text
from torch_kevolve.templates.prelude import TYPES, text

SMALL = 16384
"""Elements below which a second thread costs more than it brings (OpenMP's fork and join is about 5 us)."""


class Args:
    """Arguments of one kernel: pointers in the order of first use, then the symbols as int64_t."""

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder = builder
        self._tensors: dict[str, tuple[str, Tensor]] = {}
        self._symbols: set[str] = set()

    def input(self, index: int) -> str:
        """The name of the pointer to an input."""
        tensor = self.builder.inputs[index]
        self._tensors.setdefault(tensor.name, (f"const {TYPES[tensor.dtype]}* __restrict__ x{index}", tensor))
        return f"x{index}"

    def tensor(self, tensor: Tensor) -> str:
        """The name of the pointer to a result or to scratch."""
        self._tensors.setdefault(tensor.name, (f"{TYPES[tensor.dtype]}* __restrict__ {tensor.name}", tensor))
        return tensor.name

    def size(self, size: Size) -> str:
        """A size as an atom of text; its symbols become arguments."""
        self._symbols |= free_symbols([size])
        made = size_text(size)
        return made if made.isidentifier() or made.isdigit() else f"({made})"

    def address(self, strides: Sequence[Size], names: Sequence[str]) -> str:
        """`i0 * 4096 + c`, or `0`."""
        parts = [
            name if stride == 1 else f"{name} * {self.size(stride)}"
            for stride, name in zip(strides, names, strict=True)
            if stride != 0
        ]
        return " + ".join(parts) or "0"

    def signature(self, name: str) -> str:
        words = [word for word, _ in self._tensors.values()] + [f"int64_t {each}" for each in sorted(self._symbols)]
        return f'extern "C" void {name}({", ".join(words)})'

    @property
    def values(self) -> list[PlanArg]:
        return [tensor for _, tensor in self._tensors.values()] + [symbol(each) for each in sorted(self._symbols)]


def before(graph: TaskGraph, ref: Ref, domain: Sequence[Size]) -> Body | None:
    """The pointwise work on inputs that makes the anchor's operand, over a domain that has its size. Its one store's
    text is the operand's."""
    return after(replace(graph, outputs=(ref,)), {}, domain, "cpp")


def statements(args: Args, body: Body, names: Sequence[str], lane: int, tail: str = "") -> list[str]:
    """Loads and statements of a body for one vector along domain axis `lane`, whose coordinate is `names[lane]`.

    `tail`: name of an int variable with the number of lanes in use; empty when all are.
    Two bodies share names, so each needs a scope of its own.
    """
    lines = []
    for load in body.loads:
        where = f"{args.input(load.leaf.index)} + {args.address(load.strides, names)}"
        lines.append(f"const auto {load.name} = {load_text(args, where, load.strides[lane], tail)};")
    return lines + [f"const auto {line};" for line in body.statements]


def load_text(args: Args, where: str, step: Size, tail: str) -> str:
    """One vector from memory at `step` elements per lane."""
    if step == 0:
        return f"kv::load_one({where})"
    if step != 1:
        return f"kv::load_step({where}, {args.size(step)}, {tail or 'kv::L'})"
    return f"kv::load_n({where}, {tail})" if tail else f"kv::load({where})"


def stores(
    args: Args,
    body: Body,
    names: Sequence[str],
    lane: int,
    outs: Sequence[Tensor],
    tail: str = "",
    stream: bool = False,
) -> list[str]:
    """The stores of a body. `stream`: past the caches, where the address is known to be aligned (`aligned`)."""
    lines = []
    for store in body.stores:
        where = f"{args.tensor(outs[store.place])} + {args.address(store.strides, names)}"
        step = store.strides[lane]
        if step != 1:
            lines.append(f"kv::store_step({where}, {args.size(step)}, {store.text}, {tail or 'kv::L'});")
        elif tail:
            lines.append(f"kv::store_n({where}, {store.text}, {tail});")
        else:
            call = "stream" if stream and store.dtype == "float32" else "store"
            lines.append(f"kv::{call}({where}, {store.text});")
    return lines


def aligned(body: Body, lane: int, lanes: int) -> bool:
    """Whether every vector that starts at a multiple of the lanes is aligned in every output."""
    return all(
        isinstance(step, int) and (step == 1 if axis == lane else step % lanes == 0)
        for store in body.stores
        for axis, step in enumerate(store.strides)
    )


def index_of(args: Args, domain: Sequence[Size], names: Sequence[str], number: str) -> list[str]:
    """Statements that take the flat number of a row apart into the coordinates `names` over `domain`."""
    rest = f"rest_{number}"
    lines = [f"int64_t {rest} = {number}; (void){rest};"]
    for place in reversed(range(len(domain))):
        size = args.size(domain[place])
        value = f"{rest} % {size}; {rest} /= {size}" if place else rest
        lines.append(f"const int64_t {names[place]} = {value}; (void){names[place]};")
    return lines


def lanes_of(device: DeviceFacts) -> int:
    """Floats per vector: 16 with 64-byte registers, else 8."""
    return 16 if device.vector_bytes >= 64 else 8


def total(sizes: Sequence[Size]) -> Size:
    out: Size = 1
    for size in sizes:
        out = simplify(out * size)
    return out


Make = Callable[[PlanBuilder, Args, Point], "tuple[str, Sequence[Tensor]]"]


def cpp_space(
    family: str,
    task: KernelTask,
    lanes: int,
    axes: Mapping[str, tuple[Choice, ...]],
    start: Sequence[Point],
    make: Make,
    valid: Callable[[Point], bool] = lambda point: True,
    moves: Callable[[Point], tuple[str, ...]] = lambda point: (),
    helpers: Callable[[Point], str] = lambda point: "",
) -> Space | None:
    """A space whose points are rendered by `make(builder, args, point) -> (body, results)`.

    The body becomes the function named after the family; an axis called DEGREE sets the prelude's exp; `helpers(point)`
    stands in front of it. None where no starting point is valid or the first one cannot be rendered.
    """

    def render(point: Point) -> Candidate:
        builder = PlanBuilder(task)
        args = Args(builder)
        body, outs = make(builder, args, point)
        head = args.signature(family)
        source = text(lanes, int(point.get("DEGREE", 7))) + f"{helpers(point)}\n{head} {{\n{body}\n}}\n"
        builder.run(family, args=args.values)
        provenance = Provenance("template", family, tuple(sorted(point.items())), strategies=moves(point))
        return Candidate("cpp", source, builder.finish(list(outs)), provenance)

    good = tuple(point for point in start if valid(point))
    if not good:
        return None
    try:
        render(good[0])
    except (KevolveError, ValueError):
        return None
    return Space(family, "cpp", axes, render, good, valid, moves)
