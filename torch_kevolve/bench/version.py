"""Version: which commit a figure was measured at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torch_kevolve.settings import VERSION


def commit() -> str:
    """Short commit of the checkout, `+` when it has changes; `KEVOLVE_COMMIT` where no git is; else the version."""
    named = os.environ.get("KEVOLVE_COMMIT")
    if named:
        return named
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return VERSION


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True)
    return done.stdout.strip()
