"""Demo: a small network, faster."""

from __future__ import annotations

import click
import torch

from torch_kevolve.bench.demo import DemoPlan, run_demo
from torch_kevolve.bench.table import table
from torch_kevolve.cli.say import JSON, NO, document, show, tell


@click.command()
@click.option("--device", default=None, help="cpu or cuda; the GPU if there is one.")
@click.option("--budget-s", default=180.0, show_default=True, help="Seconds of search for the model.")
@click.option("--total-s", default=330.0, show_default=True, help="Seconds for everything.")
@click.option("--effort", default="quick", show_default=True, type=click.Choice(["none", "quick", "full"]))
@JSON
@click.pass_context
def demo(
    context: click.Context, device: str | None, budget_s: float, total_s: float, effort: str, as_json: bool
) -> None:
    """Compile an image decoder with kevolve and time it against eager and Inductor, whole and by region."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    result = run_demo(DemoPlan(device, effort, budget_s, total_s), tell)
    if as_json:
        document(result.to_json())
    else:
        row = result.row
        show(
            table(
                f"kevolve demo on {row.device} (malloc: {row.flags.get('malloc')}), ms",
                [row, *result.regions],
                result.share,
            )
        )
        click.echo(f"{result.elapsed_s:.0f} s in all; {row.replaced} of {row.regions} regions replaced. {row.notes}")
    if result.row.status != "ok":
        context.exit(NO)
