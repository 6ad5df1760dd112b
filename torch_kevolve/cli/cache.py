"""Cache: look at the stored kernels."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.table import Table

from torch_kevolve.cli.say import JSON, NO, document, show
from torch_kevolve.settings import Settings
from torch_kevolve.store import open_store


@click.group()
def cache() -> None:
    """The kernels that are kept, and where."""


@cache.command("ls")
@JSON
def ls(as_json: bool) -> None:
    """List the kernels of all tiers: the user's own and the seeds."""
    rows = [
        {
            "key": line.key,
            "task": line.task,
            "language": line.language,
            "family": line.family,
            "fingerprint": line.fingerprint_key,
            "device": line.fingerprint.get("name", ""),
            "ratio": line.ratio,
            "operators": list(dict.fromkeys(line.operators)),
            "path": line.path,
        }
        for line in open_store(Settings.make()).summaries()
    ]
    if as_json:
        document({"kernels": rows})
        return
    table = Table(title=f"{len(rows)} kernels")
    for name in ("key", "task", "family", "language", "device", "ratio"):
        table.add_column(name)
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        keys = (str(row["key"])[:12], str(row["task"])[:12])
        table.add_row(*keys, str(row["family"]), str(row["language"]), str(row["device"]), ratio)
    show(table)


@cache.command()
@JSON
def path(as_json: bool) -> None:
    """Print the folder of all state."""
    home = str(Settings.make().home_path)
    document({"path": home}) if as_json else click.echo(home)


@cache.command()
@JSON
@click.pass_context
def verify(context: click.Context, as_json: bool) -> None:
    """Read every entry and check its hashes. Exit status 1 if any is bad."""
    good, bad = open_store(Settings.make()).verify()
    if as_json:
        document({"ok": good, "bad": [asdict(each) for each in bad]})
    else:
        click.echo(f"{good} whole, {len(bad)} bad")
        for each in bad:
            click.echo(f"  {each.path}: {each.why}")
    if bad:
        context.exit(NO)
