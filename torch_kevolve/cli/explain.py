"""Explain: what became of each region of a model, and why."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from torch_kevolve.backend import explain as explain_model
from torch_kevolve.cli.say import JSON, MISUSE, document, show, tell
from torch_kevolve.errors import FactoryError
from torch_kevolve.factory import load


@click.command()
@click.argument("factory")
@JSON
@click.pass_context
def explain(context: click.Context, factory: str, as_json: bool) -> None:
    """Compile the model that FACTORY (FILE:make) makes and say for each region: replaced or left, and why."""
    try:
        cases = load(factory)
    except FactoryError as error:
        tell(str(error))
        context.exit(MISUSE)
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows += explain_model(case.model, *case.args, **case.kwargs)["regions"]
    if as_json:
        document({"regions": rows})
        return
    table = Table(title=f"{len(rows)} regions")
    for name in ("anchor", "phase", "task", "share", "status", "reason", "ratio", "detail"):
        table.add_column(name)
    for row in rows:
        share = "-" if row["share"] is None else f"{100 * row['share']:.0f} %"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        table.add_row(row["anchor"], row["phase"], str(row["task"])[:12], share, row["status"], row["reason"], ratio, row["detail"][:60])
    show(table)
