"""Bailiff: the judge's process.

It serves one user process over two pipes, one job at a time, and ends when the user's end is closed.
Started as `python -m torch_kevolve.evaluation.bailiff IN OUT`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import KevolveError
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.builders import Builders
from torch_kevolve.evaluation.judge import Judge
from torch_kevolve.evaluation.port import ProcessPort
from torch_kevolve.log import configure
from torch_kevolve.settings import Settings
from torch_kevolve.sizes import Json
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)
Reply = Callable[[Json], None]


class Bailiff:
    """Keeps one worker port and the builders over all jobs; `hurry`: the user's side wants no more of a batch."""

    def __init__(self, hurry: Callable[[], bool]) -> None:
        self.judge: Judge | None = None
        self.port: ProcessPort | None = ProcessPort()
        self.builders = Builders()
        self.hurry = hurry

    def serve(self, message: Mapping[str, Any], reply: Reply) -> None:
        """Every message ends with one reply that has `end`."""
        try:
            getattr(self, f"_{message['do']}")(message, reply)
            reply({"end": True})
        except KevolveError as error:
            reply({"end": True, "error": str(error)})
        except Exception as error:  # a fault of ours: told to the user's side, which leaves the region to Inductor
            log.exception("judge broke")
            reply({"end": True, "error": f"{type(error).__name__}: {error}"})

    def _open(self, message: Mapping[str, Any], reply: Reply) -> None:
        self._close(message, reply)
        job = Job(
            task=KernelTask.from_json(message["task"]),
            binding=message["binding"],
            device=message["device"],
            deadline=time.monotonic() + message["seconds"],
            frozen=message["frozen"],
            flags=message["flags"],
        )
        self.port = self.port or ProcessPort()
        self.judge = Judge(job, Settings(**message["settings"]), self.port, build=self.builders)
        self.judge.open()
        baselines = {name: [t.median_ms, t.low_ms, t.high_ms, t.samples] for name, t in self.judge.baselines.items()}
        reply({"baselines": baselines, "notes": self.judge.notes})

    def _evaluate(self, message: Mapping[str, Any], reply: Reply) -> None:
        assert self.judge is not None
        candidates = [Candidate.from_json(row) for row in message["candidates"]]
        for candidate, evidence in self.judge.evaluate(candidates):
            reply({"candidate": candidate.id, "evidence": evidence.to_json()})
            if self.hurry():
                break

    def _confirm(self, message: Mapping[str, Any], reply: Reply) -> None:
        assert self.judge is not None
        evidence = self.judge.confirm(Candidate.from_json(message["candidate"]))
        reply({"evidence": evidence.to_json()})

    def _stop(self, message: Mapping[str, Any], reply: Reply) -> None:
        """Its arrival has ended the batch; there is nothing more to do."""

    def _close(self, message: Mapping[str, Any], reply: Reply) -> None:
        if self.judge is not None:
            self.judge.close()
            self.judge = None
        if message["do"] == "close":
            # The next job's worker starts while the user's side does something else.
            self.port = self.port or ProcessPort()
            self.port.restart()

    def end(self) -> None:
        """End all processes."""
        if self.judge is not None:
            self.judge.close()
        if self.port is not None:
            self.port.close()
        self.builders.close()


def main() -> None:
    configure()
    ask = os.fdopen(int(sys.argv[1]), "r")
    answer = os.fdopen(int(sys.argv[2]), "w")

    def reply(row: Json) -> None:
        answer.write(json.dumps(row) + "\n")
        answer.flush()

    def hurry() -> bool:
        return bool(select.select([ask], [], [], 0)[0])

    bailiff = Bailiff(hurry)
    try:
        for line in ask:
            bailiff.serve(json.loads(line), reply)
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        bailiff.end()


if __name__ == "__main__":
    main()
