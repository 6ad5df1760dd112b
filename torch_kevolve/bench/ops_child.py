"""Ops child: measure one case of `bench ops`. Run as a module by ops.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from torch_kevolve.bench.cases import CASES, scaled
from torch_kevolve.bench.side_by_side import measure


def main(ask: Path, answer: Path) -> None:
    job = json.loads(ask.read_text())
    case = next(c for c in CASES[job["kind"]] if c.name == job["case"])
    case = scaled(case, job["scale"])
    torch.manual_seed(0)
    module, inputs = case.make(job["device"])
    training = case.mode == "training"
    module.requires_grad_(training)
    options = {"kevolve.effort": job["effort"], "kevolve.budget_s": job["budget_s"]}
    row = measure("ops", case.name, module, inputs, training, job["device"], options, job["seconds"])
    answer.write_text(json.dumps(row.to_json()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
