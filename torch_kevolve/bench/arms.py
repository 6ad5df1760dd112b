"""Arms: one model compiled every way, run side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Result = tuple[Tensor, ...]
MODES = {
    "inductor": None,
    "max_autotune_no_cudagraphs": "max-autotune-no-cudagraphs",
    "max_autotune": "max-autotune",
    "reduce_overhead": "reduce-overhead",
}
NO_CUDA_GRAPHS = "no CUDA graphs on a CPU: the mode equals the one without them"


@dataclass
class Arm:
    """One way to run the model: `call()` gives the outputs, in training the outputs and all gradients."""

    name: str
    call: Callable[[], Result]
    compile_s: float = 0.0
    peak_mb: float | None = None


@dataclass
class Workload:
    """A module and its inputs, in inference or training; weights and inputs are shared by all arms."""

    module: nn.Module
    inputs: tuple[Any, ...]
    training: bool
    device: str
    upstream: list[Tensor] = field(default_factory=list)

    def step(self, forward: Callable[..., Any]) -> Result:
        """One call; in training with the backward pass, gradients made anew."""
        if not self.training:
            with torch.no_grad():
                return flatten(forward(*self.inputs))
        leaves = self.leaves()
        for leaf in leaves:
            leaf.grad = None
        outs = flatten(forward(*self.inputs))
        wanting = [out for out in outs if out.requires_grad]
        if not self.upstream:
            dice = torch.Generator().manual_seed(7)
            self.upstream = [
                torch.ones_like(out) if out.numel() == 1 else torch.randn(out.shape, generator=dice).to(out)
                for out in wanting
            ]
        torch.autograd.backward(wanting, self.upstream)
        grads = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
        return (*(out.detach() for out in outs), *grads)

    def leaves(self) -> list[Tensor]:
        tensors = [*self.module.parameters(), *(x for x in self.inputs if isinstance(x, Tensor))]
        return [t for t in tensors if t.requires_grad]

    def exact(self) -> Result:
        """The outputs in fp64, from the same weights and inputs."""
        module = copy.deepcopy(self.module).double()
        inputs = tuple(_double(x) for x in self.inputs)
        return tuple(
            t.detach() for t in Workload(module, inputs, self.training, self.device, self._up64()).step(module)
        )

    def _up64(self) -> list[Tensor]:
        return [t.double() for t in self.upstream]


def eager_arm(work: Workload) -> Arm:
    return Arm("eager", lambda: work.step(work.module))


def compiled_arm(work: Workload, name: str, **how: Any) -> Arm:
    """Compile anew and call twice (the second call settles CUDA graphs); `compile_s` covers the first call."""
    torch._dynamo.reset()
    started = time.perf_counter()
    compiled = torch.compile(work.module, **how)
    call = _cloned(lambda: work.step(compiled), name)
    call()
    seconds = time.perf_counter() - started
    call()
    return Arm(name, call, seconds, _peak(call, work.device))


def flatten(value: Any) -> Result:
    """The tensors of nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return tuple(t for each in value for t in flatten(each))
    return ()


def _cloned(call: Callable[[], Result], name: str) -> Callable[[], Result]:
    if name not in ("max_autotune", "reduce_overhead"):
        return call

    def marked() -> Result:
        # CUDA graphs reuse their output memory: tell them that the last step's outputs are done with.
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return marked


def _peak(call: Callable[[], Result], device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def _double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x
