"""Policy: what a source may hold, checked before anything runs.

Triton text goes through `languages.triton_source`. C++ is checked as text (headers, words that no kernel needs)
and again as a compiled object: its undefined symbols must lie in a white list.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from torch_kevolve.candidate import Candidate
from torch_kevolve.languages.elf import start_code, undefined, writable
from torch_kevolve.languages.triton_source import check
from torch_kevolve.plan import Buffer, LaunchPlan
from torch_kevolve.sizes import evaluate
from torch_kevolve.task import DTYPE_BYTES

HEADERS = {"cmath", "math.h", "cstdint", "stdint.h", "cstring", "string.h", "limits", "algorithm", "omp.h",
           "immintrin.h",            "cstdlib", "stdlib.h", "type_traits", "utility", "cstddef"}  # fmt: skip
WORDS = re.compile(
    r"\b(asm|__asm__|__asm|system|popen|fork|exec[lv]\w*|dlopen|dlsym|socket|mmap|mprotect|ptrace|syscall|signal|raise|abort|exit|_exit|"
    r"fopen|open|read|write|getenv|setenv|thread_local|__attribute__\s*\(\(\s*(constructor|destructor))\b"
)
ALLOWED = re.compile(
    r"^(GOMP_\w+|omp_\w+|mem(cpy|set|move|cmp|chr)|malloc|free|calloc|realloc|aligned_alloc|posix_memalign|strlen|"
    r"(exp|exp2|expm1|log|log1p|log2|log10|sqrt|rsqrt|pow|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|acosh|atanh|erf|erfc|"
    r"lgamma|tgamma|ceil|floor|round|roundeven|rint|nearbyint|trunc|fmod|remainder|fmax|fmin|fabs|fma|ldexp|frexp|hypot|cbrt|copysign|lrint|llrint|lround)[fl]?|"
    r"__gxx_personality_v0|_Unwind_Resume|__stack_chk_fail|__cxa_\w*|_GLOBAL_OFFSET_TABLE_|__gmon_start__|_ITM_\w+|__tls_get_addr|"
    r"_Znwm|_ZdlPv|_ZdlPvm|_ZSt\w+|__extendhfsf2|__truncsfhf2|__truncsfbf2|__extendbfsf2)(@.*)?$"
)


def problem_of(candidate: Candidate) -> str:
    """Empty, or why this source is refused, with its line."""
    if candidate.language == "aten":
        return "" if not candidate.source.strip() else "library calls carry no source"
    if candidate.language == "triton":
        checked = check(candidate.source)
        return checked.problem
    if candidate.language == "cpp":
        return _cpp_text(candidate.source)
    return ""


def _cpp_text(source: str) -> str:
    # A compiler joins lines that end in a backslash before it looks for words; so do we, keeping the count of lines.
    joined = re.sub(r"((?:[^\n]*\\[ \t]*\n)+)([^\n]*)", _join, source)
    bare = _without_comments(joined)
    if re.search(r"##|%:|\\u|\bR\"|\?\?=", bare):
        return "pasted tokens, raw strings and character codes are not allowed"
    for number, line in enumerate(bare.splitlines(), 1):
        header = re.match(r"\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", line)
        if header and header[1] not in HEADERS:
            return f"line {number}: #include of {header[1]} is not allowed"
        if re.match(r"\s*#\s*include", line) and not header:
            return f"line {number}: this #include is not allowed"
        word = WORDS.search(line)
        if word:
            return f"line {number}: {word[1]} is not allowed"
    return ""


def _join(match: re.Match[str]) -> str:
    return re.sub(r"\\[ \t]*\n", "", match[0]) + "\n" * match[0].count("\n")


def _without_comments(source: str) -> str:
    """Comments and string literals blanked, lines kept; headers in quotes survive."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        if text.startswith("/"):
            return "\n" * text.count("\n")
        return '""' if not re.search(r"#\s*include\s*$", source[: match.start()].rsplit("\n", 1)[-1]) else text

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", blank, source, flags=re.S)


def object_problem(artifact: Path) -> str:
    """What a compiled object file has that a kernel must not: foreign calls, code that runs by itself, kept state."""
    try:
        blob = artifact.read_bytes()
        foreign = [name for name in undefined(blob) if not ALLOWED.match(name)]
        starts, keeps = start_code(blob), writable(blob)
    except (OSError, ValueError):
        return _with_nm(artifact)
    if foreign:
        return f"the object needs {foreign[0]}, which is not allowed"
    if starts:
        return f"the object has code that runs when it is loaded ({starts})"
    return f"the object keeps state between calls ({keeps}); use const or local variables" if keeps else ""


def _with_nm(artifact: Path) -> str:
    """The same for objects that are no ELF files, as far as `nm` tells."""
    if shutil.which("nm") is None or not artifact.exists():
        return "the compiled object cannot be inspected here; install nm (binutils)"
    done = subprocess.run(["nm", str(artifact)], capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    foreign = [row[-1] for row in rows if row[-2] == "U" and not ALLOWED.match(row[-1].removeprefix("_"))]
    keeps = [row[-1] for row in rows if row[-2] in "dDbB"]
    if foreign:
        return f"the object needs {foreign[0]}, which is not allowed"
    return f"the object keeps state between calls ({keeps[0]})" if keeps else ""


def plan_problem(plan: LaunchPlan, binding: Mapping[str, int], allowed: int) -> str:
    """Empty, or why the buffers of a plan cannot be had: `allowed` bytes in all."""
    total = 0
    for step in plan.flat:
        if isinstance(step, Buffer):
            count = 1
            for size, stride in zip(step.shape, step.strides, strict=True):
                count += max(0, evaluate(size, binding) - 1) * evaluate(stride, binding)
            total += max(0, count) * DTYPE_BYTES[step.dtype]
    return (
        f"the plan's buffers take {total / 2**20:.0f} MiB, {allowed / 2**20:.0f} are allowed" if total > allowed else ""
    )
