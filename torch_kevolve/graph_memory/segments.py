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
    """All lines of a folder, and a segment of our own to append to. A forked child opens its own.

    `rows` gives each row once: it remembers how far it has read in every file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle: int | None = None
        self._owner = 0
        self._read: dict[str, int] = {}
        self._told = False

    def append(self, row: Json) -> bool:
        """Write one row; False where the folder cannot be written. What is not plain data is written as text."""
        line = (json.dumps(row, sort_keys=True, separators=(",", ":"), default=str) + "\n").encode()
        try:
            if self._handle is None or self._owner != os.getpid():
                self._open()
            assert self._handle is not None
            if os.write(self._handle, line) == len(line):
                return True
            # A full disk took half of it: what is written next must not continue that line.
            self.close()
        except OSError as error:
            if not self._told:
                log.warning("experience is not kept: %s", error)
                self._told = True
        return False

    def rows(self) -> Iterator[Json]:
        """Every whole row that was not given before, in no order between segments."""
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path.name, 0))
                    text = file.read()
            except OSError as error:
                log.info("segment %s is unreadable: %s", path.name, error)
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path.name] = self._read.get(path.name, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    log.info("a torn line in %s is skipped", path.name)

    def close(self) -> None:
        if self._handle is not None and self._owner == os.getpid():
            os.close(self._handle)
        self._handle = None

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._owner = os.getpid()
