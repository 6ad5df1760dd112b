"""Pages: docs/settings.md and docs/cli.md, printed from the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from torch_kevolve.cli import main
from torch_kevolve.settings import EFFORT, Settings

MADE = "<!-- Printed from the code: python scripts/pages.py -->"


def settings_page() -> str:
    """Every setting with its variable, default and sentence, and what each effort may spend."""
    rows = [
        f"| `kevolve.{knob.name}` | `{knob.metadata['env']}` | {_default(knob.default)} | {knob.metadata['help']} |"
        for knob in fields(Settings)
    ]
    efforts = [
        f"| `{name}` | {budget.seconds:g} | {budget.candidates_per_task} | {budget.draft} | {budget.stall} |"
        for name, budget in EFFORT.items()
    ]
    return "\n".join([
        "# Settings", "", MADE, "",
        "An option given to `torch.compile(model, backend='kevolve', options={...})` wins over the environment",
        "variable, which wins over the default. Options without `kevolve.` go to Inductor; `mode` may be one of them.",
        "", "| option | variable | default | what it does |", "|---|---|---|---|", *rows, "",
        "`KEVOLVE_LOGS` turns on log records in the manner of `TORCH_LOGS`: `KEVOLVE_LOGS=lowering,+agent` (`all`:",
        "the whole package, `+`: debug, `-`: errors only).",
        "", "## What an effort may spend", "",
        "| effort | seconds per model | candidates per task | of them independent | without a gain before it ends |",
        "|---|---|---|---|---|", *efforts, "",
    ])  # fmt: skip


def cli_page() -> str:
    """The help text of every command."""
    parts = ["# The `kevolve` command", "", MADE, ""]
    for path, command in _commands(main, ()):
        how: dict[str, Any] = {"terminal_width": 100, "max_content_width": 100, "help_option_names": ["-h", "--help"]}
        context = click.Context(command, info_name=" ".join(("kevolve", *path)), **how)
        parts += [f"## `{' '.join(('kevolve', *path))}`", "", "```", command.get_help(context), "```", ""]
    return "\n".join(parts)


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _commands(command.commands[name], (*path, name))


def _default(value: object) -> str:
    return f"`{value}`" if value != "" else "(empty)"


def write(docs: Path) -> None:
    (docs / "settings.md").write_text(settings_page())
    (docs / "cli.md").write_text(cli_page())


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1] / "docs")
