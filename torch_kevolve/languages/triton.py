"""Triton: kernels for GPUs; on a machine without one they compile, and the interpreter runs them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
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
from torch_kevolve.languages.elf import cubin_facts
from torch_kevolve.languages.triton_source import check
from torch_kevolve.plan import Run, Tensor
from torch_kevolve.sizes import evaluate

POINTER = {
    "float64": "*fp64", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64", "int32": "*i32",
    "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1",
}  # fmt: skip

AMD_FACTS = {"vgpr_count": "registers", "private_segment_fixed_size": "stack_bytes", "vgpr_spill_count": "spills"}
"""What a code object's listing calls them, and what we do."""


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
        """Check, print and, for `cuda:NN` or `hip:ARCH`, compile every launch offline. `interpret` skips that."""
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
            _give_scratch()
            getattr(module, kernel)[grid](*args, **meta, **options)

        return launch


def _give_scratch() -> None:
    """Device-side TMA descriptors live in scratch memory that triton asks for. Its allocator belongs to the thread's
    context, so it is set where a kernel is launched, not once."""
    import triton

    if hasattr(triton, "set_allocator"):
        triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=torch.int8)


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
    wave = 64 if chip.startswith("gfx9") else 32
    target = GPUTarget("cuda", int(chip), 32) if backend == "cuda" else GPUTarget("hip", chip, wave)
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
            if _is_one(arg, binding):
                # As a launch does it: an integer that is 1 becomes a constant of the kernel.
                meta[name] = 1
                continue
            signature[name] = _type(arg, binding)
            if isinstance(arg, Tensor) or (signature[name][0] == "i" and _number(arg, binding) % 16 == 0):
                attributes[(function.arg_names.index(name),)] = [["tt.divisibility", 16]]
        signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
        source = ASTSource(fn=function, signature=signature, constexprs=meta, attrs=attributes)
        # What a launch does where nothing is said; said here, for triton 3.9 warns of a change of its default.
        made = triton.compile(source, target=target, options={"enable_fp_fusion": True, **dict(step.options)})
        facts[step.kernel] = _facts(made, step.kernel)
    return facts


def _type(arg: Any, binding: Mapping[str, int]) -> str:
    if isinstance(arg, Tensor):
        return POINTER[arg.dtype]
    if isinstance(arg, bool):
        return "i1"
    if isinstance(arg, float):
        return "fp32"
    return "i32" if abs(_number(arg, binding)) < 2**31 else "i64"


def _is_one(arg: Any, binding: Mapping[str, int]) -> bool:
    if isinstance(arg, Tensor | bool | float):
        return False
    return _number(arg, binding) == 1


def _number(arg: Any, binding: Mapping[str, int]) -> int:
    return int(arg) if isinstance(arg, int) else evaluate(arg, binding)


def _facts(made: Any, kernel: str) -> dict[str, Any]:
    """Registers and stack per thread, shared memory per block, as far as the compiled object tells."""
    meta = made.metadata
    facts = {"shared": int(getattr(meta, "shared", 0)), "num_warps": int(getattr(meta, "num_warps", 0))}
    cubin, listing = made.asm.get("cubin"), made.asm.get("amdgcn")
    if isinstance(cubin, bytes):
        with contextlib.suppress(ValueError):
            facts.update(cubin_facts(cubin).get(getattr(meta, "name", kernel), {}))
    if isinstance(listing, str):
        for word, name in AMD_FACTS.items():
            found = re.search(rf"\.{word}:\s*(\d+)", listing)
            if found:
                facts[name] = int(found[1])
    return facts


def _explain(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " | ".join(lines[:8])[:1000]
