"""Disk store: the files are the truth, one rename publishes.

    kernels/<task key>/<fingerprint key>/<kernel key>/kernel.json + source, and `current`, which names the one in use
    records/<graph key>.json      wishes/<task key>.json      quarantine/      index/ (disposable)

Folder names are the first 16 digits of a key; the whole keys stand in kernel.json and are compared.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch_kevolve.errors import StoreError
from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.record import GraphRecord
from torch_kevolve.store.base import Bad, Summary, summary
from torch_kevolve.store.codec import ENTRY, encode, read
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)

VERSION = re.compile(rb"[0-9a-f]{16}\n")


class DiskStore:
    """One folder. A kernel's folder is found by name alone, so two processes need no common index.

    `frozen`: nothing is ever written there, and a corrupt entry stays where it is. A folder that turns out to be
    read-only behaves so too.
    """

    def __init__(self, home: Path, frozen: bool = False) -> None:
        self.home = home
        self.frozen = frozen

    @classmethod
    def at(cls, home: Path) -> DiskStore:
        return cls(home)

    @cached_property
    def _index(self) -> Any:
        """Loaded for those who list kernels; a compilation finds its own by name and needs no database."""
        from torch_kevolve.store.index import Index

        return Index(self.home / "index")

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        folder = self._current(self._place(task_key, fingerprint.key))
        if folder is None:
            return None
        try:
            kernel = read(folder)
            if kernel.task.key != task_key or kernel.fingerprint.key != fingerprint.key:
                raise StoreError(detail=f"{folder}: it lies in another kernel's place")
        except StoreError as error:
            self._quarantine(folder, str(error))
            return None
        return kernel

    def put(self, kernel: Kernel) -> None:
        if self.frozen:
            log.info("kernel %s is not kept: %s is read-only", kernel.key[:12], self.home)
            return
        place = self._place(kernel.task.key, kernel.fingerprint.key)
        folder = place / kernel.key[:16]
        try:
            files = encode(kernel)
            place.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=place))
            for name, content in files.items():
                (scratch / name).write_bytes(content)
            os.chmod(scratch, 0o755)
            self._publish(scratch, folder)
            # `current` names the version in use: replacing one small file is atomic, replacing a folder is not.
            _replace(place / "current", folder.name + "\n")
        except (OSError, ValueError, TypeError) as error:
            log.warning("kernel %s is not kept: %s", kernel.key[:12], error)

    def remove(self, task_key: str, fingerprint: Fingerprint, why: str) -> bool:
        folder = self._current(self._place(task_key, fingerprint.key))
        return folder is not None and self._quarantine(folder, f"{folder}: {why}")

    def ls(self) -> Iterator[Kernel]:
        found = []
        for folder in self._folders():
            try:
                found.append(read(folder))
            except StoreError as error:
                log.info("%s", error)
        return iter(sorted(found, key=lambda kernel: kernel.key))

    def summaries(self) -> list[Summary]:
        found = []
        for folder in self._folders():
            make = partial(_summary, folder)
            try:
                found.append(make() if self.frozen else self._index.summary(folder, make))
            except StoreError as error:
                log.info("%s", error)
        return sorted(found, key=lambda each: each.key)

    def verify(self) -> tuple[int, list[Bad]]:
        good, bad = 0, []
        for folder in self._folders():
            try:
                read(folder)
                good += 1
            except StoreError as error:
                bad.append(Bad(str(folder), str(error)))
        for name in sorted((self.home / "kernels").glob("*/*/current")):
            # A version that was set aside leaves its name behind; anything else is damage.
            if not VERSION.fullmatch(name.read_bytes()):
                bad.append(Bad(str(name), "it does not name a version"))
        return good, bad

    def get_record(self, graph_key: str) -> GraphRecord | None:
        path = self.home / "records" / f"{graph_key}.json"
        try:
            record = GraphRecord.from_json(json.loads(path.read_text()))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            self._quarantine(path, f"{path}: {error!r}")
            return None
        return record if record.graph_key == graph_key else None

    def put_record(self, record: GraphRecord) -> None:
        self._write(self.home / "records" / f"{record.graph_key}.json", record.to_json())

    def wish(self, task: KernelTask, binding: dict[str, int], share: float) -> None:
        path = self.home / "wishes" / f"{task.key}.json"
        try:
            if json.loads(path.read_text())["share"] >= share:
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._write(path, {"task": task.to_json(), "binding": dict(binding), "share": share})

    def wishes(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.home / "wishes").glob("*.json")):
            try:
                wish = json.loads(path.read_text())
                found.append({"task": wish["task"], "binding": wish["binding"], "share": float(wish["share"])})
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.info("wish %s is unreadable: %s", path.name, error)
        return sorted(found, key=lambda wish: -wish["share"])

    def _place(self, task_key: str, fingerprint_key: str) -> Path:
        return self.home / "kernels" / task_key[:16] / fingerprint_key[:16]

    @staticmethod
    def _current(place: Path) -> Path | None:
        """The version in use at a place; None where there is none, or where it was set aside."""
        try:
            name = (place / "current").read_bytes()
        except OSError:
            return None
        folder = place / name.decode("ascii", "replace").strip()
        return folder if VERSION.fullmatch(name) and folder.is_dir() else None

    def _folders(self) -> list[Path]:
        """The version in use of every place."""
        places = sorted((self.home / "kernels").glob("*/*"))
        return [folder for folder in map(self._current, places) if folder is not None]

    @staticmethod
    def _publish(scratch: Path, folder: Path) -> None:
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # The same candidate with newer evidence: its files are replaced one by one, the entry last.
            for name in sorted(os.listdir(scratch), key=lambda each: each == ENTRY):
                os.replace(scratch / name, folder / name)
            scratch.rmdir()

    def _quarantine(self, path: Path, why: str) -> bool:
        """Move a version or a record aside. Its `current` then names nothing, which is a miss like any other."""
        if self.frozen:
            log.warning("%s; counted as a miss", why)
            return False
        log.warning("%s; set aside, counted as a miss", why)
        target = self.home / "quarantine"
        try:
            target.mkdir(parents=True, exist_ok=True)
            os.rename(path, Path(tempfile.mkdtemp(prefix=f"{path.name[:16]}-", dir=target)) / path.name)
        except OSError as failure:
            log.info("not set aside: %s", failure)
            return False
        return True

    def _write(self, path: Path, data: Any) -> None:
        if self.frozen:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(data, sort_keys=True) + "\n")
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s is not kept: %s", path.name, error)


def _summary(folder: Path) -> Summary:
    return summary(read(folder), str(folder))


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)
