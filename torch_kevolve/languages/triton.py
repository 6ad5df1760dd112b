"""Triton: kernels for GPUs; on a machine without one they compile, and the interpreter runs them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_kevolve.candidate import Candidate
from torch_kevolve.languages.base import Built, Launcher, Status
from torch_kevolve.languages.triton_source import check
from torch_kevolve.plan import Run, Tensor
from torch_kevolve.sizes import evaluate

POINTER = {
    "float64": "*fp64", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64", "int32": "*i32",
    "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1",
}  # fmt: skip


class Triton:
    """The Triton member."""

    name = "triton"

    def status(self) -> Status:
        if importlib.util.find_spec("triton") is None:
            return Status(self.name, "missing", "pip install triton")
        if torch.cuda.is_available():
            return Status(self.name, "available")
        return Status(self.name, "compile-only", "no GPU here: kernels are compiled, not run")

    def build(self, candidate: Candidate, binding: Mapping[str, int], arch: str, workdir: Path) -> Built:
        """Check, print and, for `cuda:NN` or `hip:ARCH`, compile every launch offline. `interpret` skips the compiler."""
        started = time.perf_counter()
        checked = check(candidate.source)
        if checked.problem:
            return Built(None, f"policy: {checked.problem}")
        missing = [name for name in candidate.plan.kernels if name not in checked.kernels]
        if missing:
            return Built(None, f"the plan launches {missing[0]}, the source has {', '.join(checked.kernels)}")
        path = workdir / f"t{hashlib.sha256(checked.text.encode()).hexdigest()[:24]}.py"
        if not path.exists():
            handle, scratch = tempfile.mkstemp(dir=workdir)
            with os.fdopen(handle, "w") as file:
                file.write(checked.text)
            os.replace(scratch, path)
        profile: dict[str, Any] = {}
        if arch != "interpret":
            try:
                profile = _compile_all(candidate, binding, arch, path)
            except Exception as error:  # triton raises many kinds for a bad kernel; all are the candidate's
                return Built(None, _explain(error), seconds=time.perf_counter() - started)
        return Built(path, profile=profile, seconds=time.perf_counter() - started)

    def functions(self, built: Built, candidate: Candidate) -> dict[str, Any]:
        """The jitted functions that the plan launches, by name, for whoever puts them into a graph."""
        assert built.artifact is not None
        module = _module(built.artifact)
        return {name: getattr(module, name) for name in candidate.plan.kernels}

    def load(self, built: Built, candidate: Candidate) -> Launcher:
        assert built.artifact is not None
        module = _module(built.artifact)

        def launch(
            kernel: str,
            grid: tuple[int, ...],
            args: Sequence[Any],
            meta: Mapping[str, Any],
            options: Mapping[str, int],
        ) -> None:
            getattr(module, kernel)[grid](*args, **meta, **options)

        return launch


_LOADING = threading.Lock()
"""Builds run in threads: without it a second one finds a module whose functions are not there yet."""


def _module(path: Path) -> ModuleType:
    """Execute the printed text as a module of its own; triton reads its source from the file."""
    name = f"kevolve_triton_{path.stem}"
    with _LOADING:
        known = sys.modules.get(name)
        return known if known is not None else _loaded(name, path)


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _compile_all(candidate: Candidate, binding: Mapping[str, int], arch: str, path: Path) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = _module(path)
    backend, _, chip = arch.partition(":")
    target = GPUTarget("cuda", int(chip), 32) if backend == "cuda" else GPUTarget("hip", chip, 64)
    facts: dict[str, Any] = {}
    for step in candidate.plan.flat:
        if not isinstance(step, Run):
            continue
        function = getattr(module, step.kernel)
        meta = {name: evaluate(v, binding) if hasattr(v, "free_symbols") else v for name, v in step.meta}
        names = [name for name in function.arg_names if name not in meta]
        signature: dict[str, str] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for name, arg in zip(names, step.args, strict=True):
            signature[name] = _type(arg, binding)
            if isinstance(arg, Tensor) or (signature[name][0] == "i" and _number(arg, binding) % 16 == 0):
                attributes[(function.arg_names.index(name),)] = [["tt.divisibility", 16]]
        signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
        source = ASTSource(fn=function, signature=signature, constexprs=meta, attrs=attributes)
        made = triton.compile(source, target=target, options=dict(step.options))
        facts[step.kernel] = _facts(made)
    return facts


def _type(arg: Any, binding: Mapping[str, int]) -> str:
    if isinstance(arg, Tensor):
        return POINTER[arg.dtype]
    if isinstance(arg, bool):
        return "i1"
    if isinstance(arg, float):
        return "fp32"
    return "i32" if abs(_number(arg, binding)) < 2**31 else "i64"


def _number(arg: Any, binding: Mapping[str, int]) -> int:
    return int(arg) if isinstance(arg, int) else evaluate(arg, binding)


def _facts(made: Any) -> dict[str, Any]:
    meta = made.metadata
    facts = {"shared": getattr(meta, "shared", 0), "num_warps": getattr(meta, "num_warps", 0)}
    ptx = made.asm.get("ptx", "")
    if isinstance(ptx, str) and ptx:
        facts["ptx_lines"] = ptx.count("\n")
    return json.loads(json.dumps(facts))


def _explain(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " | ".join(lines[:8])[:1000]
