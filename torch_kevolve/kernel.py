"""Kernel: a candidate that earned its place on one kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_kevolve.candidate import Candidate
from torch_kevolve.evidence import Evidence
from torch_kevolve.task import KernelTask, digest

SCHEMA = 1


@dataclass(frozen=True)
class Fingerprint:
    """The hard part, which is in a kernel's key: a differing one is a miss. Plain strings, no path, no host name.

    Keys: vendor, arch, name, units (SMs or cores usable), memory, isa.
    """

    hard: tuple[tuple[str, str], ...]

    @cached_property
    def key(self) -> str:
        """sha256 of the hard part, 64 hex digits."""
        return digest(dict(self.hard))

    @classmethod
    def of(cls, hard: Mapping[str, Any]) -> Fingerprint:
        return cls(tuple(sorted((str(k), str(v)) for k, v in hard.items())))

    @property
    def device_type(self) -> str:
        return "cpu" if dict(self.hard).get("vendor") in ("AMD CPU", "Intel CPU", "ARM CPU", "CPU") else "cuda"


@dataclass(frozen=True)
class Kernel:
    """The winner for (task key, fingerprint). `evidence.ok` and stage DONE always hold for a stored one."""

    task: KernelTask
    fingerprint: Fingerprint
    candidate: Candidate
    evidence: Evidence

    @cached_property
    def key(self) -> str:
        """Content hash over task key, fingerprint and candidate, 64 hex digits; in op names and the pass's uuid."""
        return digest({"task": self.task.key, "fingerprint": self.fingerprint.key, "candidate": self.candidate.id})
