"""Codec: a kernel as a folder of two files, `kernel.json` and its source."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.errors import KevolveError, StoreError
from torch_kevolve.evidence import Evidence, Stage
from torch_kevolve.kernel import SCHEMA, Fingerprint, Kernel
from torch_kevolve.plan import LaunchPlan
from torch_kevolve.sizes import Json
from torch_kevolve.task import KernelTask, digest

SUFFIX: Mapping[str, str] = {"cpp": "cpp", "triton": "py", "cuda": "cu", "aten": "txt"}
ENTRY = "kernel.json"


def encode(kernel: Kernel) -> dict[str, bytes]:
    """File names and contents of one entry. `hashes.source` is what `sha256sum` says of the source file.

    Raises ValueError or TypeError for a kernel that has no text form (a lone surrogate, evidence that is not plain).
    """
    candidate = kernel.candidate
    source = f"kernel.{SUFFIX.get(candidate.language, 'txt')}"
    plan = candidate.plan.to_json()
    data: dict[str, Json] = {
        "schema": SCHEMA,
        "key": kernel.key,
        "task": kernel.task.to_json(),
        "task_key": kernel.task.key,
        "language": candidate.language,
        "fingerprint": dict(kernel.fingerprint.hard),
        "plan": plan,
        "evidence": _finite(kernel.evidence.to_json()),
        "provenance": candidate.provenance.to_json(),
        "source": source,
        "hashes": {"source": _sha256(candidate.source), "plan": digest(plan), "candidate": candidate.id},
    }
    text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"
    return {ENTRY: text.encode(), source: candidate.source.encode()}


def read(folder: Path) -> Kernel:
    """The kernel in a folder. Raises StoreError for anything that is not exactly what `encode` wrote."""
    try:
        data = json.loads((folder / ENTRY).read_bytes())
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise StoreError(detail=f"{folder}: schema is not {SCHEMA}")
        name = str(data["source"])
        if "/" in name or name.startswith("."):
            raise StoreError(detail=f"{folder}: source {name!r} leaves the folder")
        # Bytes, not text mode: that would turn \r\n into \n, and the hash would then not be the source's.
        source = (folder / name).read_bytes().decode()
        kernel = Kernel(
            task=KernelTask.from_json(data["task"]),
            fingerprint=Fingerprint.of(data["fingerprint"]),
            candidate=Candidate(
                language=str(data["language"]),
                source=source,
                plan=LaunchPlan.from_json(data["plan"]),
                provenance=Provenance.from_json(data["provenance"]),
            ),
            evidence=Evidence.from_json(data["evidence"]),
        )
    except KevolveError as error:
        raise StoreError(detail=f"{folder}: {error}") from None
    # Whatever the text makes the decoders do (deep nesting: RecursionError) is a corrupt entry, so a miss.
    except Exception as error:
        raise StoreError(detail=f"{folder}: {error!r}") from None
    _check(folder, data, kernel)
    return kernel


def _check(folder: Path, data: Mapping[str, Json], kernel: Kernel) -> None:
    hashes = data.get("hashes")
    if not isinstance(hashes, dict):
        raise StoreError(detail=f"{folder}: it has no hashes")
    found = {
        "source": _sha256(kernel.candidate.source),
        "plan": digest(kernel.candidate.plan.to_json()),
        "candidate": kernel.candidate.id,
    }
    for name, value in found.items():
        if hashes.get(name) != value:
            raise StoreError(detail=f"{folder}: the {name} is not what its hash says")
    if data.get("key") != kernel.key or data.get("task_key") != kernel.task.key:
        raise StoreError(detail=f"{folder}: the key is not that of its content")
    if not kernel.evidence.ok or kernel.evidence.reached is not Stage.DONE:
        raise StoreError(detail=f"{folder}: its evidence does not say that it was proven")


def _finite(data: Json) -> Json:
    """The same with `inf` and `nan` as text, which JSON has no numbers for; `Evidence.from_json` reads both."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return repr(data) if isinstance(data, float) and not math.isfinite(data) else data


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
