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
from typing import Any, Protocol

from torch_kevolve.evaluation.runner import Runner

log = logging.getLogger(__name__)
KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR", "USER", "VIRTUAL_ENV", "PYTHONPATH", "LD_PRELOAD")
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "MALLOC_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "TRITON_", "KEVOLVE_HOME", "CXX", "CC", "OPENBLAS_")
MOST_REPLY = 64 * 2**20


class Port(Protocol):
    """`call` returns the runner's reply. `{"died": why}` stands for a runner that crashed, hung or talked nonsense."""

    fresh: bool
    """True after (re)start until `setup` was sent: the judge then sends the job again."""

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]: ...

    def restart(self) -> None: ...

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

    def close(self) -> None:
        self._runner = Runner()


class ProcessPort:
    """A worker in its own process group, killed with all its children when it is late."""

    def __init__(self) -> None:
        self.fresh = True
        self._process: subprocess.Popen[bytes] | None = None
        self._ask = self._answer = -1
        self._start()

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None:
            self._start()
        data = (json.dumps(message) + "\n").encode()
        try:
            os.set_blocking(self._ask, True)
            _write_all(self._ask, data)
            line = self._read(time.monotonic() + seconds)
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
        return reply

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        if self._process is None:
            return
        # The whole group: a candidate may have started children.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._ask)
        os.close(self._answer)
        self._process = None

    def _start(self) -> None:
        ask_read, self._ask = os.pipe()
        self._answer, answer_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_kevolve.evaluation.worker", str(ask_read), str(answer_write)],
            pass_fds=(ask_read, answer_write),
            env=environment(),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        )
        os.close(ask_read)
        os.close(answer_write)
        self._rest = b""
        self.fresh = True

    def _read(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(self._answer, 1 << 20)
            if not chunk or len(self._rest) > MOST_REPLY:
                raise EOFError
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ending(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"crashed with {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def _died(self, why: str) -> dict[str, Any]:
        self.close()
        self.fresh = True
        return {"died": why}


def environment() -> dict[str, str]:
    """What a worker may see of the environment: no keys, no tokens."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES)
    }


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]

