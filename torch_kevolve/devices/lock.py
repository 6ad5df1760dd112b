"""Lock: one measurement at a time per device, over all processes, and no other work of ours beside it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class _Held:
    """One device's lock in this process: which thread has it, how often, and the file that other processes see."""

    def __init__(self) -> None:
        self.threads = threading.RLock()
        self.depth = 0
        self.handle: int | None = None


_HELD: dict[str, _Held] = {}


@contextmanager
def device_lock(name: str) -> Iterator[None]:
    """Wait for the device. May be nested within one thread. A process that dies gives it back.

    The file lies in the temporary folder, per user, so every KEVOLVE_HOME shares it. Where it cannot be made, only
    the threads of this process wait for one another.
    """
    held = _HELD.setdefault(name, _Held())
    with held.threads:
        if held.depth == 0:
            held.handle = _acquire(name)
        held.depth += 1
        try:
            yield
        finally:
            held.depth -= 1
            if held.depth == 0 and held.handle is not None:
                # Unlocked, not only closed: a child that was forked meanwhile has the same open file.
                fcntl.flock(held.handle, fcntl.LOCK_UN)
                os.close(held.handle)
                held.handle = None


@contextmanager
def device_share(name: str) -> Iterator[None]:
    """Work on the device that is no measurement, such as a reference: several at a time, none while one measures.

    Nested within `device_lock` of the same process it waits for nothing.
    """
    held = _HELD.setdefault(name, _Held())
    handle = None if held.depth else _acquire(name, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _acquire(name: str, how: int = fcntl.LOCK_EX) -> int | None:
    plain = re.sub(r"[^A-Za-z0-9-]", "-", name)
    path = os.path.join(tempfile.gettempdir(), f"kevolve-{os.getuid()}-{plain}.lock")
    try:
        # O_NOFOLLOW: the folder is everybody's, and a name in it can be guessed.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("measurements of other processes are not waited for: %s", error)
        return None
    fcntl.flock(handle, how)
    return handle


def _forget() -> None:
    """In a forked child no thread of the parent is alive to give a lock back."""
    for held in _HELD.values():
        if held.handle is not None:
            os.close(held.handle)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget)
