"""Templates: the catalogue of kernel families."""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.registry import Registry
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.base import Family, Space
from torch_kevolve.templates.columns_cpp import ColumnsCpp
from torch_kevolve.templates.embedding_cpp import EmbeddingCpp
from torch_kevolve.templates.embedding_triton import EmbeddingTriton
from torch_kevolve.templates.matmul_cpp import MatmulCpp
from torch_kevolve.templates.matmul_triton import MatmulTriton
from torch_kevolve.templates.plane_matmul_triton import PlaneMatmulTriton
from torch_kevolve.templates.pooling_cpp import PoolingCpp
from torch_kevolve.templates.pooling_triton import PoolingTriton
from torch_kevolve.templates.rowwise_cpp import RowwiseCpp
from torch_kevolve.templates.rowwise_triton import RowwiseTriton
from torch_kevolve.templates.scan_cpp import ScanCpp
from torch_kevolve.templates.scan_triton import ScanTriton
from torch_kevolve.templates.small_matmul_triton import SmallMatmulTriton
from torch_kevolve.templates.twin import Twin

log = logging.getLogger(__name__)

TEMPLATES: Registry[type[Family]] = Registry(
    "templates",
    {
        family.name: family
        for family in (
            Twin,
            RowwiseCpp,
            ColumnsCpp,
            EmbeddingCpp,
            ScanCpp,
            PoolingCpp,
            MatmulCpp,
            RowwiseTriton,
            EmbeddingTriton,
            PoolingTriton,
            ScanTriton,
            SmallMatmulTriton,
            PlaneMatmulTriton,
            MatmulTriton,
        )
    },
)


def spaces(task: KernelTask, device: DeviceFacts, languages: Collection[str]) -> list[Space]:
    """What all families offer for a task on a device, in the languages that may be used."""
    out = []
    for name in TEMPLATES:
        family = TEMPLATES[name]()
        if family.language not in languages or (family.language == "triton" and device.type == "cpu"):
            continue
        try:
            space = family.match(task, device)
        except Exception:  # a family that breaks its promise costs its own space only
            log.exception("family %s broke on task %s", name, task.key[:12])
            continue
        if space is not None:
            out.append(space)
    return out
