"""Journal: what was tried for a task, for people to read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torch_kevolve.graph_memory.schema import Case

log = logging.getLogger(__name__)


def entry(case: Case) -> str:
    """One Markdown line: what was tried, how far it got, how fast it was."""
    point = " ".join(f"{name}={value}" for name, value in sorted(case.point.items()))
    what = f"{case.family or case.proposer} ({case.language}) {point}".strip()
    if case.ok and case.ratio is not None:
        outcome = f"right, {case.ratio:.3f}x of the best baseline"
    else:
        outcome = f"refused at {case.evidence['reached']}: {case.evidence.get('note', '')}".replace("\n", " ")[:300]
    return f"- `{case.candidate[:12]}` {what} - {outcome}\n"


def write_entry(folder: Path, case: Case) -> None:
    """Append to `<task>.md`. A journal that cannot be written is no loss: the Cases are the truth."""
    path = folder / f"{case.task[:16]}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        head = b"" if path.exists() else f"# Task {case.task[:16]}\n\n".encode()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, head + entry(case).encode(errors="replace"))
        finally:
            os.close(handle)
    except OSError as error:
        log.info("journal is not written: %s", error)
