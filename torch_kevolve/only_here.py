"""Only here: one searcher per task, over all processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def only_here(folder: Path, name: str) -> Iterator[bool]:
    """True while this process (and thread) alone holds `name`; False if another one does. Never waits.

    Where no lock file can be made (a read-only home, a system without flock) everybody may go on: two searches of
    one task waste time, they do no harm.
    """
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / f"{name}.lock").open("a")
    except (ImportError, OSError) as error:
        log.info("no lock for %s: %s", name, error)
        yield True
        return
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            log.info("no lock for %s: %s", name, error)
        yield True
