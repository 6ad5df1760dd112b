"""Plan: the host side of a candidate, as data.

A `LaunchPlan` is a list of steps over the task's inputs, with sizes as expressions of the task's symbols. Nobody's
host code runs in the user's process: a plan is replayed by ours, or printed into Inductor's output.
Authors build one with `PlanBuilder`, most readably as a function that is traced once:

    def launch(p, x, w):
        M, N = x.shape
        y = p.empty((M, N), x.dtype)
        p.run("rmsnorm", grid=(M,), args=(x, w, y, N), BLOCK=p.next_power_of_2(N), num_warps=8)
        return y
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from torch_kevolve.errors import PlanError
from torch_kevolve.sizes import Json, NextPow2, Size, contiguous_strides, decode, encode, simplify, upper_bound
from torch_kevolve.task import DTYPE_BYTES, DType, KernelTask, TensorSpec

PlanArg: TypeAlias = "Tensor | DType | Size | float | bool | str | tuple[PlanArg, ...] | None"
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "shared")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the plan, by name, as the author sees it: symbolic shape, dtype name, strides in elements."""

    name: str
    shape: tuple[Any, ...]
    dtype: str
    strides: tuple[Any, ...]

    def __bool__(self) -> bool:
        raise PlanError(detail=f"the plan cannot branch on tensor {self.name}: it has no data while it is traced")


@dataclass(frozen=True)
class Buffer:
    """A new tensor, `fill` None: uninitialised, 0: zeros."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    fill: int | None = None

    def to_json(self) -> Json:
        return {"step": "buffer", "name": self.name, "dtype": self.dtype, "shape": [encode(s) for s in self.shape],
                "strides": [encode(s) for s in self.strides], "fill": self.fill}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One launch. `args` in the kernel's order; `meta` are compile-time numbers (constexpr); `options` as triton's."""

    kernel: str
    grid: tuple[Size, ...]
    args: tuple[PlanArg, ...]
    meta: tuple[tuple[str, Size | float | bool | str], ...] = ()
    options: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> Json:
        return {"step": "run", "kernel": self.kernel, "grid": [encode(s) for s in self.grid],
                "args": [_encode(a) for a in self.args], "meta": {k: _encode(v) for k, v in self.meta},
                "options": dict(self.options)}  # fmt: skip


@dataclass(frozen=True)
class Aten:
    """A library call: `outs` are the names of its results, in order."""

    target: str
    args: tuple[PlanArg, ...]
    kwargs: tuple[tuple[str, PlanArg], ...]
    outs: tuple[Tensor, ...]

    def to_json(self) -> Json:
        return {"step": "aten", "target": self.target, "args": [_encode(a) for a in self.args],
                "kwargs": {k: _encode(v) for k, v in self.kwargs},
                "outs": [_encode_tensor(t) for t in self.outs]}  # fmt: skip


@dataclass(frozen=True)
class Prepare:
    """Steps over frozen inputs only, done once per version of the weights. `outs` are the tensors they leave."""

    steps: tuple[Step, ...]
    outs: tuple[str, ...]

    def to_json(self) -> Json:
        return {"step": "prepare", "steps": [s.to_json() for s in self.steps], "outs": list(self.outs)}


Step: TypeAlias = "Buffer | Run | Aten | Prepare"


@dataclass(frozen=True)
class LaunchPlan:
    """Steps in order, the inputs' names in the task's order, and the names of the results in the task's order."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def to_json(self) -> Json:
        return {"inputs": list(self.inputs), "steps": [s.to_json() for s in self.steps], "outputs": list(self.outputs)}

    @classmethod
    def from_json(cls, data: Json) -> LaunchPlan:
        """Raises PlanError for data that is no plan."""
        try:
            return cls(tuple(data["inputs"]), tuple(_decode_step(s) for s in data["steps"]), tuple(data["outputs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(detail=f"cannot be read: {error!r}") from None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels launched, once each, in order of first launch."""
        return tuple(dict.fromkeys(s.kernel for s in self.flat if isinstance(s, Run)))

    @property
    def flat(self) -> tuple[Step, ...]:
        """All steps with those inside `prepare` in its place."""
        out: list[Step] = []
        for step in self.steps:
            out.extend(step.steps if isinstance(step, Prepare) else (step,))
        return tuple(out)


class PlanBuilder:
    """What `launch` is handed as `p`. Checks every step as it is made; raises PlanError with the cure."""

    def __init__(self, task: KernelTask) -> None:
        self.task = task
        self._steps: list[Step] = []
        self._count = 0
        self.inputs = tuple(
            Tensor(f"x{i}", spec.shape, spec.dtype, spec.strides) for i, spec in enumerate(task.graph.inputs)
        )

    def empty(self, shape: Sequence[Size], dtype: str, strides: Sequence[Size] | None = None) -> Tensor:
        """A new uninitialised tensor: scratch, or a result when `launch` returns it."""
        return self._buffer(shape, dtype, strides, None)

    def zeros(self, shape: Sequence[Size], dtype: str, strides: Sequence[Size] | None = None) -> Tensor:
        """A new tensor of zeros."""
        return self._buffer(shape, dtype, strides, 0)

    def empty_output(self, place: int = 0) -> Tensor:
        """A new tensor with the dtype, sizes and strides of the task's output `place`."""
        spec = self.task.graph.output_specs[place]
        return self._buffer(spec.shape, spec.dtype, spec.strides, None)

    def run(self, kernel: Any, grid: Sequence[Size] = (), args: Sequence[PlanArg] = (), **meta: Any) -> None:
        """Launch `kernel` (its name, or the function that has it). num_warps and num_stages are launch options."""
        name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", "")
        if not name.isidentifier():
            raise PlanError(detail=f"{kernel!r} names no kernel")
        if len(grid) > 3:
            raise PlanError(detail=f"the grid of {name} has {len(grid)} axes; at most 3 exist")
        options = tuple((k, int(v)) for k, v in sorted(meta.items()) if k in LAUNCH_OPTIONS)
        rest = tuple((k, _value(v)) for k, v in sorted(meta.items()) if k not in LAUNCH_OPTIONS)
        self._steps.append(Run(name, tuple(map(simplify, grid)), tuple(map(_value, args)), rest, options))

    def aten(
        self,
        target: str,
        args: Sequence[PlanArg],
        outs: Sequence[TensorSpec],
        kwargs: Mapping[str, PlanArg] | None = None,
    ) -> tuple[Tensor, ...]:
        """Call a library operator; `outs` say what it returns. Always reported as a library call."""
        if not target.startswith(("aten.", "prims.")):
            raise PlanError(detail=f"{target!r} is no library operator; write it as aten.name.overload")
        made = tuple(Tensor(self._name(), o.shape, o.dtype, o.strides) for o in outs)
        pairs = tuple((k, _value(v)) for k, v in sorted((kwargs or {}).items()))
        self._steps.append(Aten(target, tuple(map(_value, args)), pairs, made))
        return made

    def prepare(self, make: Callable[[PlanBuilder], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Do `make`'s steps once per version of the weights. They may read frozen inputs and each other only."""
        outer, self._steps = self._steps, []
        made = tuple(make(self))
        steps, self._steps = tuple(self._steps), outer
        frozen = {f"x{i}" for i, spec in enumerate(self.task.graph.inputs) if spec.frozen}
        allowed = frozen | {name for s in steps for name in _made_by(s)}
        for name in (n for s in steps for n in _read_by(s)):
            if name not in allowed:
                raise PlanError(detail=f"prepare reads {name}, which is no frozen input")
        self._steps.append(Prepare(steps, tuple(t.name for t in made)))
        return made

    def next_power_of_2(self, size: Size) -> Size:
        """The smallest power of two not below `size`; of its upper bound where it is symbolic."""
        if isinstance(size, int):
            return simplify(NextPow2(sympy.Integer(size)))
        bound = upper_bound(size, self.task.symbols)
        if bound is None:
            raise PlanError(detail=f"{size} has no upper bound: loop over it instead of next_power_of_2")
        return simplify(NextPow2(sympy.Integer(bound)))

    def cdiv(self, size: Size, by: Size) -> Size:
        """size / by, rounded up."""
        if isinstance(size, int) and isinstance(by, int):
            return -(-size // by)
        from torch.utils._sympy.functions import FloorDiv

        return simplify(FloorDiv(size + by - 1, by))

    def finish(self, outputs: Tensor | Sequence[Tensor]) -> LaunchPlan:
        """The plan. Raises PlanError where results do not fit the task's outputs."""
        outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        specs = self.task.graph.output_specs
        if len(outs) != len(specs):
            raise PlanError(detail=f"{len(outs)} results returned, the task has {len(specs)} outputs")
        for place, (out, spec) in enumerate(zip(outs, specs, strict=True)):
            if out.dtype != spec.dtype or tuple(out.shape) != spec.shape:
                raise PlanError(
                    detail=f"result {place} is {out.dtype}{list(out.shape)}, "
                    f"the task wants {spec.dtype}{list(spec.shape)}"
                )
            if out.name in {t.name for t in self.inputs}:
                raise PlanError(detail=f"result {place} is an input; write it to a new tensor")
        return LaunchPlan(tuple(t.name for t in self.inputs), tuple(self._steps), tuple(o.name for o in outs))

    def _buffer(self, shape: Sequence[Size], dtype: str, strides: Sequence[Size] | None, fill: int | None) -> Tensor:
        if dtype not in DTYPE_BYTES:
            raise PlanError(detail=f"dtype {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
        sizes = tuple(map(simplify, shape))
        steps = contiguous_strides(sizes) if strides is None else tuple(map(simplify, strides))
        made = Buffer(self._name(), dtype, sizes, steps, fill)
        self._steps.append(made)
        return Tensor(made.name, sizes, dtype, steps)

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count - 1}"


def build(task: KernelTask, launch: Callable[..., Tensor | Sequence[Tensor]]) -> LaunchPlan:
    """Trace `launch(p, *inputs)` once against the task's symbolic inputs."""
    builder = PlanBuilder(task)
    return builder.finish(launch(builder, *builder.inputs))


def _made_by(step: Step) -> tuple[str, ...]:
    if isinstance(step, Buffer):
        return (step.name,)
    if isinstance(step, Aten):
        return tuple(t.name for t in step.outs)
    return step.outs if isinstance(step, Prepare) else ()


def _read_by(step: Step) -> tuple[str, ...]:
    args: tuple[PlanArg, ...] = ()
    if isinstance(step, Run | Aten):
        args = (*step.args, *(tuple(v for _, v in step.kwargs) if isinstance(step, Aten) else ()))
    return tuple(t.name for t in tensors_in(args))


def tensors_in(args: Sequence[PlanArg]) -> list[Tensor]:
    """The tensors among arguments, nested tuples included."""
    out: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            out.append(arg)
        elif isinstance(arg, tuple):
            out.extend(tensors_in(arg))
    return out


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_value(each) for each in value)
    if isinstance(value, Tensor | DType | float | bool | int | str) or value is None:
        return value
    if isinstance(value, sympy.Expr):
        return simplify(value)
    raise PlanError(detail=f"{value!r} cannot be an argument; use tensors of the plan, sizes, numbers or names")


def _encode_tensor(t: Tensor) -> Json:
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": [encode(s) for s in t.shape],
        "strides": [encode(s) for s in t.strides],
    }


def _encode(value: Any) -> Json:
    if isinstance(value, Tensor):
        return {"t": _encode_tensor(value)}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_encode(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return {"f": repr(value)}
    return {"size": encode(value)}


def _decode_tensor(data: Json) -> Tensor:
    return Tensor(
        str(data["name"]), tuple(map(decode, data["shape"])), str(data["dtype"]), tuple(map(decode, data["strides"]))
    )


def _decode(data: Json) -> Any:
    if isinstance(data, list):
        return tuple(_decode(each) for each in data)
    if isinstance(data, dict):
        if "t" in data:
            return _decode_tensor(data["t"])
        if "dtype" in data:
            return DType(str(data["dtype"]))
        return float(data["f"]) if "f" in data else decode(data["size"])
    if isinstance(data, bool | int | str) or data is None:
        return data
    raise PlanError(detail=f"{data!r} is no argument")


def _decode_step(data: Json) -> Step:
    kind = data["step"]
    if kind == "buffer":
        sizes, steps = tuple(map(decode, data["shape"])), tuple(map(decode, data["strides"]))
        return Buffer(str(data["name"]), str(data["dtype"]), sizes, steps, data["fill"])
    if kind == "run":
        meta = tuple((k, _decode(v)) for k, v in sorted(data["meta"].items()))
        options = tuple((str(k), int(v)) for k, v in sorted(data["options"].items()))
        return Run(
            str(data["kernel"]), tuple(map(decode, data["grid"])), tuple(map(_decode, data["args"])), meta, options
        )
    if kind == "aten":
        kwargs = tuple((k, _decode(v)) for k, v in sorted(data["kwargs"].items()))
        outs = tuple(map(_decode_tensor, data["outs"]))
        return Aten(str(data["target"]), tuple(map(_decode, data["args"])), kwargs, outs)
    if kind == "prepare":
        return Prepare(tuple(map(_decode_step, data["steps"])), tuple(data["outs"]))
    raise PlanError(detail=f"{kind!r} is no step")
