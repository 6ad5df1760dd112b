"""Checkup: the questions that `kevolve doctor` asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_kevolve.devices import current
from torch_kevolve.evaluation import sandbox
from torch_kevolve.languages import LANGUAGES
from torch_kevolve.lowering import inductor
from torch_kevolve.lowering.hooks import Hooks
from torch_kevolve.settings import VERSION, Settings
from torch_kevolve.store import open_store


def checkup() -> dict[str, Any]:
    """`{"version", "languages": [{"name", "status", "hint"}], "checks": [...]}`; a check is ok, missing or broken."""
    languages = []
    for name in LANGUAGES:
        status = LANGUAGES[name]().status()
        languages.append({"name": status.name, "status": status.state, "hint": status.hint})
    checks = [
        _check("device cpu", lambda: dict(current("cpu").fingerprint().hard)["name"]),
        _check("device cuda", _cuda),
        _check("store", _store),
        _check("inductor hooks", _hooks),
        _check("backend by name", _named),
        *_sandbox(),
    ]
    return {"version": VERSION, "torch": torch.__version__, "languages": languages, "checks": checks}


def _check(name: str, ask: Callable[[], str]) -> dict[str, str]:
    try:
        answer = ask()
    except Exception as error:  # a doctor reports, whatever it finds
        return {"name": name, "status": "broken", "hint": f"{type(error).__name__}: {error}"[:300]}
    state, _, hint = answer.partition("|") if answer.startswith("missing|") else ("ok", "", answer)
    return {"name": name, "status": state, "hint": hint}


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "missing|no GPU is visible to torch; CPU kernels work"
    return str(dict(current("cuda").fingerprint().hard)["name"])


def _store() -> str:
    settings = Settings.make()
    good, bad = open_store(settings).verify()
    home = settings.home_path
    if not os.access(home, os.W_OK):
        return f"missing|{home} cannot be written; set KEVOLVE_HOME to a folder that can"
    if bad:
        return f"missing|{len(bad)} bad entries of {good + len(bad)}; see kevolve cache verify"
    return f"{good} kernels in {home} and the seeds"


SANDBOX = ("no_new_privs", "seccomp", "fork", "execve", "setsid", "socket", "ptrace", "kill of others", "no file grows")
"""What a locked worker should be refused, as `sandbox.tried` names it."""


def _sandbox() -> list[dict[str, str]]:
    """A process of its own locks itself as a worker does and tries what it should be refused: one row per part."""
    try:
        command = [sys.executable, "-I", str(sandbox.__file__)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        seen: dict[str, bool] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [{"name": "sandbox", "status": "broken", "hint": f"{type(error).__name__}: {error}"[:300]}]
    why = "not refused by this kernel: candidates are held by the policy and their own process alone"
    return [
        {
            "name": f"sandbox {part}",
            "status": "ok" if seen.get(part) else "missing",
            "hint": "active in workers" if seen.get(part) else why,
        }
        for part in SANDBOX
    ]


def _hooks() -> str:
    """Compile a softmax through our pass and count the regions that it saw."""
    seen: list[int] = []
    hooks = Hooks(note=lambda phase, verdicts: seen.append(len(verdicts)), gate_on=False, uuid=None)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return inductor.compile(gm, inputs, hooks, {})

    x = torch.randn(17, 33)
    with torch.no_grad():
        torch._dynamo.reset()
        made = torch.compile(lambda x: torch.softmax(x, -1), backend=backend)(x)
    if not seen:
        raise RuntimeError(f"torch {torch.__version__} did not run the post-grad pass")
    torch.testing.assert_close(made, torch.softmax(x, -1))
    return f"torch {torch.__version__} runs our pass"


def _named() -> str:
    if "kevolve" not in torch._dynamo.list_backends():
        return "missing|the entry point is not installed: pip install -e . (or the wheel)"
    return 'torch.compile(model, backend="kevolve")'
