"""Sandbox: what a worker gives up before it runs a candidate's code.

`begin` when the worker starts, `lock` before the first candidate is loaded: until then Inductor compiles the baselines
there, for which it needs a compiler's processes. Nothing here can be undone by the process itself.
Run as a script (`python sandbox.py`) it locks itself, tries what should be refused, and prints what it saw as JSON:
that is how `kevolve doctor` knows. It imports the standard library alone.

The filter is classic BPF over the number and the first arguments of a system call (seccomp(2)); numbers are those of
asm/unistd.h of the two processors that we know.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

NATIVE, DEVICE = "native", "device"
"""Levels of `lock`. NATIVE: code of the candidate's runs on the processor. DEVICE: only on an accelerator, whose
toolchain starts an assembler and a C compiler at a kernel's first launch: new processes stay allowed."""
LOCKED = "this worker has run a candidate and can compile no more"
"""What a worker says that is asked to compile after it has been locked."""

PROCESSES = ("fork", "vfork", "execve", "execveat")
REFUSED = (
    "setsid", "setpgid", "socket", "socketpair", "connect", "bind", "ptrace", "process_vm_readv", "process_vm_writev",
    "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "setrlimit",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "unshare", "setns", "bpf",
)  # fmt: skip
"""io_uring is a second door to files and sockets that no filter looks through."""
OWN_ONLY = ("kill", "tgkill")
"""Allowed where the first argument is this process: abort() and pthread_kill() end it that way."""

NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "clone": 56, "clone3": 435, "setsid": 112,
        "setpgid": 109, "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "kill": 62, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_open": 434, "pidfd_getfd": 438,
        "pidfd_send_signal": 424, "setrlimit": 160, "prlimit64": 302, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "unshare": 272, "setns": 308, "bpf": 321, "seccomp": 317,
    },
    "aarch64": {
        "execve": 221, "execveat": 281, "clone": 220, "clone3": 435, "setsid": 157, "setpgid": 154, "socket": 198,
        "socketpair": 199, "connect": 203, "bind": 200, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "setrlimit": 164,
        "prlimit64": 261, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "unshare": 97,
        "setns": 268, "bpf": 280, "seccomp": 277,
    },
}  # fmt: skip
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARGS = 0, 4, 16
"""Offsets in `struct seccomp_data`; each argument takes 8 bytes, the low word first."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
X32 = 0x40000000
CLONE_THREAD = 0x10000
SET_PDEATHSIG, SET_NO_NEW_PRIVS, GET_NO_NEW_PRIVS = 1, 38, 39
FILTER, ALL_THREADS = 1, 1
Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def begin() -> list[str]:
    """No new privileges, death with the judge, no core files, own files unreadable to others. What took effect."""
    active = []
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getppid()
        if libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
            active.append("dies with the judge")
            if os.getppid() != parent:  # it was gone before we asked
                os._exit(1)
        if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            active.append("no_new_privs")
    return active


def lock(level: str = NATIVE) -> list[str]:
    """Install the filter for all threads, for good. The parts that took effect; a second call can only add.

    NATIVE also forbids files to grow (RLIMIT_FSIZE 0): a candidate cannot fill the disk.
    """
    active = []
    if level == NATIVE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        active.append("no file grows")
    machine = platform.machine()
    if sys.platform == "linux" and machine in NUMBERS and _install(program(machine, level, os.getpid()), machine):
        active.append("seccomp")
    return active


def program(machine: str, level: str, own: int) -> list[Instruction]:
    """The filter as rows of (code, jump if true, jump if false, operand)."""
    numbers = NUMBERS[machine]
    refuse = REFUSE | errno.EPERM
    out: list[Instruction] = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, AUDIT[machine]), (RETURN, 0, 0, refuse)]
    out.append((LOAD, 0, 0, NR))
    if machine == "x86_64":  # the same calls once more, under other numbers
        out += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, refuse)]
    names = (*REFUSED, *PROCESSES) if level == NATIVE else REFUSED
    for name in names:
        if name in numbers:
            out += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, refuse)]
    for name in OWN_ONLY:
        out += _if_argument(numbers[name], (EQUAL, 1, 0, own), ARGS, refuse)
    # prlimit64 with a new limit: its address, of which one word is never 0.
    out += [
        (EQUAL, 0, 6, numbers["prlimit64"]),
        (LOAD, 0, 0, ARGS + 16),
        (EQUAL, 0, 2, 0),
        (LOAD, 0, 0, ARGS + 20),
        (EQUAL, 1, 0, 0),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    if level == NATIVE:
        # Where clone3 does not exist glibc makes threads with clone, whose flags a filter can read.
        out += [(EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
        out += _if_argument(numbers["clone"], (ANY_BIT, 1, 0, CLONE_THREAD), ARGS, refuse)
    return [*out, (RETURN, 0, 0, ALLOW)]


def _if_argument(number: int, test: Instruction, offset: int, refuse: int) -> list[Instruction]:
    """Allow call `number` where `test` holds of the word at `offset`."""
    return [(EQUAL, 0, 4, number), (LOAD, 0, 0, offset), test, (RETURN, 0, 0, refuse), (RETURN, 0, 0, ALLOW)]


def _install(rows: Sequence[Instruction], machine: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    code = b"".join(struct.pack("=HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    whole = _Program(len(rows), ctypes.cast(buffer, ctypes.c_void_p))
    number = NUMBERS[machine]["seccomp"]
    arguments = (ctypes.c_long(number), ctypes.c_long(FILTER), ctypes.c_long(ALL_THREADS), ctypes.byref(whole))
    return int(libc.syscall(*arguments)) == 0


def protect(address: int, size: int, writable: bool) -> bool:
    """Make whole pages from `address` on readable only, or writable again."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = 1 | (2 if writable else 0)
    page = resource.getpagesize()
    start = address // page * page
    length = -(-(address + size - start) // page) * page
    return int(libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(flags))) == 0


def tried() -> dict[str, bool]:
    """Lock this process and try everything that should be refused. True: the kernel refused it."""
    before = os.getppid()
    begun, locked = begin(), lock(NATIVE)
    libc = ctypes.CDLL(None, use_errno=True)
    attempts: Mapping[str, Callable[[], object]] = {
        "fork": _fork,
        "execve": lambda: os.execv("/there/is/no/such", ["program"]),
        "setsid": os.setsid,
        "socket": socket.socket,
        "ptrace": lambda: _checked(libc.ptrace(0x7FFF, before, 0, 0)),  # no such request: harmless if it gets through
        "kill of others": lambda: os.kill(before, 0),
    }
    seen = {name: _refused(attempt) for name, attempt in attempts.items()}
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return {**{part: True for part in (*begun, *locked)}, **seen}


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


if __name__ == "__main__":
    print(json.dumps(tried()))
