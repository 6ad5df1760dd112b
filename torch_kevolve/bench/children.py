"""Children: one case per process, so that a crash costs one row.

The allocator is set by environment variables that glibc reads at start-up: a child is where they can be set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Keep freed memory in the process: with glibc's default every output above 32 MB is mapped and faulted in anew,
# and all arms of a large operator measure the page-fault path.
ARENA = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


def environment(malloc: str) -> dict[str, str]:
    """The child's environment: `arena` keeps freed pages for all arms alike, `default` is glibc's own."""
    env = dict(os.environ)
    for name in ARENA:
        env.pop(name, None)
    if malloc == "arena":
        env.update(ARENA)
    return env


def run_child(module: str, job: dict[str, Any], timeout_s: float, malloc: str) -> dict[str, Any] | str:
    """Run `python -m module JOB.json OUT.json`; the object it wrote, or a sentence that says why there is none."""
    with tempfile.TemporaryDirectory(prefix="kevolve-bench-") as folder:
        ask, answer = Path(folder, "job.json"), Path(folder, "row.json")
        ask.write_text(json.dumps(job))
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, str(ask), str(answer)],
                env=environment(malloc),
                timeout=timeout_s,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"ran past {timeout_s:.0f} s"
        if answer.exists():
            row: dict[str, Any] = json.loads(answer.read_text())
            return row
        last = (done.stderr or "").strip().splitlines()[-3:]
        return f"exit status {done.returncode}: {' | '.join(last)}"[:500]
