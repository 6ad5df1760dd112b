"""Table: rows for a person to read."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from torch_kevolve.bench.row import Row


def table(title: str, rows: Iterable[Row], share: dict[str, float] | None = None) -> Table:
    """region or case, eager, Inductor default, the best max-autotune, kevolve, ratio with interval, both errors."""
    out = Table(title=title)
    for name in (
        "case",
        "mode",
        "eager",
        "inductor",
        "max-autotune",
        "kevolve",
        "ratio",
        "95 %",
        "err eager",
        "err kevolve",
    ):
        out.add_column(name, justify="left" if name in ("case", "mode") else "right")
    if share is not None:
        out.add_column("share", justify="right")
    out.add_column("kernels", justify="right")
    out.add_column("status")
    for row in rows:
        cells = [
            row.case,
            row.mode,
            _ms(row.ms["eager"]),
            _ms(row.ms["inductor"]),
            _ms(_least(row.ms["max_autotune_no_cudagraphs"], row.ms["max_autotune"])),
            _ms(_least(*row.ms["kevolve"].values())),
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            "-" if row.ratio_lo is None else f"{row.ratio_lo:.2f}..{row.ratio_hi:.2f}",
            _err(row.err_eager),
            _err(row.err_kevolve),
        ]
        if share is not None:
            cells.append("-" if row.case not in share else f"{100 * share[row.case]:.0f} %")
        out.add_row(*cells, f"{row.replaced}/{row.regions}", row.status)
    return out


def _least(*values: float | None) -> float | None:
    real = [value for value in values if value is not None]
    return min(real) if real else None


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _err(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
