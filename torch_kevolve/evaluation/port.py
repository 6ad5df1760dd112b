"""Port: how the judge speaks to a runner, in a process that it can kill or in its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch_kevolve.evaluation.runner import Runner

log = logging.getLogger(__name__)
KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR", "USER", "VIRTUAL_ENV", "PYTHONPATH", "LD_PRELOAD")
KEPT_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "TRITON_",
    "KEVOLVE_HOME",
    "CXX",
    "CC",
    "OPENBLAS_",
)
MOST_REPLY = 64 * 2**20
START_S = 120.0
WORKER = "torch_kevolve.evaluation.worker"


class Port(Protocol):
    """`call` returns the runner's reply. `{"died": why}` stands for a runner that crashed, hung or talked nonsense."""

    fresh: bool
    """True after (re)start until `setup` was sent: the judge then sends the job again."""

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]: ...

    def restart(self) -> None: ...

    def spare(self) -> None:
        """Have a second runner started in the background, for the next restart."""
        ...

    def settle(self, seconds: float) -> None:
        """Wait until nothing of ours runs in the background: its start would disturb a measurement."""
        ...

    def close(self) -> None: ...


class DirectPort:
    """The runner in this process: for tests and where processes cannot be started."""

    def __init__(self) -> None:
        self._runner = Runner()
        self.fresh = True

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if message["do"] == "limit":
            return {}
        reply: dict[str, Any] = json.loads(json.dumps(self._runner.handle(json.loads(json.dumps(message)))))
        return reply

    def restart(self) -> None:
        self._runner, self.fresh = Runner(), True

    def spare(self) -> None:
        """There is none."""

    def settle(self, seconds: float) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        self._runner = Runner()


@dataclass
class Child:
    """A started process, its two pipes, what was read and not yet used, and whether it has said that it is ready."""

    process: subprocess.Popen[bytes]
    ask: int
    answer: int
    rest: bytes = b""
    ready: bool = False

    @classmethod
    def start(cls, module: str) -> Child:
        ask_read, ask = os.pipe()
        answer, answer_write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(ask_read), str(answer_write)],
            pass_fds=(ask_read, answer_write),
            env=environment(),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        )
        os.close(ask_read)
        os.close(answer_write)
        return cls(process, ask, answer)

    def line(self, deadline: float) -> bytes:
        """Raises TimeoutError when it is late, EOFError when it ended or sent more than MOST_REPLY bytes."""
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.answer], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(self.answer, 1 << 20)
            if not chunk or len(self.rest) > MOST_REPLY:
                raise EOFError
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def wait_ready(self, deadline: float) -> None:
        if not self.ready:
            self.line(deadline)
            self.ready = True

    def kill(self) -> None:
        """The whole group: a candidate may have started children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.ask)
        os.close(self.answer)


class ProcessPort:
    """A worker in its own process group, killed with all its children when it is late.

    Importing torch takes 2 to 4 s, longer than most candidates need, so a spare worker can stand by.
    """

    def __init__(self, module: str = WORKER) -> None:
        self.fresh = True
        self._module = module
        self._child: Child | None = Child.start(module)
        self._spare: Child | None = None
        self._count = 0

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._child is None:
            self._start()
        assert self._child is not None
        self._count += 1
        data = (json.dumps({**message, "id": self._count}) + "\n").encode()
        try:
            self._child.wait_ready(time.monotonic() + START_S)
            _write_all(self._child.ask, data)
            line = self._child.line(time.monotonic() + seconds)
        except (BrokenPipeError, EOFError):
            return self._died(self._ending())
        except TimeoutError:
            return self._died(f"ran past {seconds:.0f} s and was killed")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return self._died("sent a reply that is no JSON")
        if not isinstance(reply, dict):
            return self._died("sent a reply that is no object")
        if reply.pop("id", None) != self._count or self._child.rest:
            # A line that nobody asked for would be taken for the answer to the next question.
            return self._died("sent a reply out of turn")
        return reply

    def restart(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._start()

    def spare(self) -> None:
        if self._spare is None:
            self._spare = Child.start(self._module)

    def settle(self, seconds: float) -> None:
        if self._spare is None:
            return
        try:
            self._spare.wait_ready(time.monotonic() + seconds)
        except (EOFError, TimeoutError):
            self._spare.kill()
            self._spare = None

    def close(self) -> None:
        for child in (self._child, self._spare):
            if child is not None:
                child.kill()
        self._child = self._spare = None
        self.fresh = True

    def _start(self) -> None:
        self._child, self._spare = self._spare or Child.start(self._module), None
        self.fresh = True

    def _ending(self) -> str:
        assert self._child is not None
        process = self._child.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        if code is not None and code < 0:
            names = {int(each): each.name for each in signal.Signals}
            return f"crashed with {names.get(-code, -code)}"
        return f"ended with status {code}"

    def _died(self, why: str) -> dict[str, Any]:
        if self._child is not None:
            self._child.kill()
        self._child, self.fresh = None, True
        return {"died": why}


def environment() -> dict[str, str]:
    """What a worker may see of the environment: no keys, no tokens."""
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
