"""Row: one case measured, in the form that every result file has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

BASELINES = ("eager", "inductor", "max_autotune_no_cudagraphs", "max_autotune", "reduce_overhead")


@dataclass
class Row:
    """`ms`: the five baselines (null where not run, the reason in `notes`) and `kevolve`, a dict by mode.

    `ratio`: best baseline over best kevolve mode, medians, above 1 is faster; `ratio_lo`, `ratio_hi`: 95 % interval.
    `err_*`: relative rms error against fp64. `status`: ok, failed (wrong or crashed), refused or notrun.
    """

    suite: str
    case: str
    mode: str
    device: str
    fingerprint: str
    torch: str
    triton: str | None
    kevolve: str
    date: str
    flags: dict[str, Any] = field(default_factory=dict)
    ms: dict[str, Any] = field(default_factory=lambda: {**dict.fromkeys(BASELINES), "kevolve": {}})
    ratio: float | None = None
    ratio_lo: float | None = None
    ratio_hi: float | None = None
    err_eager: float | None = None
    err_kevolve: float | None = None
    agree: bool | None = None
    regions: int = 0
    replaced: int = 0
    kernels: list[str] = field(default_factory=list)
    roofline: float | None = None
    compile_s: dict[str, float] = field(default_factory=dict)
    search_s: float | None = None
    peak_mb: dict[str, float] = field(default_factory=dict)
    energy_j: dict[str, float | None] = field(default_factory=dict)
    status: str = "notrun"
    notes: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(**data)


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Fixed denominators: refused and notrun rows count as 1.0 and as not won; a failed row fails the suite."""
    listed = list(rows)
    ratios = [row.ratio if row.status == "ok" and row.ratio is not None else 1.0 for row in listed]
    return {
        "rows": len(listed),
        "ok": sum(row.status == "ok" for row in listed),
        "failed": [row.case for row in listed if row.status == "failed"],
        "replaced": sum(row.replaced > 0 for row in listed),
        "geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "median": median(ratios) if ratios else None,
        "share_1_05": sum(ratio >= 1.05 for ratio in ratios) / len(ratios) if ratios else None,
        "losses": [row.case for row, ratio in zip(listed, ratios, strict=True) if ratio < 0.97],
    }
