"""Promotion: the one rule by which a candidate earns its place."""

from __future__ import annotations

from torch_kevolve.agent.search import Attempt
from torch_kevolve.evidence import Evidence, Stage


def refusal(evidence: Evidence) -> str:
    """Empty if the evidence earns a place, else why not: a short slug.

    Right (judged to the end), timed against at least one baseline, and faster than the best of them with a 95 %
    interval that excludes 1.0. What was measured on another machine's terms (`inherited`) earns nothing.
    """
    if not evidence.ok or evidence.reached is not Stage.DONE:
        return "not-right"
    if evidence.inherited:
        return "inherited"
    if evidence.ratio is None or evidence.ratio_lo is None:
        return "not-timed"
    return "" if evidence.ratio > 1.0 and evidence.ratio_lo > 1.0 else "not-faster"


def hopeful(attempt: Attempt) -> bool:
    """Whether a cold confirmation could still find it faster: the upper end of what was seen is above 1.0.

    A confirmation costs as much as five candidates, so what was 5 % slower gets none, however wide its interval.
    """
    seen = attempt.evidence
    best = max(attempt.speed, seen.ratio or 0.0)
    return attempt.right and best > 0.95 and max(best, seen.ratio_hi or 0.0) > 1.0
