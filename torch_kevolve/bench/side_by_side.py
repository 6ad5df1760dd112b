"""Side by side: one workload, all arms, one process."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from torch_kevolve.backend import report_gates, report_regions, reset_metrics
from torch_kevolve.bench.arms import MODES, NO_CUDA_GRAPHS, Arm, Workload, compiled_arm, eager_arm
from torch_kevolve.bench.row import Row
from torch_kevolve.bench.version import commit
from torch_kevolve.devices import current
from torch_kevolve.devices.quiet import wait_for_quiet
from torch_kevolve.evaluation.measure import interleave, malloc_setting, ratio_interval
from torch_kevolve.evaluation.verify import agrees, relative_rms

PATIENCE_S = 10.0
GRAPH_MODES = ("max_autotune", "reduce_overhead")


def measure(
    suite: str,
    case: str,
    module: nn.Module,
    inputs: Sequence[Any],
    training: bool,
    device: str,
    options: Mapping[str, Any],
    seconds: float,
    arms: Sequence[str] | None = None,
) -> Row:
    """Compile and time every arm side by side. A crash of a baseline is noted; one of ours makes the row failed.

    `options` go to the kevolve arm; `seconds` is the time for the interleaved samples, not for compiling.
    """
    row = blank(suite, case, training, device)
    work = Workload(module, tuple(inputs), training, device)
    eager = eager_arm(work)
    expected = eager.call()
    try:
        # The search comes first: the baselines' CUDA graphs would hold the memory that its reference needs.
        searched = _search(work, row, options)
        built = {"eager": eager}
        notes = _baselines(work, built, row, arms or tuple(MODES))
        ours = _kevolve_arms(work, row, options, searched)
        actual = next(iter(ours.values())).call()
    except Exception as error:  # the row says failed, and the suite fails with it
        row.status, row.notes = "failed", f"kevolve: {type(error).__name__}: {error}"[:500]
        return row
    _accuracy(row, work, expected, actual)
    _times(row, built, ours, device, seconds)
    row.notes = "; ".join(notes + ([row.notes] if row.notes else []))
    row.status = "ok" if row.agree else "failed"
    return row


def blank(suite: str, case: str, training: bool, device: str) -> Row:
    """A row with everything that is known before anything ran."""
    here = current(device)
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    return Row(
        suite=suite,
        case=case,
        mode="training" if training else "inference",
        device=dict(here.fingerprint().hard)["name"],
        fingerprint=here.fingerprint().key,
        torch=torch.__version__,
        triton=triton_version,
        kevolve=commit(),
        date=datetime.date.today().isoformat(),
        flags={
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "malloc": malloc_setting() if device.startswith("cpu") else None,
            "frozen": False,
            "threads": torch.get_num_threads() if device.startswith("cpu") else None,
        },
    )


def _baselines(work: Workload, built: dict[str, Arm], row: Row, wanted: Sequence[str]) -> list[str]:
    notes = []
    for name, mode in MODES.items():
        if name not in wanted:
            notes.append(f"{name}: not asked for")
            continue
        if name in GRAPH_MODES and work.device.startswith("cpu"):
            notes.append(f"{name}: {NO_CUDA_GRAPHS}")
            continue
        try:
            built[name] = compiled_arm(work, name, **({} if mode is None else {"mode": mode}))
        except Exception as error:  # a baseline that breaks is no loss of ours, but it is said
            notes.append(f"{name}: {type(error).__name__}: {error}"[:200])
            continue
        row.compile_s[name] = built[name].compile_s
        peak = built[name].peak_mb
        if peak is not None:
            row.peak_mb[name] = peak
    return notes


def _search(work: Workload, row: Row, options: Mapping[str, Any]) -> str:
    """The first compilation, which may search; why it left what it left."""
    reset_metrics()
    current(work.device).give_back()
    started = time.perf_counter()
    compiled_arm(work, "kevolve", backend="kevolve", options=dict(options))
    row.search_s = time.perf_counter() - started
    left = sorted({f"{r.anchor}: {r.reason} {r.detail}"[:160] for r in report_regions() if r.status == "left"})
    return "; ".join([*left, *map(_gate_text, report_gates())])


def _gate_text(gate: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {ms:.4g}" for name, ms in gate.get("ms", {}).items())
    return f"{gate['phase']} graph: {gate['kept']} kept ({times or gate.get('why', '')})"


def _kevolve_arms(work: Workload, row: Row, options: Mapping[str, Any], searched: str) -> dict[str, Arm]:
    # Compile again with what is now in the store: this is what the next process pays.
    settled = {**options, "kevolve.effort": "none"}
    reset_metrics()
    ours = {"default": compiled_arm(work, "kevolve", backend="kevolve", options=settled)}
    row.compile_s["kevolve"] = ours["default"].compile_s
    _regions(row, searched)
    if work.device.startswith("cuda"):
        graphs = {**settled, "mode": "reduce-overhead"}
        ours["reduce-overhead"] = compiled_arm(work, "reduce_overhead", backend="kevolve", options=graphs)
        row.peak_mb["kevolve"] = ours["default"].peak_mb or 0.0
    return ours


def _accuracy(row: Row, work: Workload, expected: tuple[torch.Tensor, ...], actual: tuple[torch.Tensor, ...]) -> None:
    reference = work.exact()
    row.err_eager = max(relative_rms(e, r) for e, r in zip(expected, reference, strict=True))
    row.err_kevolve = max(relative_rms(a, r) for a, r in zip(actual, reference, strict=True))
    verdict = agrees(actual, expected, reference)
    row.agree = not verdict
    if verdict:
        row.notes = f"{verdict}; {row.notes}"


def _regions(row: Row, searched: str) -> None:
    """What stands in the graph that is timed; `searched`: why the search left what it left."""
    found = report_regions()
    row.regions = len(found)
    row.replaced = sum(region.status == "replaced" for region in found)
    row.kernels = sorted(
        {region.kernel for region in found if region.kernel is not None and region.status == "replaced"}
    )
    row.notes = searched[:600]


def _times(row: Row, built: dict[str, Arm], ours: dict[str, Arm], device: str, seconds: float) -> None:
    arms = {**{name: arm.call for name, arm in built.items()}, **{f"kevolve:{m}": arm.call for m, arm in ours.items()}}
    wait_for_quiet(current(device), PATIENCE_S)
    samples = interleave(arms, current(device), seconds)
    medians = {name: median(values) for name, values in samples.items()}
    for name in built:
        row.ms[name] = medians[name]
    row.ms["kevolve"] = {mode: medians[f"kevolve:{mode}"] for mode in ours}
    base = min(built, key=lambda name: medians[name])
    best = min(ours, key=lambda mode: medians[f"kevolve:{mode}"])
    row.ratio = medians[base] / medians[f"kevolve:{best}"]
    row.ratio_lo, row.ratio_hi = ratio_interval(samples[base], samples[f"kevolve:{best}"])
