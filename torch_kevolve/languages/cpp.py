"""C++: OpenMP kernels behind a C interface.

One function, `compile_command`, says how C++ is compiled. It is Inductor's own command line, so the text that is
verified and timed in the search is the text that is baked into a graph, compiled the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from torch_kevolve.candidate import Candidate
from torch_kevolve.languages.base import Built, Launcher, Status
from torch_kevolve.plan import Run, Tensor

COMPILE_S = 60.0


class Cpp:
    """The C++ member. Sources are self-contained and export `extern "C" void NAME(args)` in the plan's order."""

    name = "cpp"

    def status(self) -> Status:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            compiler = get_cpp_compiler()
        except Exception as error:  # torch raises its own class here, which moved between versions
            return Status(self.name, "missing", f"no C++ compiler ({type(error).__name__}); install g++")
        if shutil.which(compiler) is None:
            return Status(self.name, "missing", f"{compiler} is not on PATH; install g++")
        return Status(self.name, "available")

    def build(self, candidate: Candidate, binding: Mapping[str, int], arch: str, workdir: Path) -> Built:
        """Compile to a shared object named by content; an existing one is used again."""
        started = time.perf_counter()
        digest = hashlib.sha256(candidate.source.encode()).hexdigest()[:24]
        target = workdir / f"k{digest}.so"
        if target.exists():
            return Built(target)
        folder = Path(tempfile.mkdtemp(prefix="cpp-", dir=workdir))
        source, middle, made = folder / "kernel.cpp", folder / "kernel.o", folder / "kernel.so"
        source.write_text(candidate.source)
        try:
            # In two steps, so that what may lie in an object can be checked: a shared library always has start-up code.
            for command, out in zip(object_commands(source, middle, made), (middle, made), strict=True):
                status, text = _run(command, folder)
                if status != 0 or not out.exists():
                    return Built(None, _explain(text, folder), seconds=time.perf_counter() - started)
            size = middle.stat().st_size
            os.replace(middle, target.with_suffix(".o"))
            os.replace(made, target)
            return Built(target, profile={"object_bytes": size}, seconds=time.perf_counter() - started)
        except subprocess.TimeoutExpired:
            return Built(None, f"the compiler ran past {COMPILE_S:.0f} s", seconds=COMPILE_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, built: Built, candidate: Candidate) -> Launcher:
        library = ctypes.CDLL(str(built.artifact))
        functions = {name: _declare(library, name, candidate) for name in candidate.plan.kernels}

        def launch(
            kernel: str,
            grid: tuple[int, ...],
            args: Sequence[Any],
            meta: Mapping[str, Any],
            options: Mapping[str, int],
        ) -> None:
            if any(isinstance(arg, torch.Tensor) and arg.numel() == 0 for arg in args) and _all_empty(args):
                return
            functions[kernel](*(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args))

        return launch


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Its exit status and what it said. Whatever ends the wait early ends the compiler with all its children."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder)
    with process:
        try:
            _, text = process.communicate(timeout=COMPILE_S)
        except BaseException:
            _kill(process)
            raise
    return process.returncode, text


def _kill(process: subprocess.Popen[str]) -> None:
    """g++ only drives: the work is done by cc1plus, which outlives it, and holds the pipe that is waited for.

    No process group of its own: it shall die with the judge's, too.
    """
    with contextlib.suppress(psutil.Error):
        driver = psutil.Process(process.pid)
        driver.suspend()  # starts no other child meanwhile
        for child in driver.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _all_empty(args: Sequence[Any]) -> bool:
    return all(arg.numel() == 0 for arg in args if isinstance(arg, torch.Tensor))


def _declare(library: ctypes.CDLL, name: str, candidate: Candidate) -> Any:
    function = getattr(library, name)
    run = next(s for s in candidate.plan.flat if isinstance(s, Run) and s.kernel == name)
    kinds: list[Any] = []
    for arg in run.args:
        if isinstance(arg, Tensor):
            kinds.append(ctypes.c_void_p)
        else:
            kinds.append(ctypes.c_double if isinstance(arg, float) else ctypes.c_int64)
    function.argtypes, function.restype = kinds, None
    return function


def compile_command(source: Path, target: Path) -> list[str]:
    """The command that makes a shared object from one C++ file, as Inductor would call it on this machine."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=False, aot_mode=False, compile_only=False)
    # The command comes as one string: real paths, which may hold spaces, are put in after it is cut into words.
    builder = CppBuilder(name="kernel", sources="/kevolve-source.cpp", output_dir="/kevolve", BuildOption=options)
    words = builder.get_command_line().split()
    words[words.index("-o") + 1] = str(target)
    return [str(source) if word == "/kevolve-source.cpp" else word for word in words]


def object_commands(source: Path, middle: Path, target: Path) -> tuple[list[str], list[str]]:
    """`compile_command` as its two steps, compiling and linking, with the same flags in both."""
    words = compile_command(source, target)
    compiling = [*words, "-c"]
    compiling[words.index("-o") + 1] = str(middle)
    return compiling, [str(middle) if word == str(source) else word for word in words]


def _explain(text: str, folder: Path) -> str:
    """The first errors of g++ with their lines, without paths."""
    lines = [line.replace(f"{folder}/", "") for line in text.splitlines()]
    errors = [line for line in lines if re.search(r"\b(error|undefined reference)\b", line)]
    return "\n".join((errors or lines)[:6])[:1200] or "the compiler failed without a message"
