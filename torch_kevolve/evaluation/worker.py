"""Worker: a process that may die. One message in, one reply out, on pipes of its own.

Standard output belongs to the candidate and is thrown away. Before a candidate's code is loaded the process gives up
what it will not need again (see sandbox).
Started as `python -m torch_kevolve.evaluation.worker IN OUT`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_kevolve.evaluation import sandbox
from torch_kevolve.evaluation.runner import Runner


class Worker:
    """A runner and the walls around it. `handle` takes one message of the judge's and returns the reply."""

    def __init__(self) -> None:
        self.runner = Runner()
        self._locked: set[str] = set()

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        verb = message["do"]
        if verb == "limit":
            return self._limit(int(message["bytes"]))
        if verb == "compile" and sandbox.NATIVE in self._locked:
            return {"problem": sandbox.LOCKED}
        if verb == "load" and message.get("lock", True):
            self._lock(str(message["candidate"]["language"]))
        if verb == "run" and message.get("sealed"):
            return self._sealed(message)
        return self.runner.handle(message)

    def _lock(self, language: str) -> None:
        """Library calls bring no code of their own. A Triton kernel's code runs on the GPU alone, and triton starts an
        assembler for it at its first launch; all else is locked in fully."""
        if language == "aten":
            return
        level = sandbox.DEVICE if language == "triton" and self.runner.device != "cpu" else sandbox.NATIVE
        if level not in self._locked:
            sandbox.lock(level)
            self._locked.add(level)

    def _limit(self, extra: int) -> dict[str, Any]:
        """`extra` bytes more than what is held now: of address space, on CUDA of the allocator's memory."""
        if self.runner.device == "cpu":
            with contextlib.suppress(OSError, ValueError):  # a locked worker keeps the limit that it has
                limit_memory(extra)
            return {}
        free, whole = torch.cuda.mem_get_info(torch.device(self.runner.device))
        held = torch.cuda.memory_reserved(torch.device(self.runner.device))
        share = min(1.0, (held + min(extra, free)) / whole)
        torch.cuda.set_per_process_memory_fraction(share, torch.device(self.runner.device))
        return {}

    def _sealed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A run with inputs that cannot be written: who writes there, and be it to put it right again, dies."""
        pages = [(block.data_ptr(), block.numel()) for block in self.runner.blocks if block.device.type == "cpu"]
        done = [page for page in pages if sandbox.protect(*page, writable=False)]
        try:
            return self.runner.handle(message)
        finally:
            for page in done:
                sandbox.protect(*page, writable=True)


def limit_memory(extra: int) -> None:
    """Cap the address space at what is mapped now plus `extra` bytes: a greedy candidate gets a failed allocation."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = mapped + extra
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def main() -> None:
    ask = os.fdopen(int(sys.argv[1]), "r")
    answer = os.fdopen(int(sys.argv[2]), "w")
    faulthandler.disable()
    sandbox.begin()
    worker = Worker()
    answer.write(json.dumps({"ready": True}) + "\n")
    answer.flush()
    for line in ask:
        message = json.loads(line)
        reply = worker.handle(message)
        answer.write(json.dumps({**reply, "id": message.get("id")}) + "\n")
        answer.flush()


if __name__ == "__main__":
    main()
