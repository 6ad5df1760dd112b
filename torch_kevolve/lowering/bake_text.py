"""Bake text: a plan's C++ launches as one function.

The verified source goes in as it is; what is added is an entry that evaluates sizes, makes scratch and calls the
kernels in order, as a replay of the plan would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_kevolve.errors import PlanError
from torch_kevolve.plan import Buffer, PlanArg, Run, Tensor
from torch_kevolve.sizes import Json, Size, encode, numel
from torch_kevolve.task import DTYPE_BYTES

# noipa: the entry knows sizes that the search build did not; inlined, gcc would specialise the loops on them and sum
# in another order, so the baked kernel would no longer be bit-equal to the one that was judged.
_MARK = "#if defined(__GNUC__) && !defined(__clang__)\n#define KEVOLVE_APART __attribute__((noipa))\n#else\n" \
        "#define KEVOLVE_APART __attribute__((noinline))\n#endif\n"  # fmt: skip

_ANY = "#ifndef KEVOLVE_ANY\n#define KEVOLVE_ANY\nnamespace kevolve {\nstruct any { const void* p; " \
       "template <class T> operator T*() const { return (T*)p; } };\n}\n#endif"  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """`runs` and scratch `buffers` of one group of launches. The entry's parameters: `reads`, `writes`, `symbols`."""

    source: str
    runs: tuple[Run, ...]
    scratch: tuple[Buffer, ...]
    reads: tuple[str, ...]
    writes: tuple[Buffer, ...]
    symbols: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        """Carries the content hash: a changed body never meets an old name."""
        return f"kevolve_{self.key[:24]}"

    @property
    def arg_types(self) -> list[str]:
        return ["const void*"] * len(self.reads) + ["void*"] * len(self.writes) + ["int64_t"] * len(self.symbols)

    def text(self, entry: str, shared: bool) -> str:
        """The translation unit, or, if it is `shared` with other kernels, a part that defines nothing else globally."""
        body = self._body(shared)
        return f"// {self.key}\n{_MARK}{body}\n{_ANY}\n{self.declaration(entry)} {{\n{self._calls(shared)}}}\n"

    def declaration(self, entry: str) -> str:
        names = [f"in_{i}" for i in range(len(self.reads))] + [f"out_{i}" for i in range(len(self.writes))]
        words = [f"{kind} {name}" for kind, name in zip(self.arg_types, [*names, *self.symbols], strict=True)]
        return f'extern "C" void {entry}({", ".join(words)})'

    def _body(self, shared: bool) -> str:
        source = self.source
        for name in dict.fromkeys(run.kernel for run in self.runs):
            found, count = re.subn(
                rf'extern\s+"C"\s+void\s+{name}\b', f"{_linkage(shared)}void {self._apart(name)}", source
            )
            if count == 0:
                raise PlanError(detail=f'the source defines no extern "C" void {name}')
            source = found
        if not shared:
            return source
        lines = source.splitlines()
        head = [line for line in lines if re.match(r"\s*#\s*include\b", line)]
        rest = [line for line in lines if not re.match(r"\s*#\s*include\b", line)]
        inner = "\n".join(rest)
        return "\n".join([*head, "#pragma GCC push_options", f"namespace {self.name}_body {{", inner, "}",
                          "#pragma GCC pop_options"])  # fmt: skip

    def _apart(self, name: str) -> str:
        # Inductor calls its own entry `kernel`.
        return f"{name}_kevolve" if name == "kernel" else name

    def _calls(self, shared: bool) -> str:
        prefix = f"{self.name}_body::" if shared else ""
        lines: list[str] = []
        place = {name: f"in_{i}" for i, name in enumerate(self.reads)}
        place.update({buffer.name: f"out_{i}" for i, buffer in enumerate(self.writes)})
        for buffer in self.scratch:
            size = f"(({cpp_size(encode(_span(buffer)))}) * {DTYPE_BYTES[buffer.dtype]} + 64)"
            lines.append(f"  struct Free_{buffer.name} {{ void* p; ~Free_{buffer.name}() {{ __builtin_free(p); }} }};")
            lines.append(f"  void* raw_{buffer.name} = __builtin_malloc({size});")
            lines.append(f"  Free_{buffer.name} free_{buffer.name}{{raw_{buffer.name}}};")
            lines.append(f"  void* {buffer.name} = (void*)(((uintptr_t)raw_{buffer.name} + 63) & ~(uintptr_t)63);")
            place[buffer.name] = buffer.name
        for buffer in (*self.writes, *self.scratch):
            if buffer.fill is not None:
                size = f"({cpp_size(encode(_span(buffer)))}) * {DTYPE_BYTES[buffer.dtype]}"
                if buffer.fill != 0:
                    raise PlanError(detail=f"buffer {buffer.name} is filled with {buffer.fill}; only zeros are baked")
                lines.append(f"  __builtin_memset({place[buffer.name]}, 0, {size});")
        for run in self.runs:
            args = ", ".join(_argument(arg, place) for arg in run.args)
            lines.append(f"  if ({_condition(run)}) {prefix}{self._apart(run.kernel)}({args});")
        return "\n".join(lines) + "\n"


def _linkage(shared: bool) -> str:
    return "KEVOLVE_APART static " if shared else 'extern "C" KEVOLVE_APART '


def _span(buffer: Buffer) -> Size:
    """Elements from the first to the last one that the strides reach; exact for dense tensors."""
    if all(isinstance(s, int) for s in (*buffer.shape, *buffer.strides)):
        if any(s == 0 for s in buffer.shape):
            return 0
        return 1 + sum((s - 1) * t for s, t in zip(buffer.shape, buffer.strides, strict=True))  # type: ignore[operator, misc]
    return numel(buffer.shape)


def _condition(run: Run) -> str:
    """Launch unless the grid or every tensor is empty."""
    grid = [f"({cpp_size(encode(size))}) > 0" for size in run.grid if size != 1]
    counts = [numel(arg.shape) for arg in run.args if isinstance(arg, Tensor)]
    if not any(isinstance(count, int) and count > 0 for count in counts) and counts:
        grid.append("(" + " || ".join(f"({cpp_size(encode(count))}) > 0" for count in counts) + ")")
    return " && ".join(grid) or "true"


def _argument(arg: PlanArg, place: dict[str, str]) -> str:
    if isinstance(arg, Tensor):
        return f"kevolve::any{{{place[arg.name]}}}"
    if isinstance(arg, bool):
        return "1" if arg else "0"
    if isinstance(arg, float):
        if arg != arg or arg in (float("inf"), float("-inf")):
            return '__builtin_nan("")' if arg != arg else f"{'-' if arg < 0 else ''}__builtin_inf()"
        return f"(double){arg.hex()}"
    if arg is None or isinstance(arg, str | tuple) or not hasattr(arg, "__int__"):
        raise PlanError(detail=f"{arg!r} cannot be an argument of a C++ kernel")
    return f"(int64_t)({cpp_size(encode(arg))})"  # type: ignore[arg-type]


def cpp_size(tree: Json) -> str:
    """A size's JSON tree as a C++ expression of int64_t. All sizes are positive, so / rounds down."""
    if isinstance(tree, int):
        return f"{tree}LL"
    if isinstance(tree, str):
        return tree
    mark, *rest = tree
    args = [cpp_size(each) for each in rest]
    if mark in ("+", "*"):
        return "(" + f" {mark} ".join(args) + ")"
    if mark in ("//", "%"):
        return f"({args[0]} {mark[0]} {args[1]})"
    if mark == "mod":
        return f"(({args[0]} / {args[1]}) % {args[2]})"
    if mark == "ceil":
        return f"(({args[0]} + {args[1]} - 1) / {args[1]})"
    if mark == "^" and isinstance(rest[1], int) and 0 < rest[1] < 8:
        return "(" + " * ".join([args[0]] * rest[1]) + ")"
    if mark in ("min", "max"):
        return _fold(args, "<" if mark == "min" else ">")
    raise PlanError(detail=f"size operator {mark!r} has no C++ form")


def _fold(args: Sequence[str], sign: str) -> str:
    out = args[0]
    for arg in args[1:]:
        out = f"(({out}) {sign} ({arg}) ? ({out}) : ({arg}))"
    return out
