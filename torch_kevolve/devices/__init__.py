"""Devices: the catalogue of what kernels run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from torch_kevolve.devices.base import Device
from torch_kevolve.devices.cpu import Cpu
from torch_kevolve.devices.cuda import Cuda
from torch_kevolve.registry import Registry

DEVICES: Registry[Callable[[int], Device]] = Registry("devices", {"cpu": Cpu, "cuda": Cuda})


def current(device: torch.device | str) -> Device:
    """The device object for `cpu`, `cuda` or `cuda:1`. Raises UnknownName for a type that no member serves."""
    where = torch.device(device)
    index = where.index
    if index is None:
        index = torch.cuda.current_device() if where.type == "cuda" else 0
    return _made(where.type, index)


@cache
def _made(kind: str, index: int) -> Device:
    return DEVICES[kind](index)
