"""Index: what lies in a folder of kernels, without reading it again.

A disposable accelerator: each row carries the sizes and times of the files that it was made from, and a row that does
not fit them is made anew (300 kernels of one operator each: 42 ms with it, 120 ms without; the gain grows with the
tasks). Nothing is ever executed on its word; kernels are read from their files.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diskcache

from torch_kevolve.store.base import Summary

log = logging.getLogger(__name__)


class PlainDisk(diskcache.Disk):
    """Text in, text out, in the database itself. Whatever would be pickled, written or found, is refused.

    diskcache unpickles a row whose mode says so, so its own Disk runs the code of whoever can write the database.
    """

    def put(self, key: Any) -> Any:
        if type(key) is not str:
            raise TypeError("keys of the index are text")
        return key, True

    def get(self, key: Any, raw: Any) -> Any:
        if not raw or type(key) is not str:
            raise ValueError("a key of the index is no text")
        return key

    def store(self, value: Any, read: Any, key: Any = None) -> Any:
        if type(value) is not str or read:
            raise TypeError("values of the index are text")
        return 0, diskcache.core.MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        if mode != diskcache.core.MODE_RAW or filename is not None or type(value) is not str:
            raise ValueError("a value of the index is no text")
        return value


class Index:
    """Summaries by folder. Every failure of the database costs time, never an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache: Any = None
        self._broken = False

    def summary(self, folder: Path, make: Callable[[], Summary]) -> Summary:
        """The summary of one entry: from its row if its files are as they were, else from `make`, which may raise."""
        stamp = _stamp(folder)
        name = str(folder.relative_to(self.folder.parent))
        found = self._read(name, stamp)
        if found is None:
            found = make()
            self._write(name, json.dumps({"stamp": stamp, "summary": asdict(found)}))
        return found

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _read(self, name: str, stamp: list[list[Any]]) -> Summary | None:
        try:
            cache = self._open()
            row = None if cache is None else cache.get(name)
            data = None if row is None else json.loads(row)
            return Summary(**data["summary"]) if data is not None and data["stamp"] == stamp else None
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, KeyError, TypeError) as error:
            log.info("index row %s is not used: %r", name, error)
            return None

    def _write(self, name: str, text: str) -> None:
        try:
            cache = self._open()
            if cache is not None:
                cache.set(name, text)
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError) as error:
            log.info("index is not written: %r", error)

    def _open(self) -> Any:
        if self._cache is None and not self._broken:
            try:
                self._cache = diskcache.Cache(str(self.folder), timeout=1, disk=PlainDisk, eviction_policy="none")
            except Exception as error:  # a broken database, in any of the ways that SQLite has
                self._broken = True
                log.info("no index at %s: %r", self.folder, error)
        return self._cache


def _stamp(folder: Path) -> list[list[Any]]:
    """Name, size and time of each file of an entry. Empty for a folder that cannot be read."""
    try:
        return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(folder.iterdir())]
    except OSError:
        return []
