"""Config: every setting, its variable and its value here."""

from __future__ import annotations

from dataclasses import fields

import click
from rich.table import Table

from torch_kevolve.cli.say import JSON, document, show
from torch_kevolve.settings import Settings


@click.command()
@JSON
def config(as_json: bool) -> None:
    """Print all settings as they stand here."""
    settings = Settings.make()
    rows = [
        {
            "name": f"kevolve.{f.name}",
            "value": getattr(settings, f.name),
            "default": f.default,
            "env": f.metadata["env"],
            "help": f.metadata["help"],
        }
        for f in fields(settings)
    ]
    if as_json:
        document({"settings": rows})
        return
    table = Table(title="settings")
    for name in ("name", "value", "env", "help"):
        table.add_column(name)
    for row in rows:
        table.add_row(str(row["name"]), str(row["value"]), str(row["env"]), str(row["help"]))
    show(table)
