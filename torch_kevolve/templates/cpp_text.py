"""C++ text: sizes, types and value statements shared by all C++ families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod

from torch_kevolve.sizes import Size, free_symbols
from torch_kevolve.task import Op, Ref, TensorSpec
from torch_kevolve.templates.expr import Term, express, kind_of
from torch_kevolve.templates.prelude import TYPES


class Unwritable(Exception):
    """Inside a writer: a value has no C++ text, so the family makes no claim."""


def size_text(size: Size) -> str:
    """A size as an int64_t expression over arguments that carry the symbols' names."""
    if isinstance(size, int):
        return f"INT64_C({size})" if abs(size) > 2**31 else str(size)
    if size.is_Integer:
        return size_text(int(size))
    if size.is_Symbol:
        return str(size.name)
    args = [f"({size_text(arg)})" for arg in size.args]
    if isinstance(size, sympy.Add):
        return " + ".join(args)
    if isinstance(size, sympy.Mul):
        return " * ".join(args)
    if isinstance(size, sympy.Pow) and size.args[1].is_Integer and int(size.args[1]) > 0:
        return " * ".join([args[0]] * int(size.args[1]))
    if isinstance(size, FloorDiv):
        return f"{args[0]} / {args[1]}"
    if isinstance(size, CeilDiv):
        return f"({args[0]} + {args[1]} - 1) / {args[1]}"
    if isinstance(size, Mod):
        return f"{args[0]} % {args[1]}"
    raise ValueError(f"no C++ text for size {size}")


def symbols_of(sizes: Iterable[Size]) -> list[str]:
    """Names of the symbols in sizes, in order: further int64_t arguments of a kernel."""
    return sorted(free_symbols(sizes))


def pointer(spec: TensorSpec, name: str, const: bool = False) -> str:
    return f"{'const ' if const else ''}{TYPES[spec.dtype]}* __restrict__ {name}"


def held(dtype: str) -> str:
    """The vector type that a value of this dtype is held in."""
    return {"float": "kv::vf", "int": "kv::vi", "mask": "kv::vm"}[kind_of(dtype)]


def statement(op: Op, number: int, read: Callable[[Ref], Term]) -> str | None:
    """`const kv::vf v7 = ...;` for a pointwise operator; None where the printer has no text."""
    term = express(op, read, "cpp")
    if term is None:
        return None
    return f"const {held(op.outs[0].dtype)} v{number} = {term.text};"


def signature(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], extra: Sequence[str]) -> str:
    """`extern "C" void NAME(inputs, outputs, extra)`: the order in which the plan passes arguments."""
    words = [pointer(spec, f"x{i}", const=True) for i, spec in enumerate(inputs)]
    words += [pointer(spec, f"y{i}") for i, spec in enumerate(outputs)]
    return f'extern "C" void {name}({", ".join([*words, *extra])})'
