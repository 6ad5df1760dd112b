"""Say: one document on stdout, words on stderr."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
NO, MISUSE = 1, 2


def document(data: Any) -> None:
    """Print a JSON document."""
    click.echo(json.dumps(data, indent=1, sort_keys=True))


def show(table: Table) -> None:
    """Print a table, as wide as the terminal, or 200 columns into a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def tell(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)
