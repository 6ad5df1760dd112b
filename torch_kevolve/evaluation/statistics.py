"""Statistics: from samples to the figures of the evidence, recomputed by the judge."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch_kevolve.devices.base import Device
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.measure import ratio_interval, timing
from torch_kevolve.evidence import Timing
from torch_kevolve.task import KernelTask, Ref

MATMULS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Matrix products and which argument is the left factor."""
Samples = Mapping[str, Sequence[float]]


def checked(samples: Any, arms: Sequence[str]) -> dict[str, list[float]]:
    """A worker's samples with every field checked. Raises EvaluationError for anything but positive finite numbers."""
    if not isinstance(samples, dict) or set(samples) != set(arms):
        raise EvaluationError(detail="samples do not name the arms that were asked for")
    out: dict[str, list[float]] = {}
    for name, values in samples.items():
        if not isinstance(values, list) or not 3 <= len(values) <= 10_000:
            raise EvaluationError(detail=f"samples of {name} are no list")
        numbers = [v for v in values if isinstance(v, float) and math.isfinite(v) and v > 0]
        if len(numbers) != len(values):
            raise EvaluationError(detail=f"a sample of {name} is no positive number")
        out[name] = numbers
    return out


def summary(samples: Samples, library: bool = False) -> tuple[dict[str, Timing], float, float, float]:
    """Timings per arm, and the best baseline over the candidate with its interval.

    `library`: the candidate is eager's own library calls, so eager is no rival of it: it stands in for Inductor's code.
    """
    timings = {name: timing(values) for name, values in samples.items()}
    others = [name for name in samples if name != "candidate"]
    rivals = [name for name in others if name != "eager"] if library else others
    base = min(rivals or others, key=lambda name: timings[name].median_ms)
    low, high = ratio_interval(samples[base], samples["candidate"])
    return timings, timings[base].median_ms / timings["candidate"].median_ms, low, high


def floor_ms(bytes_moved: int, work: int, device: Device) -> float:
    """No kernel can be faster than this: its bytes at the bandwidth of the level that holds them, or its floating-point
    operations at the highest peak that was measured (fp32 may be carried by bf16 units), minus 10 %.

    On a CPU every sample finds its inputs where the last one left them, so a working set within the last-level cache
    counts at that cache's speed; one within the cores' own caches, four times that (no ceiling is measured there).
    """
    ceilings, facts = device.ceilings(), device.facts()
    speed = ceilings.cache_bytes_s if bytes_moved <= ceilings.cache_bytes else ceilings.copy_bytes_s
    # Part of a larger working set still hits the cache: 130 % of the copy bandwidth was seen at twice its size.
    if ceilings.cache_bytes < bytes_moved < 8 * ceilings.cache_bytes:
        speed = max(speed, ceilings.cache_bytes_s)
    # Timed runs alternate between two sets of inputs.
    if facts.type == "cpu" and 2 * bytes_moved <= facts.l2_bytes * facts.units:
        speed = 4 * ceilings.cache_bytes_s
    return 0.9e3 * max(bytes_moved / speed, work / max(ceilings.fp32_flops, ceilings.bf16_flops))


def flops(task: KernelTask, binding: Mapping[str, int]) -> int:
    """Multiplications and additions of the task's matrix products; other work is not counted."""
    graph = task.at(binding).graph
    total = 0
    for op in graph.ops:
        place = MATMULS.get(op.target)
        left = None if place is None else op.args[place]
        if isinstance(left, Ref):
            total += 2 * int(op.outs[0].numel) * int(graph.spec(left).shape[-1])
    return total


def signature(note: str) -> str:
    """The note with numbers, addresses and names taken out: equal faults of unlike kernels look alike."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "#", note)[:160]
