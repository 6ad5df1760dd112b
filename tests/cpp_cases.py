"""Cases for the C++ families: a function's task, its candidates built as the search builds them, compared with fp64."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton_cases import error, flat, trace, wide

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.languages.cpp import Cpp
from torch_kevolve.languages.replay import Replay
from torch_kevolve.task import KernelTask

WORK = Path(tempfile.mkdtemp(prefix="kevolve-cpp-cases-"))


def facts(vector: int = 0) -> DeviceFacts:
    from torch_kevolve.devices.cpu import Cpu

    own = Cpu().facts()
    return replace(own, vector_bytes=vector) if vector else own


def candidates(family: Any, task: KernelTask, count: int, vector: int = 0) -> list[tuple[str, Any]]:
    """(point, candidate): the first starting points and one other."""
    space = family.match(task, facts(vector))
    assert space is not None, f"{family.name} does not claim {task.graph.targets}"
    chosen = list(space.start[: count - 1])
    others = [p for p in space.points() if p not in space.start]
    chosen += random.Random(1).sample(others, min(len(others), 1))
    return [(str(dict(p)), space.render(p)) for p in chosen]


def run(candidate: Any, task: KernelTask, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of a candidate, compiled with the search's own command line."""
    from torch_kevolve.evaluation.policy import object_problem, problem_of

    assert not problem_of(candidate), problem_of(candidate)
    built = Cpp().build(candidate, {}, "cpu:native", WORK)
    assert built.ok and built.artifact is not None, built.note
    middle = built.artifact.with_suffix(".o")
    assert not object_problem(middle), object_problem(middle)
    return Replay(candidate.plan, task, Cpp().load(built, candidate))(*inputs)


def problems(
    family: Any,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    count: int = 4,
    loose: float = 1.0,
    vector: int = 0,
    exact: Callable[..., Any] | None = None,
) -> dict[str, str]:
    """Error text by point, of those points that are wrong; the reference is the function on fp64 inputs."""
    task, order = trace(function, inputs)
    eager = flat(function(*inputs))
    want = flat((exact or function)(*map(wide, inputs)))
    out = {}
    for label, candidate in candidates(family, task, count, vector):
        got = run(candidate, task, [inputs[i] for i in order])
        found = [error(g, w, e, loose) for g, w, e in zip(got, want, eager, strict=True)]
        if any(found):
            out[label] = "; ".join(found)
    return out


def special(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values with NaN, infinities, -0.0 and denormals in places, and a row of -inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    for offset, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-41)):
        flat[offset * 3 :: max(17, flat.numel() // 7) + offset] = value
    if x.dim() > 1 and x.shape[0] > 2:
        x[1] = float("-inf")
    return x.to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
