"""Doctor: what works here, and what to do about the rest."""

from __future__ import annotations

import click
from rich.table import Table

from torch_kevolve.checkup import checkup
from torch_kevolve.cli.say import JSON, NO, document, show


@click.command()
@JSON
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say which languages, devices and stores work here, and test the private hooks of the installed torch."""
    found = checkup()
    if as_json:
        document(found)
    else:
        table = Table(title="kevolve doctor")
        for name in ("what", "state", "hint"):
            table.add_column(name)
        for row in (*found["languages"], *found["checks"]):
            table.add_row(row["name"], row["status"], row["hint"])
        show(table)
    if any(row["status"] == "broken" for row in found["checks"]):
        context.exit(NO)
