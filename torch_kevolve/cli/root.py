"""Root: the group that holds all commands, and how it ends."""

from __future__ import annotations

from typing import Any

import click

from torch_kevolve.cli.say import MISUSE, NO, tell
from torch_kevolve.errors import BadSetting, FactoryError, KevolveError, UnknownName, UnknownOption
from torch_kevolve.log import configure
from torch_kevolve.settings import VERSION

MISUSES = (BadSetting, FactoryError, UnknownName, UnknownOption)


class Root(click.Group):
    """Errors raised on purpose end as one line on stderr and a status, not as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            ours = _ours(error)
            if ours is None:
                raise
            tell(f"kevolve: {ours}")
            ctx.exit(MISUSE if isinstance(ours, MISUSES) else NO)


def _ours(error: BaseException | None) -> KevolveError | None:
    """The error of ours in a chain: Dynamo wraps what a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KevolveError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="kevolve")
def main() -> None:
    """Evolve kernels for PyTorch models. Exit status: 0 done, 1 said no, 2 misuse."""
    configure()
