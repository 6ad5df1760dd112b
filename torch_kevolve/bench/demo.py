"""Demo: one network, all arms, then each of its regions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_kevolve.bench.children import run_child
from torch_kevolve.bench.row import Row
from torch_kevolve.bench.side_by_side import blank

MODULE = "torch_kevolve.bench.demo_child"


@dataclass(frozen=True)
class DemoPlan:
    """`budget_s`: seconds of search for the model. `total_s`: after it no further region is measured."""

    device: str
    effort: str = "quick"
    budget_s: float = 180.0
    total_s: float = 330.0
    seconds: float = 4.0
    malloc: str = "arena"


@dataclass(frozen=True)
class DemoResult:
    """`share`: each region's measured share of the model's time under Inductor, by case name."""

    device: str
    elapsed_s: float
    row: Row
    regions: tuple[Row, ...]
    share: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """What `kevolve demo --json` prints."""
        return {
            "device": self.device,
            "elapsed_s": self.elapsed_s,
            "model": {"name": "image_decoder", "row": self.row.to_json()},
            "regions": [region.to_json() for region in self.regions],
        }


def run_demo(plan: DemoPlan, told: Callable[[str], None]) -> DemoResult:
    """Search and measure the whole model in one process, then each replaced region in one of its own."""
    started = time.monotonic()
    told(f"compiling, searching (up to {plan.budget_s:.0f} s) and timing the model on {plan.device}")
    base = {"device": plan.device, "effort": plan.effort, "budget_s": plan.budget_s, "seconds": plan.seconds}
    answer = run_child(MODULE, {**base, "task": None}, plan.total_s, plan.malloc)
    if isinstance(answer, str):
        row = blank("demo", "image_decoder", False, plan.device)
        row.status, row.notes = "failed", answer
        return DemoResult(plan.device, time.monotonic() - started, row, (), {})
    row = Row.from_json(answer["row"])
    regions: list[Row] = []
    share: dict[str, float] = {}
    for found in answer["regions"]:
        left = plan.total_s - (time.monotonic() - started)
        name = f"{found['anchor']} {found['task'][:12]}"
        if left < 20:
            skipped = blank("demo", name, False, plan.device)
            skipped.status, skipped.notes = "notrun", "the time of the demo was spent"
            regions.append(skipped)
            continue
        told(f"timing region {name}")
        part = run_child(MODULE, {**base, "task": found["task"], "name": name, "seconds": 1.5}, left, plan.malloc)
        if isinstance(part, str):
            broken = blank("demo", name, False, plan.device)
            broken.status, broken.notes = "failed", part
            regions.append(broken)
            continue
        regions.append(Row.from_json(part["row"]))
        share[name] = found["count"] * _plain(regions[-1]) / _plain(row)
    return DemoResult(plan.device, time.monotonic() - started, row, tuple(regions), share)


def _plain(row: Row) -> float:
    times = [row.ms[name] for name in ("inductor", "eager") if row.ms[name] is not None]
    return float(times[0]) if times else float("inf")
