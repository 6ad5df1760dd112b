"""Lock: one measurement at a time per device, over all processes of this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_THREADS = threading.RLock()


@contextmanager
def device_lock(name: str) -> Iterator[None]:
    """Wait for the device. The file lives in the temporary folder, per user, so every KEVOLVE_HOME shares it."""
    path = Path(tempfile.gettempdir(), f"kevolve-{os.getuid()}-{name}.lock")
    with _THREADS:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
