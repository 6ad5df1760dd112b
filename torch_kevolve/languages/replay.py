"""Replay: a launch plan carried out on real tensors, or shown as Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from torch_kevolve.errors import PlanError
from torch_kevolve.languages.base import Launcher
from torch_kevolve.plan import Aten, Buffer, LaunchPlan, Prepare, Run, Step, Tensor
from torch_kevolve.sizes import bind, evaluate
from torch_kevolve.task import DType, KernelTask


Allocate = Callable[..., torch.Tensor]
"""allocate(shape, strides, dtype=, device=) -> tensor"""


class Replay:
    """A plan bound to a loaded kernel. Call it with the task's inputs; it returns the task's outputs.

    `prepare` steps run once per version of the weights (address and version counter). Not safe for many threads.
    """

    def __init__(
        self, plan: LaunchPlan, task: KernelTask, launcher: Launcher | None, allocate: Allocate = torch.empty_strided
    ) -> None:
        self.plan, self.task, self.launcher, self.allocate = plan, task, launcher, allocate
        self._prepared: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}
        self.launches = 0

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.task.graph
        shapes = zip(graph.inputs, inputs, strict=True)
        binding = bind((spec.shape, tuple(tensor.shape)) for spec, tensor in shapes)
        device = inputs[0].device if inputs else torch.device("cpu")
        world: dict[str, torch.Tensor] = dict(zip(self.plan.inputs, inputs, strict=True))
        for place, step in enumerate(self.plan.steps):
            if isinstance(step, Prepare):
                world.update(self._prepare(place, step, world, binding, device))
            else:
                self._step(step, world, binding, device)
        return tuple(world[name] for name in self.plan.outputs)

    def _prepare(
        self, place: int, step: Prepare, world: dict[str, torch.Tensor], binding: Mapping[str, int], device: torch.device
    ) -> dict[str, torch.Tensor]:
        frozen = [world[f"x{i}"] for i, spec in enumerate(self.task.graph.inputs) if spec.frozen]
        version = tuple((t.data_ptr(), t._version) for t in frozen)
        known = self._prepared.get(place)
        if known is None or known[0] != version:
            inner = dict(world)
            for each in step.steps:
                self._step(each, inner, binding, device)
            known = (version, {name: inner[name] for name in step.outs})
            self._prepared[place] = known
        return known[1]

    def _step(
        self, step: Step, world: dict[str, torch.Tensor], binding: Mapping[str, int], device: torch.device
    ) -> None:
        if isinstance(step, Buffer):
            shape = [evaluate(s, binding) for s in step.shape]
            strides = [evaluate(s, binding) for s in step.strides]
            made = self.allocate(shape, strides, dtype=getattr(torch, step.dtype), device=device)
            world[step.name] = made if step.fill is None else made.fill_(step.fill)
        elif isinstance(step, Aten):
            args = [_real(arg, world, binding) for arg in step.args]
            kwargs = {name: _real(value, world, binding) for name, value in step.kwargs}
            result = operator(step.target)(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else (result,)
            for out, value in zip(step.outs, results, strict=False):
                world[out.name] = value
        elif isinstance(step, Run):
            if self.launcher is None:
                raise PlanError(detail=f"{step.kernel} cannot be launched: this candidate has library calls only")
            grid = tuple(evaluate(s, binding) for s in step.grid)
            if any(size == 0 for size in grid):
                return
            args = [_real(arg, world, binding) for arg in step.args]
            meta = {name: _real(value, world, binding) for name, value in step.meta}
            self.launches += 1
            self.launcher(step.kernel, grid, args, meta, dict(step.options))


def replay(
    plan: LaunchPlan, task: KernelTask, inputs: Sequence[torch.Tensor], launcher: Launcher | None
) -> tuple[torch.Tensor, ...]:
    """Carry out a plan once."""
    return Replay(plan, task, launcher)(*inputs)


def operator(target: str) -> Any:
    """The torch operator that a target such as `aten.mul.Tensor` names. Raises PlanError where there is none."""
    space, name, overload = target.split(".")
    if space not in ("aten", "prims"):
        raise PlanError(detail=f"{target!r} is no library operator")
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload)
    except AttributeError:
        raise PlanError(detail=f"this torch ({torch.__version__}) has no {target}") from None


def _real(value: Any, world: Mapping[str, torch.Tensor], binding: Mapping[str, int]) -> Any:
    if isinstance(value, Tensor):
        return world[value.name]
    if isinstance(value, DType):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_real(each, world, binding) for each in value]
    return evaluate(value, binding) if isinstance(value, sympy.Expr) else value


def show(plan: LaunchPlan) -> str:
    """The plan as a Python function that a person can read."""
    lines = [f"def launch(p, {', '.join(plan.inputs)}):"]
    for step in plan.steps:
        if isinstance(step, Prepare):
            lines.append("    with prepared_once():")
            lines.extend(f"        {_line(each)}" for each in step.steps)
        else:
            lines.append(f"    {_line(step)}")
    lines.append(f"    return {', '.join(plan.outputs)}")
    return "\n".join(lines) + "\n"


def _line(step: Step) -> str:
    if isinstance(step, Buffer):
        kind = "empty" if step.fill is None else "zeros"
        return f"{step.name} = p.{kind}({_text(step.shape)}, {step.dtype!r}, strides={_text(step.strides)})"
    if isinstance(step, Aten):
        words = [_text(arg) for arg in step.args] + [f"{name}={_text(value)}" for name, value in step.kwargs]
        return f"{', '.join(t.name for t in step.outs)} = {step.target}({', '.join(words)})"
    if isinstance(step, Run):
        pairs = [f"{name}={_text(value)}" for name, value in (*step.meta, *step.options)]
        words = [f'"{step.kernel}"', f"grid={_text(step.grid)}", f"args={_text(step.args)}", *pairs]
        return f"p.run({', '.join(words)})"
    raise PlanError(detail="prepare steps do not nest")


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, DType):
        return value.name
    return str(value) if isinstance(value, sympy.Expr) else repr(value)
