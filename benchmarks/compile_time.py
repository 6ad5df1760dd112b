"""Compile time of kevolve beside plain Inductor, in fresh processes that take turns.

    python benchmarks/compile_time.py [--model decoder,mlp] [--phase third,second] [--rounds 7] [--json FILE]

`second`: kevolve knows the graph, Inductor's caches are cold on both sides. `third`: they are warm on both sides.
The kernels are forced in: every region takes the first kernel that a family writes, and the gate keeps them, so the
figures hold the cost of many replaced regions and nothing of a search. Goals: second 1.5, third 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("inductor", "kevolve")
GOALS = {"second": 1.5, "third": 1.10}


def decoder() -> tuple[Any, tuple[Any, ...]]:
    """The network of `kevolve demo`."""
    from torch_kevolve.bench.models import image_decoder

    return image_decoder("cpu")


def mlp() -> tuple[Any, tuple[Any, ...]]:
    """Two linear layers between a LayerNorm and a softmax."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128), nn.Softmax(-1))
    return layers.eval().requires_grad_(False), (torch.randn(64, 256),)


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {"decoder": decoder, "mlp": mlp}


def child(side: str, model: str, how: str) -> None:
    """One compilation and its first call, timed, in this process. `how`: prepare, timed or checked."""
    import torch

    made, args = MODELS[model]()
    if how == "prepare":
        return _prepare(made, args)
    passes = _counted_passes() if how == "checked" else []
    used, started = _cpu_seconds(), time.perf_counter()
    compiled = torch.compile(made, backend=side)
    with torch.no_grad():
        compiled(*args)
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {"compile_s": seconds, "cpu_s": _cpu_seconds() - used}
    if side == "kevolve":
        from torch_kevolve import metrics

        row.update(metrics())
    if how == "checked":
        row["passes"] = len(passes)
    print(json.dumps(row))


def _cpu_seconds() -> float:
    """Seconds of processor time of this process and of the children that it waited for, as compilers are."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _counted_passes() -> list[None]:
    """One element for every run of the pass. Loads modules, so such a process is not timed."""
    from torch_kevolve.lowering import graph_pass

    ran: list[None] = []
    inner = graph_pass.RegionPass.__call__

    def counted(self: Any, graph: Any) -> None:
        ran.append(None)
        inner(self, graph)

    graph_pass.RegionPass.__call__ = counted  # type: ignore[method-assign]
    return ran


def _prepare(made: Any, args: tuple[Any, ...]) -> None:
    """Put a kernel for every region that a family claims into the store, and a gate that keeps them on record."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    from forced import forced
    from torch_kevolve.lowering import inductor, race

    def kernels_win(arms: dict[str, Any], *_: Any) -> dict[str, float]:
        return {name: 1.0 if name == inductor.KERNELS else 2.0 for name in arms}

    with forced(), mock.patch.object(race, "race", kernels_win), torch.no_grad():
        torch.compile(made, backend="kevolve")(*args)
    from torch_kevolve import metrics

    print(json.dumps(metrics()))


class Bench:
    """The folders of one model's runs: a home of kevolve's, and Inductor's caches, one per side."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.made = self.run("kevolve", "prepare", folder / "prepare")

    def run(self, side: str, how: str, caches: Path) -> dict[str, Any]:
        """One fresh process. Raises RuntimeError with its stderr where it fails."""
        env = {
            **os.environ,
            "KEVOLVE_HOME": str(self.folder / "home"),
            "KEVOLVE_EFFORT": "quick",
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, __file__, "--child", side, "--model", self.model, "--how", how]
        started = time.perf_counter()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return {**json.loads(done.stdout.splitlines()[-1]), "process_s": time.perf_counter() - started}

    def phase(self, phase: str, rounds: int) -> dict[str, Any]:
        """Rows and medians of one phase; the sides take turns in going first."""
        caches = {side: self.folder / f"{phase}-{side}" for side in SIDES}
        # Whoever comes first pays for byte code and the disk's cache: one run of each side before those that count.
        checked = {side: self.run(side, "checked", caches[side]) for side in SIDES}
        if phase == "third":
            checked = {side: self.run(side, "checked", caches[side]) for side in SIDES}
        rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                if phase == "second":
                    shutil.rmtree(caches[side])
                rows[side].append(self.run(side, "timed", caches[side]))
        return self._summary(phase, checked["kevolve"], rows)

    def _summary(self, phase: str, checked: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        out: dict[str, Any] = {"model": self.model, "phase": phase, "rounds": len(rows["kevolve"])}
        for what in ("compile_s", "cpu_s", "process_s"):
            medians = {side: statistics.median(row[what] for row in rows[side]) for side in SIDES}
            out[what] = {side: round(value, 4) for side, value in medians.items()}
            out[what]["ratio"] = round(medians["kevolve"] / medians["inductor"], 4)
            # Neighbours in time share the machine's mood: the median of their ratios is steadier than that of medians.
            pairs = [k[what] / i[what] for k, i in zip(rows["kevolve"], rows["inductor"], strict=True)]
            out[what]["ratio_of_pairs"] = round(statistics.median(pairs), 4)
            out[what]["all"] = {side: [round(row[what], 4) for row in rows[side]] for side in SIDES}
        out.update(passes=checked["passes"], searches=max(row["searches"] for row in rows["kevolve"]))
        out.update(regions=checked["regions"], replaced=checked["replaced"], goal=GOALS[phase])
        return out


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    times = row["compile_s"]
    return (
        f"{row['model']:<8} {row['phase']:<7} {times['inductor']:>9.3f} {times['kevolve']:>9.3f} "
        f"{times['ratio']:>6.3f} {times['ratio_of_pairs']:>6.3f} {row['cpu_s']['ratio']:>6.3f} {row['goal']:>5.2f} "
        f"{row['passes']:>6} {row['searches']:>8} "
        f"{row['replaced']:>4}/{row['regions']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="decoder,mlp")
    parser.add_argument("--phase", default="third,second")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    parser.add_argument("--child", choices=SIDES, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--how", default="timed", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.model, given.how)
        return
    rows = []
    print("model    phase    inductor   kevolve  ratio  pairs    cpu  goal passes searches replaced", flush=True)
    for model in given.model.split(","):
        with tempfile.TemporaryDirectory(prefix="kevolve-compile-") as folder:
            bench = Bench(model, Path(folder))
            for phase in given.phase.split(","):
                rows.append(bench.phase(phase, given.rounds))
                print(show(rows[-1]), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
