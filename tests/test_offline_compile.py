"""Every Triton template compiles for an H100/H200 and for an MI300 without either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton_cases import CASES, H200, family, trace

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.languages.triton import Triton

MI300 = DeviceFacts("cuda", "hip:gfx942", 304, 0, 4 << 20, 256 << 20, shared_bytes=64 << 10, registers=131072, warp=64)
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
CHIPS = {"sm_90": ("cuda:90", H200), "gfx942": ("hip:gfx942", MI300)}
ONLY_NVIDIA = ("plane_matmul_triton",)
"""Planes come through TMA descriptors, which an AMD chip has not: the family claims nothing there."""


def candidates(name: str, facts: DeviceFacts, per_case: int) -> Iterator[tuple[str, Any]]:
    for case in CASES:
        if case.family == name:
            task, _ = trace(case.function, case.make("cpu"))
            space = family(name).match(task, facts)
            if space is None:
                continue
            for point in space.start[:per_case]:
                yield f"{case.name} {dict(point)}", space.render(point)


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param(name, chip, id=f"triton-{name.removesuffix('_triton')}-{chip}")
        for name in FAMILIES
        for chip in CHIPS
    ],
)
def test_compiles(name: str, chip: str, tmp_path: Path) -> None:
    arch, facts = CHIPS[chip]
    seen = 0
    failed: dict[str, str] = {}
    for label, candidate in candidates(name, facts, 1):
        built = Triton().build(candidate, {}, arch, tmp_path)
        seen += 1
        if not built.ok:
            failed[label] = built.note
        elif chip == "sm_90":
            for found in built.profile.values():
                assert found["shared"] <= 227 << 10, label
                # A starting point that spills is a wrong start. 64 bytes: `any` of a mask uses 8, without a spill.
                assert found.get("stack_bytes", 0) <= 64, label
    assert failed == {}
    assert (seen == 0) == (chip == "gfx942" and name in ONLY_NVIDIA)


def test_no_waiting_programs_where_results_shall_be_deterministic() -> None:
    case = next(case for case in CASES if case.name == "norm_long")
    task, _ = trace(case.function, case.make("cpu"))
    for flags, expected in (((), True), ((("deterministic", "1"),), False)):
        space = family(case.family).match(replace(task, flags=flags), H200)
        assert space is not None
        assert any(p["algorithm"] == "cooperative" for p in space.points()) == expected
