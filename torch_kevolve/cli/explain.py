"""Explain: what became of each region of a model, and why."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from torch_kevolve.backend import explain as explain_model
from torch_kevolve.cli.say import JSON, document, show
from torch_kevolve.factory import load


@click.command()
@click.argument("factory")
@JSON
def explain(factory: str, as_json: bool) -> None:
    """Compile the model that FACTORY (FILE:make) makes and say for each region: replaced or left, and why.

    A module in training mode is run forward and backward, one in eval mode forward only. KEVOLVE_EFFORT=none: searches
    nothing, and says what the store has.
    """
    rows: list[dict[str, Any]] = []
    for case in load(factory):
        rows += explain_model(case.model, *case.args, **case.kwargs)["regions"]
    if as_json:
        document({"regions": rows})
        return
    table = Table(title=f"{len(rows)} regions")
    for name in ("anchor", "phase", "task", "share", "status", "reason", "ratio", "detail"):
        table.add_column(name)
    for row in rows:
        table.add_row(*_cells(row))
    show(table)


def _cells(row: dict[str, Any]) -> list[str]:
    task = "-" if row["task"] is None else row["task"][:12]
    share = "-" if row["share"] is None else f"{100 * row['share']:.0f} %"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    return [row["anchor"], row["phase"], task, share, row["status"], row["reason"], ratio, row["detail"][:60]]
