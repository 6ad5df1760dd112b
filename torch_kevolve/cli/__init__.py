"""Cli: the `kevolve` command."""

from __future__ import annotations

import click

from torch_kevolve.cli.bench import bench
from torch_kevolve.cli.cache import cache
from torch_kevolve.cli.config import config
from torch_kevolve.cli.demo import demo
from torch_kevolve.cli.doctor import doctor
from torch_kevolve.cli.explain import explain
from torch_kevolve.log import configure
from torch_kevolve.settings import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="kevolve")
def main() -> None:
    """Evolve kernels for PyTorch models. Exit status: 0 done, 1 said no, 2 misuse."""
    configure()


for command in (bench, cache, config, demo, doctor, explain):
    main.add_command(command)
