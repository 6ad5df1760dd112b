"""Kernel text: parameters, addresses and epilogues of a Triton kernel.

Numbers stand in the source as literals; sizes that are symbols become runtime arguments. `Params` collects the
arguments of one kernel in order, so that the signature and the plan's `run` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.errors import KevolveError
from torch_kevolve.plan import PlanArg, PlanBuilder, Tensor
from torch_kevolve.sizes import Size, numel, simplify, upper_bound
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.around import Body
from torch_kevolve.templates.base import Choice, Point, Space
from torch_kevolve.templates.dialects import module

_INT32 = 2**31 - 1


class Params:
    """Arguments of one kernel: names in the signature, values in the plan."""

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder = builder
        self._items: list[tuple[str, PlanArg]] = []

    def tensor(self, tensor: Tensor) -> str:
        """The pointer's name. A tensor given twice is one argument."""
        name = f"{tensor.name}_ptr"
        if all(have != name for have, _ in self._items):
            self._items.append((name, tensor))
        return name

    def input(self, index: int) -> str:
        return self.tensor(self.builder.inputs[index])

    def size(self, size: Size) -> str:
        """A size as text: a literal, or the name of a runtime argument."""
        if isinstance(size, int):
            return str(size)
        for name, value in self._items:
            if not isinstance(value, Tensor) and value == size:
                return name
        name = f"n{len(self._items)}"
        self._items.append((name, size))
        return name

    @property
    def names(self) -> str:
        return ", ".join(name for name, _ in self._items)

    @property
    def args(self) -> list[PlanArg]:
        return [value for _, value in self._items]


def is_wide(task: KernelTask) -> bool:
    """Whether some tensor may have 2^31 elements or more, or reach as far over its strides, so that offsets need int64.

    100 of a million columns are few elements, and 4096 such rows 2^32 apart.
    """
    for spec in (*task.graph.inputs, *task.graph.output_specs):
        extent = simplify(1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)))
        bounds = [upper_bound(size, task.symbols) for size in (numel(spec.shape), extent)]
        if any(bound is None or bound > _INT32 for bound in bounds):
            return True
    return False


def address(params: Params, strides: Sequence[Size], names: Sequence[str]) -> str:
    """`i0 * 4096 + i1`, or `0`."""
    parts = []
    for stride, name in zip(strides, names, strict=True):
        if stride == 0:
            continue
        parts.append(name if stride == 1 else f"{name} * {params.size(stride)}")
    return " + ".join(parts) or "0"


HELD = {"bfloat16": ".to(tl.float32)", "float16": ".to(tl.float32)", "bool": " != 0"}
"""What follows a load so that the value is as `expr` holds it."""


def epilogue(params: Params, body: Body, names: Sequence[str], mask: str, outs: Sequence[Tensor]) -> list[str]:
    """The statements from the anchor's variables to the stores. `names`: index tensors of the domain, already
    broadcast against each other; `mask`: text of the mask, or empty."""
    tail = f", mask={mask}" if mask else ""
    other = f"{tail}, other=0" if mask else ""
    lines = []
    for load in body.loads:
        where = address(params, load.strides, names)
        if where == "0":
            value = f"tl.load({params.input(load.leaf.index)})"
        else:
            value = f"tl.load({params.input(load.leaf.index)} + {where}{other})"
        lines.append(f"{load.name} = {value}{HELD.get(load.leaf.dtype, '')}")
    lines += body.statements
    for store in body.stores:
        out = params.tensor(outs[store.place])
        value = f"({store.text}).to({out}.dtype.element_ty)"
        lines.append(f"tl.store({out} + {address(params, store.strides, names)}, {value}{tail})")
    return lines


def indent(lines: Sequence[str], depth: int = 1) -> str:
    """Lines as a block, each `depth` steps in; a line may hold its own further steps."""
    return "\n".join(f"{'    ' * depth}{line}" for line in lines)


def kernel(name: str, params: Params, meta: Sequence[str], lines: Sequence[str]) -> str:
    """A `@triton.jit` function."""
    constants = "".join(f", {each}: tl.constexpr" for each in meta)
    return f"@triton.jit\ndef {name}({params.names}{constants}):\n{indent(lines)}\n"


Make = Callable[[PlanBuilder, Point], "tuple[str, Sequence[Tensor]]"]


def triton_space(
    family: str,
    task: KernelTask,
    axes: Mapping[str, tuple[Choice, ...]],
    start: Sequence[Point],
    make: Make,
    valid: Callable[[Point], bool] = lambda point: True,
    moves: Callable[[Point], tuple[str, ...]] = lambda point: (),
) -> Space | None:
    """A space whose points are rendered by `make(builder, point) -> (kernels, results)`. None where no starting
    point is valid or the first one cannot be rendered (a plan that does not fit the task)."""

    def render(point: Point) -> Candidate:
        builder = PlanBuilder(task)
        text, outs = make(builder, point)
        provenance = Provenance("template", family, tuple(sorted(point.items())), strategies=moves(point))
        return Candidate("triton", module(text), builder.finish(list(outs)), provenance)

    good = tuple(point for point in start if valid(point))
    if not good:
        return None
    try:
        render(good[0])
    except KevolveError:
        return None
    return Space(family, "triton", axes, render, good, valid, moves)
