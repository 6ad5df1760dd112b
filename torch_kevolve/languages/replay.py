"""Replay: a launch plan carried out on real tensors, or shown as Python."""

from __future__ import annotations

import importlib
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
World = dict[str, torch.Tensor]
Act = Callable[[World, torch.device], None]
"""One step at known sizes."""
PROGRAMS = 64


class Replay:
    """A plan bound to a loaded kernel. Call it with the task's inputs; it returns the task's outputs.

    Sizes are worked out once per set of input shapes: evaluating them takes 50 us a call, as long as a small kernel.
    `prepare` steps run once per version of the weights (address and version counter). Not safe for many threads.
    """

    def __init__(
        self, plan: LaunchPlan, task: KernelTask, launcher: Launcher | None, allocate: Allocate = torch.empty_strided
    ) -> None:
        self.plan, self.task, self.launcher, self.allocate = plan, task, launcher, allocate
        self._frozen = tuple(f"x{i}" for i, spec in enumerate(task.graph.inputs) if spec.frozen)
        self._programs: dict[tuple[tuple[int, ...], ...], list[Act]] = {}
        self.launches = 0

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        program = self._programs.get(shapes)
        if program is None:
            program = self._program(shapes)
        device = inputs[0].device if inputs else torch.device("cpu")
        world: World = dict(zip(self.plan.inputs, inputs, strict=True))
        for act in program:
            act(world, device)
        return tuple(world[name] for name in self.plan.outputs)

    def _program(self, shapes: tuple[tuple[int, ...], ...]) -> list[Act]:
        binding = bind((spec.shape, actual) for spec, actual in zip(self.task.graph.inputs, shapes, strict=True))
        if len(self._programs) >= PROGRAMS:
            self._programs.clear()
        program = [self._act(step, binding) for step in self.plan.steps]
        self._programs[shapes] = program
        return program

    def _act(self, step: Step, binding: Mapping[str, int]) -> Act:
        if isinstance(step, Prepare):
            return self._prepare(step, binding)
        if isinstance(step, Buffer):
            return self._buffer(step, binding)
        return self._aten(step, binding) if isinstance(step, Aten) else self._run(step, binding)

    def _prepare(self, step: Prepare, binding: Mapping[str, int]) -> Act:
        inner = [self._act(each, binding) for each in step.steps]
        known: list[Any] = [None, {}]

        def act(world: World, device: torch.device) -> None:
            version = tuple((world[name].data_ptr(), world[name]._version) for name in self._frozen)
            if known[0] != version:
                scratch = dict(world)
                for each in inner:
                    each(scratch, device)
                known[:] = version, {name: scratch[name] for name in step.outs}
            world.update(known[1])

        return act

    def _buffer(self, step: Buffer, binding: Mapping[str, int]) -> Act:
        shape = [evaluate(s, binding) for s in step.shape]
        strides = [evaluate(s, binding) for s in step.strides]
        dtype = getattr(torch, step.dtype)

        def act(world: World, device: torch.device) -> None:
            made = self.allocate(shape, strides, dtype=dtype, device=device)
            world[step.name] = made if step.fill is None else made.fill_(step.fill)

        return act

    def _aten(self, step: Aten, binding: Mapping[str, int]) -> Act:
        args = [_known(arg, binding) for arg in step.args]
        kwargs = {name: _known(value, binding) for name, value in step.kwargs}
        function, names = operator(step.target), [out.name for out in step.outs]

        def act(world: World, device: torch.device) -> None:
            real = {name: _real(value, world) for name, value in kwargs.items()}
            real.update(unsaid(function, kwargs, device))
            result = function(*[_real(arg, world) for arg in args], **real)
            world.update(zip(names, result if isinstance(result, tuple | list) else (result,), strict=False))

        return act

    def _run(self, step: Run, binding: Mapping[str, int]) -> Act:
        launcher = self.launcher
        if launcher is None:
            raise PlanError(detail=f"{step.kernel} cannot be launched: this candidate has library calls only")
        grid = tuple(evaluate(s, binding) for s in step.grid)
        args = [_known(arg, binding) for arg in step.args]
        meta = {name: _known(value, binding) for name, value in step.meta}
        options = dict(step.options)
        if any(size == 0 for size in grid):
            return lambda world, device: None

        def act(world: World, device: torch.device) -> None:
            self.launches += 1
            launcher(step.kernel, grid, [_real(arg, world) for arg in args], meta, options)

        return act


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
    if space == "prims":
        # Inductor registers its own prims (the low-memory max-pool) when this is imported; a worker may not have.
        importlib.import_module("torch._inductor.inductor_prims")
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload)
    except AttributeError:
        raise PlanError(detail=f"this torch ({torch.__version__}) has no {target}") from None


def unsaid(function: Any, said: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Arguments that a task leaves out because they are no part of what is computed: where, and no gradient."""
    names = {argument.name for argument in function._schema.arguments}
    out: dict[str, Any] = {"device": device} if "device" in names else {}
    if "requires_grad" in names and "requires_grad" not in said:
        out["requires_grad"] = False
    return out


def _known(value: Any, binding: Mapping[str, int]) -> Any:
    """An argument with its sizes worked out; tensors of the plan stay names."""
    if isinstance(value, DType):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_known(each, binding) for each in value]
    return evaluate(value, binding) if isinstance(value, sympy.Expr) else value


def _real(value: Any, world: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, Tensor):
        return world[value.name]
    return [_real(each, world) for each in value] if isinstance(value, list) else value


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
