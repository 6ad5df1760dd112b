"""Statistics: from samples to the figures of the evidence, recomputed by the judge."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch_kevolve.devices.base import Ceilings
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.measure import ratio_interval, timing
from torch_kevolve.evidence import Timing

Samples = Mapping[str, Sequence[float]]


def checked(samples: Any, arms: Sequence[str]) -> dict[str, list[float]]:
    """A worker's samples with every field checked. Raises EvaluationError for anything but positive finite numbers."""
    if not isinstance(samples, dict) or set(samples) != set(arms):
        raise EvaluationError(detail="samples do not name the arms that were asked for")
    out: dict[str, list[float]] = {}
    for name, values in samples.items():
        if not isinstance(values, list) or not 3 <= len(values) <= 10_000:
            raise EvaluationError(detail=f"samples of {name} are no list")
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) != len(values) or not all(math.isfinite(v) and v > 0 for v in numbers):
            raise EvaluationError(detail=f"a sample of {name} is no positive number")
        out[name] = numbers
    return out


def summary(samples: Samples) -> tuple[dict[str, Timing], float, float, float]:
    """Timings per arm, and the best baseline over the candidate with its interval."""
    timings = {name: timing(values) for name, values in samples.items()}
    base = min((name for name in samples if name != "candidate"), key=lambda name: timings[name].median_ms)
    low, high = ratio_interval(samples[base], samples["candidate"])
    return timings, timings[base].median_ms / timings["candidate"].median_ms, low, high


def floor_ms(bytes_moved: int, ceilings: Ceilings) -> float:
    """No kernel can be faster than this: its bytes at the bandwidth of the level that holds them, minus 10 %.

    On a CPU every sample finds its inputs where the last one left them, so a working set within the last-level cache
    counts at that cache's speed.
    """
    speed = ceilings.cache_bytes_s if bytes_moved <= ceilings.cache_bytes else ceilings.copy_bytes_s
    # Part of a larger working set still hits the cache: 130 % of the copy bandwidth was seen at twice its size.
    if ceilings.cache_bytes < bytes_moved < 8 * ceilings.cache_bytes:
        speed = max(speed, ceilings.cache_bytes_s)
    return 0.9e3 * bytes_moved / speed


def signature(note: str) -> str:
    """The note with numbers, addresses and names taken out: equal faults of unlike kernels look alike."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "#", note)[:160]
