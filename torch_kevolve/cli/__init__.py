"""Cli: the `kevolve` command."""

from __future__ import annotations

from torch_kevolve.cli.bench import bench
from torch_kevolve.cli.cache import cache
from torch_kevolve.cli.config import config
from torch_kevolve.cli.demo import demo
from torch_kevolve.cli.doctor import doctor
from torch_kevolve.cli.explain import explain
from torch_kevolve.cli.root import main

for command in (bench, cache, config, demo, doctor, explain):
    main.add_command(command)

__all__ = ["main"]
