"""Every Triton family against fp64 in Triton's interpreter, at ragged sizes.

Not interpreted, and why: `plane_matmul_triton` on finite values (the interpreter cannot multiply bf16 tiles; its exact
path is), the `bf16x6` precision of `small_matmul_triton`, `libdevice` functions (fmod, pow, and exp, which joins the
pieces of a softmax). The interpreter runs one program after the other, so of the algorithm `cooperative` all but the
last piece of a row take the way of those that waited in vain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import CASES, LONG

FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
NOT_INTERPRETED = {("plane_matmul_triton", name) for name in ("mm", "linear_gelu", "linear_logsumexp", "cross_entropy")}
NOT_INTERPRETED |= {("rowwise_triton", name) for name in LONG}
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """Error text by family, case and point. Programs of their own: triton reads TRITON_INTERPRET when it is
    imported."""
    folder = tmp_path_factory.mktemp("interpreted")
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "triton_cases.py"), name, "2", str(folder / name)], env=env
        )
        for name in FAMILIES
    ]
    for name, process in zip(FAMILIES, running, strict=True):
        assert process.wait(timeout=900) == 0, name
    return {name: json.loads((folder / name).read_text()) for name in FAMILIES}


@pytest.mark.parametrize(
    ("family", "case"), [(c.family, c.name) for c in CASES if (c.family, c.name) not in NOT_INTERPRETED]
)
def test_agrees_with_fp64(results: dict[str, dict[str, dict[str, str]]], family: str, case: str) -> None:
    points = results[family][case]
    assert len(points) >= 1
    assert {label: error for label, error in points.items() if error} == {}
