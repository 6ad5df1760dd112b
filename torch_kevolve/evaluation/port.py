"""Port: how the judge speaks to a runner, in a process that it can kill or in its own.

A worker that has loaded a candidate's native code can compile no more (see sandbox): asked to, the port starts a fresh
one, tells it what the first was told, lets it compile, and loads the candidate again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from torch._inductor.runtime.cache_dir_utils import cache_dir

from torch_kevolve.evaluation.runner import Runner
from torch_kevolve.evaluation.sandbox import LOCKED

log = logging.getLogger(__name__)
WORKERS_MALLOC = "KEVOLVE_WORKERS_MALLOC"
"""The user's settings of malloc as JSON, which the judge itself does not run under."""
KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "USER", "VIRTUAL_ENV", "PYTHONPATH", "LD_PRELOAD")
KEPT_PREFIXES = (
    "CUDA_",
    "CUBLAS_",
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
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
MOST_REPLY = 64 * 2**20
WATCH_S = 0.2
"""How often the memory of a worker is looked at that no limit of its address space can hold (CUDA maps terabytes)."""
START_S = 120.0
WORKER = "torch_kevolve.evaluation.worker"
Check = Callable[[dict[str, Any]], str]
TEXT_FIELDS, MOST_TEXT = ("died", "problem", "damaged"), 4000


def reply_problem(reply: dict[str, Any]) -> str:
    """Empty, or which field of a worker's reply is not what it should be. What outputs and samples say is judged
    where they are read; here it is seen to that their kinds are right and that texts can be written to a file."""
    for name, value in reply.items():
        if name in TEXT_FIELDS:
            if not isinstance(value, str):
                return f"{name} is no text"
            reply[name] = value[:MOST_TEXT].encode(errors="replace").decode()
        elif name == "outs":
            if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
                return "outs is no list of objects"
        elif name == "samples":
            if not isinstance(value, dict):
                return "samples is no object"
        elif name == "launches":
            if type(value) is not int or not 0 <= value < 2**31:
                return "launches is no count"
        elif name == "seconds":
            if type(value) is not float or not 0.0 <= value < 1e6:
                return "seconds is no time"
        else:
            return "there is a field that no reply has"
    return ""


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
    home: Path
    rest: bytes = b""
    ready: bool = False
    most_bytes: int = 0
    """Resident memory above which it is killed; 0: nobody watches."""

    @classmethod
    def start(cls, module: str) -> Child:
        ask_read, ask = os.pipe()
        answer, answer_write = os.pipe()
        home = Path(tempfile.mkdtemp(prefix="kevolve-worker-"))
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(ask_read), str(answer_write)],
            pass_fds=(ask_read, answer_write),
            env={**environment(), "TMPDIR": str(home)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        )
        os.close(ask_read)
        os.close(answer_write)
        return cls(process, ask, answer, home)

    def line(self, deadline: float) -> bytes:
        """Raises TimeoutError when it is late, MemoryError when it holds too much memory, EOFError when it ended or
        sent more than MOST_REPLY bytes."""
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not select.select([self.answer], [], [], min(left, WATCH_S) if self.most_bytes else left)[0]:
                if self.most_bytes and self.resident() > self.most_bytes:
                    raise MemoryError
                continue
            chunk = os.read(self.answer, 1 << 20)
            if not chunk or len(self.rest) > MOST_REPLY:
                raise EOFError
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def resident(self) -> int:
        """Bytes of memory that it holds; 0 when it is gone."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

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
        shutil.rmtree(self.home, ignore_errors=True)


class ProcessPort:
    """A worker in its own process group, killed with all its children when it is late.

    Importing torch takes 2 to 4 s, longer than most candidates need, so a spare worker can stand by.
    """

    def __init__(self, module: str = WORKER, check: Check | None = None) -> None:
        self.fresh = True
        self._module = module
        self._check = check or (reply_problem if module == WORKER else None)
        self._child: Child | None = Child.start(module)
        self._spare: Child | None = None
        self._count = 0
        self._told: list[Mapping[str, Any]] = []
        """What this worker has been told since its job began, and would have to be told again."""
        self._loaded: Mapping[str, Any] | None = None

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        verb = message["do"]
        if verb == "setup":
            self._told = []
        reply = self._ask(message, seconds)
        if verb == "compile" and reply.get("problem") == LOCKED and self._loaded is not None:
            reply = self._compile_elsewhere(message, seconds)
        if "died" not in reply and "problem" not in reply:
            if verb in ("setup", "draws", "limit", "compile"):
                self._told.append(message)
            elif verb == "load":
                self._loaded = message
            if verb == "limit" and message.get("watch") and self._child is not None:
                self._child.most_bytes = self._child.resident() + int(message["bytes"])
        return reply

    def _compile_elsewhere(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """A fresh worker, told what this one was told, compiles and then loads the candidate."""
        told, loaded = list(self._told), self._loaded
        assert loaded is not None
        self.restart()
        for earlier in told:
            reply = self._ask(earlier, START_S + seconds)
            if "died" in reply or "problem" in reply:
                return reply
        self.fresh, self._told = False, told
        made = self._ask(message, seconds)
        if "died" in made:
            return made
        reply = self._ask(loaded, START_S)
        if "died" in reply or "problem" in reply:
            return reply
        self._loaded = loaded
        return made

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._child is None:
            self._start()
        assert self._child is not None
        self._count += 1
        data = (json.dumps({**message, "id": self._count}) + "\n").encode()
        try:
            self._child.wait_ready(time.monotonic() + START_S)
            _write_all(self._child.ask, data)
            line = self._child.line(time.monotonic() + seconds)
        except MemoryError:
            return self._died("took more memory than a search may use and was killed")
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
        number = reply.pop("id", None)
        if type(number) is not int or number != self._count or self._child.rest:
            # A line that nobody asked for would be taken for the answer to the next question.
            return self._died("sent a reply out of turn")
        problem = self._check(reply) if self._check is not None else ""
        return self._died(f"sent a reply that cannot be used: {problem}") if problem else reply

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
        self._loaded, self.fresh = None, True

    def _start(self) -> None:
        self._child, self._spare = self._spare or Child.start(self._module), None
        self._loaded, self._told = None, []
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
        self._child, self._loaded, self.fresh = None, None, True
        return {"died": why}


def environment() -> dict[str, str]:
    """What a worker may see of the environment: no keys, no tokens. Compilers' caches stay where they are for all."""
    seen = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    kept = {name: value for name, value in seen.items() if not any(word in name.upper() for word in SECRET)}
    malloc: dict[str, str] = json.loads(os.environ.get(WORKERS_MALLOC, "{}"))
    return {"TORCHINDUCTOR_CACHE_DIR": cache_dir(), **kept, **malloc}


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
