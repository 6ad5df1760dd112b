"""Store: the catalogue of places to keep kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch_kevolve.registry import Registry
from torch_kevolve.settings import Settings
from torch_kevolve.store.base import Store
from torch_kevolve.store.disk import DiskStore
from torch_kevolve.store.memory import MemoryStore
from torch_kevolve.store.tiered import TieredStore, seeds

log = logging.getLogger(__name__)

STORES: Registry[Callable[[Path], Store]] = Registry(
    "store", {"tiered": TieredStore.at, "disk": DiskStore.at, "memory": MemoryStore.at}
)


def open_store(settings: Settings) -> Store:
    """The store that the settings name. Where its folder cannot be written, new kernels live in this process only."""
    home = settings.home_path
    if settings.store in ("tiered", "disk") and not _writable(home):
        _say_once(home)
        below = [DiskStore(home, frozen=True)]
        if settings.store == "tiered":
            below.append(DiskStore(seeds(), frozen=True))
        return TieredStore(MemoryStore(), below)
    return STORES[settings.store](home)


@cache
def _say_once(home: Path) -> None:
    log.warning("%s cannot be written: new kernels are kept for this process only. Set KEVOLVE_HOME.", home)


def _writable(home: Path) -> bool:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    # False on a read-only file system even for root.
    return os.access(home, os.W_OK | os.X_OK)
