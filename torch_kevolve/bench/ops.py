"""Ops: the operator benchmark, case by case."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_kevolve.bench.cases import CASES, Case
from torch_kevolve.bench.children import run_child
from torch_kevolve.bench.row import Row, summary
from torch_kevolve.bench.side_by_side import blank


@dataclass(frozen=True)
class OpsPlan:
    """What `bench ops` was asked for. `budget_s`: seconds for everything, after which cases are `notrun`.

    `search_s`: seconds of search per case. `case_s`: seconds after which a case's process is killed.
    """

    device: str
    only: tuple[str, ...] = ()
    effort: str = "quick"
    search_s: float = 60.0
    seconds: float = 4.0
    case_s: float = 600.0
    budget_s: float = float("inf")
    scale: float = 1.0
    malloc: str = "arena"
    out: Path | None = None
    resume: bool = False


def run_ops(plan: OpsPlan, told: Callable[[Row], None]) -> list[Row]:
    """One row per case, each told when it is there and appended to `out` at once, so that a cut loses one row."""
    kind = "cuda" if plan.device.startswith("cuda") else "cpu"
    started = time.monotonic()
    known = _known(plan.out) if plan.resume else {}
    rows = []
    for case in CASES[kind]:
        if plan.only and not any(word in case.name for word in plan.only):
            continue
        key = (case.name, case.mode)
        if key in known:
            rows.append(known[key])
            continue
        left = plan.budget_s - (time.monotonic() - started)
        row = _one(plan, kind, case, left)
        rows.append(row)
        told(row)
        if plan.out is not None:
            with plan.out.open("a") as file:
                file.write(json.dumps(row.to_json()) + "\n")
    return rows


def _one(plan: OpsPlan, kind: str, case: Case, left: float) -> Row:
    if left < 20:
        return _without(plan, case, "notrun", "the budget was spent before this case")
    job: dict[str, Any] = {
        "kind": kind,
        "case": case.name,
        "device": plan.device,
        "effort": plan.effort,
        "budget_s": min(plan.search_s, left / 2) if plan.effort != "none" else 0.0,
        "seconds": plan.seconds,
        "scale": plan.scale,
    }
    answer = run_child("torch_kevolve.bench.ops_child", job, min(plan.case_s, left), plan.malloc)
    if isinstance(answer, str):
        return _without(plan, case, "failed", answer)
    return Row.from_json(answer)


def _without(plan: OpsPlan, case: Case, status: str, why: str) -> Row:
    row = blank("ops", case.name, case.mode == "training", plan.device)
    row.status, row.notes = status, why
    row.flags["malloc"] = plan.malloc if plan.device.startswith("cpu") else None
    return row


def _known(out: Path | None) -> dict[tuple[str, str], Row]:
    if out is None or not out.exists():
        return {}
    rows = [Row.from_json(json.loads(line)) for line in out.read_text().splitlines() if line.strip()]
    return {(row.case, row.mode): row for row in rows if row.status != "notrun"}


def document(rows: list[Row]) -> dict[str, Any]:
    """What `bench ops --json` prints."""
    return {"summary": summary(rows), "rows": [row.to_json() for row in rows]}
