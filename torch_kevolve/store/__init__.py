"""Store: the catalogue of places to keep kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
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
    if settings.store == "tiered" and not _writable(home):
        log.warning("%s cannot be written: new kernels are kept for this process only. Set KEVOLVE_HOME.", home)
        return TieredStore(MemoryStore(), [DiskStore(home), DiskStore(seeds())])
    return STORES[settings.store](home)


def _writable(home: Path) -> bool:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(home, os.W_OK | os.X_OK)
