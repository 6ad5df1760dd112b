"""Builders: processes that compile, for compilers that may crash or never return.

g++ is a child of its caller anyway. Triton's compiler runs inside Python: an assertion of LLVM would end the judge.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.judge import build_here
from torch_kevolve.evaluation.port import ProcessPort
from torch_kevolve.languages.base import Built

MODULE = "torch_kevolve.evaluation.builders"
BUILD_S = 120.0


class Builders:
    """A few builder processes, started when first needed. Safe to call from many threads."""

    def __init__(self, most: int = 0) -> None:
        most = most or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._free: queue.LifoQueue[ProcessPort | None] = queue.LifoQueue()
        for _ in range(most):
            self._free.put(None)

    def __call__(self, candidate: Candidate, binding: dict[str, int], arch: str, workdir: Path) -> Built:
        if candidate.language != "triton" or arch == "interpret":
            return build_here(candidate, binding, arch, workdir)
        port = self._free.get() or ProcessPort(MODULE)
        try:
            message = {"candidate": candidate.to_json(), "binding": binding, "arch": arch, "workdir": str(workdir)}
            reply = port.call({"do": "build", **message}, BUILD_S)
        finally:
            self._free.put(port)
        if "died" in reply:
            return Built(None, f"the compiler {reply['died']}")
        try:
            return _built(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise EvaluationError(detail=f"a builder's reply cannot be read: {error!r}") from None

    def close(self) -> None:
        """End all processes that are free."""
        ports = [self._free.get_nowait() for _ in range(self._free.qsize())]
        for port in ports:
            if port is not None:
                port.close()
            self._free.put(None)


def _built(reply: dict[str, Any]) -> Built:
    artifact = reply["artifact"]
    return Built(
        None if artifact is None else Path(str(artifact)),
        str(reply["note"])[:2000],
        dict(reply["profile"]),
        float(reply["seconds"]),
    )


def main() -> None:
    """One message in, one reply out: `python -m torch_kevolve.evaluation.builders IN OUT`."""
    ask = os.fdopen(int(sys.argv[1]), "r")
    answer = os.fdopen(int(sys.argv[2]), "w")

    def reply(row: dict[str, Any]) -> None:
        answer.write(json.dumps(row) + "\n")
        answer.flush()

    reply({"ready": True})
    for line in ask:
        message = json.loads(line)
        candidate = Candidate.from_json(message["candidate"])
        built = build_here(candidate, message["binding"], message["arch"], Path(message["workdir"]))
        artifact = None if built.artifact is None else str(built.artifact)
        row = {"artifact": artifact, "note": built.note, "profile": dict(built.profile), "seconds": built.seconds}
        reply({**row, "id": message["id"]})


if __name__ == "__main__":
    main()
