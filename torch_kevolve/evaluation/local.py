"""Local evaluator: the judge in a process of its own, workers under it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.port import WORKERS_MALLOC
from torch_kevolve.evidence import Evidence, Timing
from torch_kevolve.settings import Settings
from torch_kevolve.sizes import Json

log = logging.getLogger(__name__)
SLACK_S = 600.0
"""The judge bounds every step by itself; this bounds the judge."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _environment() -> dict[str, str]:
    """The judge's environment. Memory of expandable segments cannot be shared with a worker; freed references must go
    back to the system, whatever the user's setting of malloc, which is the workers' again. Huge pages: a new fp64 copy
    of 65 M elements takes 0.05 s with them, 0.2 s without."""
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    malloc = {name: env.pop(name) for name in list(env) if name.startswith("MALLOC_")}
    return {"THP_MEM_ALLOC_ENABLE": "1", **env, WORKERS_MALLOC: json.dumps(malloc)}


class LocalEvaluator:
    """Starts the judge at the first `open`, in the background of whatever comes next, and keeps it for later jobs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._owner = 0

    def open(self, job: Job, settings: Settings) -> LocalTrial:
        """Raises EvaluationError when the baselines cannot be run or the judge cannot be started."""
        self._lock.acquire()
        try:
            self._start()
            return LocalTrial(self, job, settings)
        except EvaluationError:
            self._lock.release()
            raise
        except BaseException:  # Ctrl-C while the judge is at work: its replies would belong to nobody
            self.drop()
            self._lock.release()
            raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            os.close(self._ask)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
        os.close(self._answer)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None and self._owner == os.getpid():
            return
        if self._process is not None:
            self.close()
        ask_read, self._ask = os.pipe()
        self._answer, answer_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_kevolve.evaluation.bailiff", str(ask_read), str(answer_write)],
            pass_fds=(ask_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(),
            # Its own group: Ctrl-C is for the user's process, which then tells the judge.
            start_new_session=True,
        )
        os.close(ask_read)
        os.close(answer_write)
        self._rest = b""
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(self, message: Json, seconds: float, ends: int = 1) -> Iterator[dict[str, Any]]:
        """Send one message; yield replies until the last, of `ends` messages.

        Raises EvaluationError when the judge says so or is gone.
        """
        try:
            data = memoryview((json.dumps(message) + "\n").encode())
            while data:
                data = data[os.write(self._ask, data) :]
            deadline = time.monotonic() + seconds + SLACK_S
            while True:
                row = json.loads(self._line(deadline))
                if "error" in row:
                    raise EvaluationError(detail=row["error"])
                if row.get("end"):
                    ends -= 1
                    if not ends:
                        return
                    continue
                yield row
        except (BrokenPipeError, EOFError):
            raise EvaluationError(detail="the judge's process ended") from None

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise EOFError
            chunk = os.read(self._answer, 1 << 20)
            if not chunk:
                raise EOFError
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def drop(self) -> None:
        """Kill the judge in the middle of a job (Ctrl-C, a lost reply): the next `open` starts another."""
        if self._process is not None and self._owner == os.getpid():
            _kill(self._process)
        self.close()

    def release(self) -> None:
        self._lock.release()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: the compilers that it waits for would go on for nobody."""
    if process.returncode is None:  # not waited for yet, so the number is still its own
        os.killpg(process.pid, signal.SIGKILL)


class LocalTrial:
    """One job of the judge's process. Only one is open at a time per evaluator; others wait."""

    def __init__(self, evaluator: LocalEvaluator, job: Job, settings: Settings) -> None:
        self._evaluator, self._open = evaluator, True
        seconds = max(1.0, job.deadline - time.monotonic())
        message = {
            "do": "open",
            "task": job.task.to_json(),
            "binding": dict(job.binding),
            "device": job.device,
            "seconds": seconds,
            "frozen": job.frozen,
            "flags": dict(job.flags),
            "settings": dataclasses.asdict(settings),
        }
        (row,) = evaluator.ask(message, seconds)
        self.baselines: Mapping[str, Timing] = {name: Timing(*values) for name, values in row["baselines"].items()}
        self.notes: Mapping[str, str] = row["notes"]
        self._busy = False

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        known = {candidate.id: candidate for candidate in candidates}
        message = {"do": "evaluate", "candidates": [candidate.to_json() for candidate in candidates]}
        self._busy = True
        for row in self._evaluator.ask(message, 60.0 * len(candidates)):
            yield known[row["candidate"]], Evidence.from_json(row["evidence"])
        self._busy = False

    def confirm(self, candidate: Candidate) -> Evidence:
        self._settle()
        self._busy = True
        (row,) = self._evaluator.ask({"do": "confirm", "candidate": candidate.to_json()}, 300.0)
        self._busy = False
        return Evidence.from_json(row["evidence"])

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if self._busy:
                self._evaluator.drop()
            else:
                list(self._evaluator.ask({"do": "close"}, 10.0))
        except EvaluationError as error:
            log.info("closing: %s", error)
            self._evaluator.drop()
        finally:
            self._evaluator.release()

    def _settle(self) -> None:
        """End a batch that was left half-way; its replies belong to nobody."""
        if self._busy:
            list(self._evaluator.ask({"do": "stop"}, SLACK_S, ends=2))
            self._busy = False
