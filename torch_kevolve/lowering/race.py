"""Race: which of several compilations of one graph is fastest, on made-up inputs."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_kevolve.devices import current
from torch_kevolve.devices.quiet import wait_for_quiet
from torch_kevolve.lowering.cost import hint

log = logging.getLogger(__name__)

MARGIN = 1.02
"""An arm with kernels may be this much slower than plain Inductor: two runs of one program differ by about 2 %."""
ROUNDS = 15
SECONDS = 4.0
PATIENCE_S = 6.0
"""After a search the judge starts its next worker: 3 to 4 s of both cores of a small machine."""


def race(
    arms: Mapping[str, Callable[[list[Any]], Any]], inputs: Sequence[Any], examples: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Median milliseconds of each arm, interleaved. Raises what an arm raises."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad(), _rng_kept():
        real = [_made_up(x, examples) for x in inputs]
        device = next((x.device for x in real if isinstance(x, torch.Tensor)), torch.device("cpu"))
        where = current(device)
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            arm(list(real))
        where.synchronize()
        wait_for_quiet(where, PATIENCE_S)
        deadline = time.monotonic() + SECONDS
        with where.lock():
            for number in range(ROUNDS):
                for name, arm in arms.items():
                    where.flush()
                    where.synchronize()
                    started = time.perf_counter()
                    arm(list(real))
                    where.synchronize()
                    samples[name].append((time.perf_counter() - started) * 1e3)
                if number >= 2 and time.monotonic() > deadline:
                    break
    return {name: statistics.median(times) for name, times in samples.items()}


class _rng_kept:
    """The race draws random numbers; the user's stream must not notice."""

    def __enter__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


def _made_up(value: Any, examples: Sequence[torch.Tensor]) -> Any:
    """A real input of the same kind. Integers are the call's own where one fits, else zeros: the only index that is
    always in range."""
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if value.is_floating_point():
        return made.normal_(0.0, 0.5).abs_().add_(0.01) if 0 in strides and 0 not in shape else made.normal_(0.0, 0.5)
    for example in examples:
        if list(example.shape) == shape and example.dtype == value.dtype and example.device == value.device:
            return made.copy_(example)
    return made.zero_()
