"""Evidence: how far a candidate got, and what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch_kevolve.sizes import Json


class Stage(IntEnum):
    """The stages in order. A refused candidate's evidence names the stage that refused it."""

    POLICY = 0
    COMPILE = 1
    LAUNCH = 2
    VERIFY = 3
    PROBE = 4
    MEASURE = 5
    DONE = 6


@dataclass(frozen=True)
class Errors:
    """Distance of one output to the fp64 reference, pooled over all draws, relative to rms(reference)."""

    rms: float
    worst: float


@dataclass(frozen=True)
class Timing:
    """One arm's samples, summarised: median and quartiles in milliseconds, number of samples."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int


@dataclass(frozen=True)
class Evidence:
    """What the judge saw of one candidate on one device at one set of sizes.

    `ratio`: best baseline's time over the candidate's (above 1: faster), with the 95 % bootstrap interval
    `ratio_lo`, `ratio_hi`. `arms`: every baseline's timing and the candidate's own, `candidate`. `note` is what the
    next proposer reads; `signature` is the note with names and numbers taken out, for recall.
    `flags`: what the figure depends on (malloc, frozen, tf32, deterministic). `device`: hard and soft fingerprint.
    """

    reached: Stage
    ok: bool
    note: str = ""
    signature: str = ""
    errors: tuple[Errors, ...] = ()
    errors_twin: tuple[Errors, ...] = ()
    arms: Mapping[str, Timing] = field(default_factory=dict)
    ratio: float | None = None
    ratio_lo: float | None = None
    ratio_hi: float | None = None
    roofline: float | None = None
    energy_j: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    compile_s: float | None = None
    profile: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    inherited: bool = False

    @property
    def median_ms(self) -> float | None:
        timing = self.arms.get("candidate")
        return None if timing is None else timing.median_ms

    def to_json(self) -> Json:
        return {
            "reached": self.reached.name,
            "ok": self.ok,
            "note": self.note,
            "signature": self.signature,
            "errors": [[e.rms, e.worst] for e in self.errors],
            "errors_twin": [[e.rms, e.worst] for e in self.errors_twin],
            "arms": {name: [t.median_ms, t.low_ms, t.high_ms, t.samples] for name, t in self.arms.items()},
            "ratio": self.ratio,
            "ratio_lo": self.ratio_lo,
            "ratio_hi": self.ratio_hi,
            "roofline": self.roofline,
            "energy_j": self.energy_j,
            "sizes": dict(self.sizes),
            "compile_s": self.compile_s,
            "profile": dict(self.profile),
            "flags": dict(self.flags),
            "device": dict(self.device),
            "inherited": self.inherited,
        }

    @classmethod
    def from_json(cls, data: Json) -> Evidence:
        """Raises ValueError, KeyError or TypeError for data that is no evidence."""
        return cls(
            reached=Stage[data["reached"]],
            ok=bool(data["ok"]),
            note=str(data["note"]),
            signature=str(data["signature"]),
            errors=tuple(Errors(float(r), float(w)) for r, w in data["errors"]),
            errors_twin=tuple(Errors(float(r), float(w)) for r, w in data["errors_twin"]),
            arms={str(k): Timing(float(a), float(b), float(c), int(n)) for k, (a, b, c, n) in data["arms"].items()},
            ratio=data["ratio"],
            ratio_lo=data["ratio_lo"],
            ratio_hi=data["ratio_hi"],
            roofline=data["roofline"],
            energy_j=data["energy_j"],
            sizes={str(k): int(v) for k, v in data["sizes"].items()},
            compile_s=data["compile_s"],
            profile=dict(data["profile"]),
            flags=dict(data["flags"]),
            device=dict(data["device"]),
            inherited=bool(data["inherited"]),
        )
