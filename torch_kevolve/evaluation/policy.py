"""Policy: what a source may hold, checked before anything runs.

Triton text goes through `languages.triton_source`. C++ is checked as text (headers, words that have no place in a kernel)
and again as a compiled object: its undefined symbols must lie in a white list.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from torch_kevolve.candidate import Candidate
from torch_kevolve.languages.triton_source import check

HEADERS = {"cmath", "math.h", "cstdint", "stdint.h", "cstring", "string.h", "limits", "algorithm", "omp.h", "immintrin.h",
           "cstdlib", "stdlib.h", "type_traits", "utility", "cstddef"}  # fmt: skip
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
    bare = _without_comments(source)
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


def _without_comments(source: str) -> str:
    """Comments and string literals blanked, lines kept; headers in quotes survive."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        if text.startswith("/"):
            return "\n" * text.count("\n")
        return '""' if not re.search(r"#\s*include\s*$", source[: match.start()].rsplit("\n", 1)[-1]) else text

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", blank, source, flags=re.S)


def object_problem(artifact: Path) -> str:
    """Undefined symbols of a compiled kernel that lie outside the white list; empty where `nm` is not installed."""
    if shutil.which("nm") is None:
        return ""
    done = subprocess.run(["nm", "-D", "--undefined-only", str(artifact)], capture_output=True, text=True)
    names = [line.split()[-1] for line in done.stdout.splitlines() if line.strip()]
    bad = [name for name in names if not ALLOWED.match(name)]
    return f"the object needs {bad[0]}, which is not allowed" if bad else ""
