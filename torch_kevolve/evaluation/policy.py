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
from torch_kevolve.errors import PlanError
from torch_kevolve.languages.elf import exported, start_code, undefined, writable
from torch_kevolve.languages.replay import operator
from torch_kevolve.languages.triton_source import check
from torch_kevolve.plan import Aten, Buffer, LaunchPlan
from torch_kevolve.sizes import evaluate
from torch_kevolve.task import DTYPE_BYTES

HEADERS = {"cmath", "math.h", "cstdint", "stdint.h", "cstring", "string.h", "limits", "algorithm", "omp.h",
           "immintrin.h",            "cstdlib", "stdlib.h", "type_traits", "utility", "cstddef"}  # fmt: skip
WORDS = re.compile(
    r"\b(asm|__asm__|__asm|system|popen|fork|exec[lv]\w*|dlopen|dlsym|socket|mmap|mprotect|ptrace|syscall|signal|raise|"
    r"abort|exit|_exit|fopen|open|read|write|getenv|setenv|thread_local|__thread|_mm_setcsr|_MM_SET_\w+|"
    r"__builtin_ia32_ldmxcsr|__builtin_(?:return|frame)_address|__builtin_thread_pointer|__builtin_(?:set|long)jmp|"
    r"__builtin_apply\w*|omp_set_\w+|constructor|destructor|ifunc|target_clones|__has_include\w*|__has_embed)\b"
)
"""Words that no kernel needs: the system, assembler, the processor's rounding modes (which would stay switched for the
whole process), the caller's stack, how many threads others may have, code that runs at load."""
DIRECTIVES = re.compile(r"(include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error)\b")
PRAGMAS = re.compile(
    r"(omp\b(?!.*\b(declare\s+target|target|requires|threadprivate)\b)|"
    r"GCC\s+(optimize|target|push_options|pop_options|reset_options|unroll|ivdep|diagnostic)\b)"
)
ATTRIBUTES = {
    "always_inline", "noinline", "cold", "hot", "noipa", "noclone", "flatten", "artificial", "const", "pure", "nothrow",
    "vector_size", "aligned", "packed", "may_alias", "unused", "optimize", "target", "assume_aligned", "maybe_unused",
    "nodiscard", "noreturn", "likely", "unlikely", "assume", "fallthrough", "no_unique_address", "optnone", "malloc",
    "no_sanitize", "internal_linkage", "warn_unused_result", "gnu_inline", "leaf", "nonnull",
}  # fmt: skip
MATH = (
    "exp|exp2|expm1|log|log1p|log2|log10|sqrt|rsqrt|pow|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|acosh|atanh|"
    "erf|erfc|lgamma|tgamma|ceil|floor|round|roundeven|rint|nearbyint|trunc|fmod|remainder|fmax|fmin|fabs|fma|ldexp|frexp|"
    "hypot|cbrt|copysign|lrint|llrint|lround|llround|scalbn|ilogb|logb|nextafter|modf|sincos|fdim"
)
ALLOWED = re.compile(
    r"^(GOMP_(parallel|barrier|critical|atomic|loop|single|sections|ordered|task|cancel|reduction)\w*|"
    r"omp_(get_\w+|in_parallel)|mem(cpy|set|move|cmp|chr)|malloc|free|calloc|realloc|aligned_alloc|posix_memalign|"
    rf"strlen|({MATH})[fl]?|__gxx_personality_v0|_Unwind_Resume|__stack_chk_fail|__cxa_(begin_catch|end_catch|"
    r"throw_bad_array_new_length|call_terminate)|_GLOBAL_OFFSET_TABLE_|__gmon_start__|_ITM_\w+|"
    r"_Zn[wa]m\w*|_Zd[la]Pv\w*|_ZSt9terminatev|_ZSt\d+__throw_\w+|__(extend|trunc)[hsd]f[hsd]f2|__(eq|ne)hf2)(@.*)?$"
)
"""What an object may expect of others: OpenMP's loops, libm, memory, and what g++ puts in by itself."""
CODE = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<raw>\b(?:u8|[uUL])?R\")|(?P<text>(?:u8|[uUL])?\"(?:\\.|[^\"\\\n])*\")|"
    r"(?P<mark>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')|(?P<number>\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*)|(?P<word>[A-Za-z_]\w*)",
    re.S,
)
"""One token of C++, as far as it matters for what is text and what is code."""
READS = ("from_file", "_print", "record_stream", "set_data", "_assert_async", "_assert_tensor_metadata")
"""Library calls that touch more than tensors."""


def problem_of(candidate: Candidate) -> str:
    """Empty, or why this source is refused, with its line."""
    calls = library_problem(candidate.plan)
    if calls:
        return calls
    if candidate.language == "aten":
        return "" if not candidate.source.strip() else "line 1: library calls carry no source"
    if candidate.language == "triton":
        checked = check(candidate.source)
        return checked.problem
    if candidate.language == "cpp":
        return _cpp_text(candidate.source)
    return ""


def _cpp_text(source: str) -> str:
    # A compiler joins lines that end in a backslash before it looks for words; so do we, keeping the count of lines.
    joined = re.sub(r"((?:[^\n]*\\[ \t]*\n)+)([^\n]*)", _join, source)
    for number, (line, texts) in enumerate(_lines(joined), 1):
        problem = _line_problem(line, texts)
        if problem:
            return f"line {number}: {problem}"
    return ""


def _line_problem(line: str, texts: list[str]) -> str:
    """`line`: without comments, string literals emptied; `texts`: those literals."""
    if re.search(r"##|%:|\?\?[=/]|\\[uUN]|\bRAW\b", line):
        return "pasted tokens, raw strings and character codes are not allowed"
    directive = re.match(r"\s*#\s*(\w*)\s*(.*)", line)
    if directive and directive[1]:
        problem = _directive_problem(directive[1], directive[2], texts)
        if problem:
            return problem
    for pragma in re.finditer(r"\b_Pragma\b\s*(\(\s*\"\"\s*\))?", line):
        if not pragma[1] or not all(PRAGMAS.match(text.strip('"').strip()) for text in texts):
            return "this _Pragma is not allowed"
    bad = [name for name in _attributes(line) if name not in ATTRIBUTES]
    if bad:
        return f"attribute {bad[0]} is not allowed"
    word = WORDS.search(re.sub(r"(#\s*pragma\s+omp\s+atomic\s+)(?:read|write)\b", r"\1", line))
    return f"{word[1]} is not allowed" if word else ""


def _directive_problem(name: str, rest: str, texts: list[str]) -> str:
    if not DIRECTIVES.fullmatch(name):
        return f"#{name} is not allowed"
    if name == "include":
        header = re.match(r"<\s*([^>]+?)\s*>", rest) or (re.match(r'"([^"]*)"', texts[0]) if texts else None)
        if header is None:
            return "this #include is not allowed"
        return "" if header[1] in HEADERS else f"#include of {header[1]} is not allowed"
    if name == "pragma" and not PRAGMAS.match(rest):
        return f"#pragma {rest[:40].strip()} is not allowed"
    return ""


def _attributes(line: str) -> list[str]:
    """Names of the attributes in a line; an opening that holds none readable counts as one."""
    out: list[str] = []
    for match in re.finditer(r"\b__attribute(?:__)?\b(\s*\(\s*\()?|\[\s*\[", line):
        if match[0].startswith("_") and not match[1]:
            out.append("without (( beside it")
            continue
        depth, start, rest = 2, 0, line[match.end() :]
        for place, sign in enumerate(rest):
            depth += (sign in "([") - (sign in ")]")
            if (sign == "," and depth == 2) or depth < 2:
                out.append(rest[start:place])
                start = place + 1
            if depth < 2:
                break
        else:
            out.append("that ends on another line")
    bare = [
        re.sub(r"\s|^(using\s+gnu\s*:|gnu\s*::)", "", re.sub(r"\(.*", "", each.strip(), flags=re.S)) for each in out
    ]
    return [name.strip("_") if name.startswith("__") else name for name in bare if name]


def _lines(source: str) -> list[tuple[str, list[str]]]:
    """Each line's code, comments and the insides of literals left out, and the string literals that stood in it."""
    out: list[tuple[str, list[str]]] = [("", [])]
    place = 0

    def add(text: str) -> None:
        first, *more = text.split("\n")
        out[-1] = (out[-1][0] + first, out[-1][1])
        out.extend((line, []) for line in more)

    for match in CODE.finditer(source):
        add(source[place : match.start()])
        place = match.end()
        if match["comment"]:
            add(" " + "\n" * match[0].count("\n"))
        elif match["text"]:
            out[-1][1].append(match[0])
            add('""')
        elif match["raw"]:
            add(" RAW ")
        else:
            add("''" if match["mark"] else match[0])
    add(source[place:])
    return out


def _join(match: re.Match[str]) -> str:
    return re.sub(r"\\[ \t]*\n", "", match[0]) + "\n" * match[0].count("\n")


def object_problem(artifact: Path, source: str = "") -> str:
    """What a compiled object file has that a kernel must not: foreign calls, code that runs by itself, kept state.

    With the `source` the refusal names the line where the symbol stands.
    """
    try:
        blob = artifact.read_bytes()
    except OSError as error:
        return f"the compiled object cannot be read ({error.strerror})"
    if not blob.startswith(b"\x7fELF"):
        return _with_nm(artifact)
    try:
        foreign = [name for name in undefined(blob) if not ALLOWED.match(name)]
        taken = [name for name in exported(blob) if ALLOWED.match(name) or name.startswith("clock_")]
        starts, keeps = start_code(blob), writable(blob)
    except ValueError as error:
        return f"the compiled object cannot be read ({error})"
    if starts:
        return f"{_line_of(starts, source)}the object has code that runs when it is loaded ({starts})"
    if keeps:
        where = _line_of(keeps, source)
        return f"{where}the object keeps state between calls ({keeps}); use const or local variables"
    if foreign:
        return f"{_line_of(foreign[0], source)}the object needs {foreign[0]}, which is not allowed"
    if taken:
        return f"{_line_of(taken[0], source)}the object defines {taken[0]}, which is the library's name"
    return ""


def _line_of(symbol: str, source: str) -> str:
    """`line N: ` where a symbol's name first stands in the source, as far as it can be told; else empty."""
    parts = [symbol]
    for match in re.finditer(r"\d+", symbol):  # a mangled name holds its parts with their lengths before them
        parts.append(symbol[match.end() : match.end() + int(match[0])])
    for part in reversed(parts):
        if re.fullmatch(r"[A-Za-z_]\w*", part):
            for number, line in enumerate(source.splitlines(), 1):
                if re.search(rf"\b{part}\b", line):
                    return f"line {number}: "
    return ""


def _with_nm(artifact: Path) -> str:
    """The same for objects that are no ELF files, as far as `nm` tells."""
    if shutil.which("nm") is None:
        return "the compiled object cannot be inspected here; install nm (binutils)"
    done = subprocess.run(["nm", str(artifact)], capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) > 1]
    if done.returncode != 0 or not rows:
        return "the compiled object cannot be read"
    foreign = [row[-1] for row in rows if row[-2] == "U" and not ALLOWED.match(row[-1].removeprefix("_"))]
    starts = [row[-1] for row in rows if row[-1].startswith(("__GLOBAL__", "__mod_init"))]
    keeps = [row[-1] for row in rows if row[-2] in "dDbBCS"]
    if foreign:
        return f"the object needs {foreign[0]}, which is not allowed"
    if starts:
        return f"the object has code that runs when it is loaded ({starts[0]})"
    return f"the object keeps state between calls ({keeps[0]})" if keeps else ""


def library_problem(plan: LaunchPlan) -> str:
    """Empty, or which library call of a plan does more than compute tensors from tensors."""
    for number, step in enumerate(plan.flat):
        if not isinstance(step, Aten):
            continue
        try:
            schema = operator(step.target)._schema
        except (PlanError, ValueError, AttributeError) as error:
            return f"step {number}: {step.target} is no library operator ({error})"
        name = step.target.split(".")[1]
        if name in READS:
            return f"step {number}: {step.target} is not allowed"
        if schema.is_mutable:
            return f"step {number}: {step.target} changes its arguments"
        if not all("Tensor" in str(out.type) for out in schema.returns):
            return f"step {number}: {step.target} returns no tensor"
    return ""


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
