"""Segments: append-only files, one per writing process.

A record is one line written with one `write` on a file that only this process appends to. A process that is killed
leaves at most one torn last line, which readers skip; no other line can be hurt.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from torch_kevolve.sizes import Json

log = logging.getLogger(__name__)


class Segments:
    """All lines of a folder, and a segment of our own to append to. A forked child opens its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle: int | None = None
        self._owner = 0

    def append(self, row: Json) -> bool:
        """Write one row; False where the folder cannot be written."""
        line = (json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n").encode()
        try:
            if self._handle is None or self._owner != os.getpid():
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
                self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                self._owner = os.getpid()
            return os.write(self._handle, line) == len(line)
        except OSError as error:
            log.warning("experience is not kept: %s", error)
            return False

    def rows(self) -> Iterator[Json]:
        """Every whole row of every segment, in no order between segments."""
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                text = path.read_text(errors="replace")
            except OSError as error:
                log.info("segment %s is unreadable: %s", path.name, error)
                continue
            for line in text.splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    log.info("a torn line in %s is skipped", path.name)

    def close(self) -> None:
        if self._handle is not None and self._owner == os.getpid():
            os.close(self._handle)
        self._handle = None
