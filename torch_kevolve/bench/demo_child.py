"""Demo child: the model, or one of its regions, in its own process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.backend import report_regions
from torch_kevolve.bench.models import image_decoder
from torch_kevolve.bench.side_by_side import measure
from torch_kevolve.devices import current
from torch_kevolve.evaluation.inputs import sample
from torch_kevolve.evaluation.reference import to_module
from torch_kevolve.settings import Settings
from torch_kevolve.store import open_store


def model_row(job: dict[str, Any]) -> dict[str, Any]:
    """The model's row and the regions that were replaced, each once, with how often it occurs."""
    module, inputs = image_decoder(job["device"])
    options = {"kevolve.effort": job["effort"], "kevolve.budget_s": job["budget_s"]}
    row = measure("demo", "image_decoder", module, inputs, False, job["device"], options, job["seconds"])
    replaced = [region for region in report_regions() if region.status == "replaced" and region.task is not None]
    count = Counter(region.task for region in replaced)
    first = {region.task: region for region in reversed(replaced)}
    ordered = sorted(first.values(), key=lambda region: -(region.share or 0.0))
    regions = [{"task": r.task, "anchor": r.anchor, "count": count[r.task]} for r in ordered]
    return {"row": row.to_json(), "regions": regions}


def region_row(job: dict[str, Any]) -> dict[str, Any]:
    """The row of one region: its eager twin against Inductor's modes and the kernel in the store."""
    kernel = open_store(Settings.make()).get(job["task"], current(job["device"]).fingerprint())
    if kernel is None:
        raise SystemExit(f"no kernel for task {job['task'][:12]} in the store")
    task = kernel.task.at(kernel.evidence.sizes)
    module = to_module(task)
    inputs = sample(task, job["device"], seed=0)
    options = {"kevolve.effort": "none"}
    row = measure("demo", job["name"], module, inputs, False, job["device"], options, job["seconds"])
    return {"row": row.to_json()}


def main(ask: Path, answer: Path) -> None:
    job = json.loads(ask.read_text())
    torch.manual_seed(0)
    answer.write_text(json.dumps(model_row(job) if job["task"] is None else region_row(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
