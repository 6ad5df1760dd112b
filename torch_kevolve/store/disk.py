"""Disk store: the files are the truth, one rename publishes.

    kernels/<task key>/<fingerprint key>/kernel.json + source
    records/<graph key>.json      wishes/<task key>.json      quarantine/
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_kevolve.errors import StoreError
from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.record import GraphRecord
from torch_kevolve.store.base import Bad
from torch_kevolve.store.codec import ENTRY, encode, read
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)


class DiskStore:
    """One folder. Read-only folders work: nothing is written then, and a corrupt entry stays where it is.

    A kernel's folder is found by name alone, so two processes need no common index.
    """

    def __init__(self, home: Path) -> None:
        self.home = home

    @classmethod
    def at(cls, home: Path) -> DiskStore:
        return cls(home)

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        # `current` names the version in use: replacing one small file is atomic, replacing a folder is not.
        place = self._place(task_key, fingerprint.key)
        try:
            version = (place / "current").read_text().strip()
        except OSError:
            return None
        folder = place / version
        try:
            kernel = read(folder)
            if kernel.task.key != task_key or kernel.fingerprint.key != fingerprint.key:
                raise StoreError(detail=f"{folder}: it lies in another kernel's place")
        except StoreError as error:
            self._quarantine(place, error)
            return None
        return kernel

    def put(self, kernel: Kernel) -> None:
        place = self._place(kernel.task.key, kernel.fingerprint.key)
        folder = place / kernel.key[:16]
        try:
            place.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=place))
            for name, content in encode(kernel).items():
                (scratch / name).write_bytes(content)
            os.chmod(scratch, 0o755)
            if folder.exists():
                # The same candidate with newer evidence: its files are replaced one by one, the entry last.
                for name in sorted(os.listdir(scratch), key=lambda each: each == ENTRY):
                    os.replace(scratch / name, folder / name)
                scratch.rmdir()
            else:
                self._rename(scratch, folder)
            _replace(place / "current", folder.name + "\n")
        except OSError as error:
            log.warning("kernel %s is not kept: %s", kernel.key[:12], error)

    def ls(self) -> Iterator[Kernel]:
        found = []
        for folder in self._folders():
            try:
                found.append(read(folder))
            except StoreError as error:
                log.info("%s", error)
        return iter(sorted(found, key=lambda kernel: kernel.key))

    def verify(self) -> tuple[int, list[Bad]]:
        good, bad = 0, []
        for folder in self._folders():
            try:
                read(folder)
                good += 1
            except StoreError as error:
                bad.append(Bad(str(folder), str(error)))
        return good, bad

    def get_record(self, graph_key: str) -> GraphRecord | None:
        path = self.home / "records" / f"{graph_key}.json"
        try:
            record = GraphRecord.from_json(json.loads(path.read_text()))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            self._quarantine(path, StoreError(detail=f"{path}: {error!r}"))
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

    def _folders(self) -> list[Path]:
        """The version in use of every place, and places that name none."""
        out = []
        for place in sorted((self.home / "kernels").glob("*/*")):
            try:
                out.append(place / (place / "current").read_text().strip())
            except OSError:
                out.append(place / "current")
        return out

    @staticmethod
    def _rename(scratch: Path, folder: Path) -> None:
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(scratch)  # another process published the same content first

    def _quarantine(self, path: Path, error: StoreError) -> None:
        log.warning("%s; set aside, counted as a miss", error)
        target = self.home / "quarantine"
        try:
            target.mkdir(parents=True, exist_ok=True)
            os.rename(path, Path(tempfile.mkdtemp(prefix=f"{path.name[:16]}-", dir=target)) / path.name)
        except OSError as failure:
            log.info("not set aside: %s", failure)

    def _write(self, path: Path, data: Any) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(data, sort_keys=True) + "\n")
        except OSError as error:
            log.warning("%s is not kept: %s", path.name, error)


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)
