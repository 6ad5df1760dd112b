"""Bench: measurements with one row per case."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from torch_kevolve.bench.ops import OpsPlan, document, run_ops
from torch_kevolve.bench.row import Row, summary
from torch_kevolve.bench.table import table
from torch_kevolve.cli.say import JSON, NO, show, tell
from torch_kevolve.cli.say import document as print_document


@click.group()
def bench() -> None:
    """Time kevolve against eager and every Inductor mode."""


@bench.command()
@click.option("--device", default=None, help="cpu or cuda; the GPU if there is one.")
@click.option("--only", default="", help="Comma-separated words; cases whose name holds one of them.")
@click.option("--effort", default="quick", show_default=True, type=click.Choice(["none", "quick", "full"]))
@click.option("--search-s", default=60.0, show_default=True, help="Seconds of search per case.")
@click.option("--seconds", default=4.0, show_default=True, help="Seconds of interleaved samples per case.")
@click.option("--case-s", default=600.0, show_default=True, help="Seconds after which a case is killed.")
@click.option("--budget-s", default=0.0, help="Seconds for everything; later cases are marked notrun. 0: no limit.")
@click.option("--scale", default=1.0, show_default=True, help="Cut the first axis of every case to this share.")
@click.option("--malloc", default="arena", show_default=True, type=click.Choice(["arena", "default"]))
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Append rows to this JSONL file.")
@click.option("--resume", is_flag=True, help="Keep the rows that --out already has.")
@JSON
@click.pass_context
def ops(
    context: click.Context, /, device: str | None, only: str, budget_s: float, as_json: bool, **how: object
) -> None:
    """Single operators and small chains."""
    plan = OpsPlan(
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        only=tuple(word.strip() for word in only.split(",") if word.strip()),
        budget_s=budget_s or float("inf"),
        **how,  # type: ignore[arg-type]
    )
    rows = run_ops(plan, lambda row: tell(line(row)))
    totals = summary(rows)
    if as_json:
        print_document(document(rows))
    else:
        show(table(f"bench ops on {plan.device} (malloc: {plan.malloc if plan.device == 'cpu' else '-'}), ms", rows))
        held = f"{totals['replaced']} of {totals['rows']} replaced"
        click.echo(f"geomean {totals['geomean'] or 0:.3f}x, {held}, losses: {totals['losses'] or 'none'}")
    if totals["failed"] or not rows:
        context.exit(NO)


def line(row: Row) -> str:
    """A row while the others still run."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}x"
    return f"{row.case}: {row.status} {ratio} replaced {row.replaced}/{row.regions} {row.notes[:200]}"
