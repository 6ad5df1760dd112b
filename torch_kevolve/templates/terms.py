"""Terms: values as text, their dtypes and casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch_kevolve.templates.dialects import ROUND, constant

Number: TypeAlias = "int | float | bool"
LANGUAGES = ("cpp", "triton")
HELD_FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Term:
    """A value: `text` is an atom (a name or a literal), `dtype` ATen's name for it; `number` where it is a literal."""

    text: str
    dtype: str
    number: Number | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)


class Unprintable(Exception):
    """Inside the printer: there is no text."""


def kind_of(dtype: str) -> str:
    """`float`, `int`, `mask`, or empty for a dtype that is not printed."""
    if dtype in HELD_FLOATS:
        return "float"
    return "mask" if dtype == "bool" else "int" if dtype in INTS else ""


def cast(term: Term, dtype: str, language: str, rounded: bool = False) -> Term:
    """The term as another dtype. Float to float is free unless `rounded`. Raises ValueError where it has no text."""
    try:
        return cast_term(term, dtype, language, rounded)
    except Unprintable:
        raise ValueError(f"no cast from {term.dtype} to {dtype}") from None


def literal(value: Number, dtype: str, language: str) -> Term:
    """A constant of a dtype, rounded to it."""
    kind = kind_of(dtype)
    number: Number = bool(value) if kind == "mask" else int(value) if kind == "int" else _rounded(float(value), dtype)
    return Term(constant(number, kind, language), dtype, number)


def _rounded(value: float, dtype: str) -> float:
    if dtype not in ("bfloat16", "float16"):
        return value
    import torch

    return float(torch.tensor(value, dtype=getattr(torch, dtype)).item())


def cast_term(term: Term, dtype: str, language: str, rounded: bool = False) -> Term:
    want, have = kind_of(dtype), term.kind
    if not want or not have:
        raise Unprintable
    if term.number is not None:
        return literal(term.number, dtype, language)
    text = term.text
    cpp = language == "cpp"
    if want == have == "float":
        if rounded and dtype in ROUND:
            return Term(ROUND[dtype][not cpp].format(text), dtype)
        return Term(text, dtype)
    if want == have and (dtype == term.dtype):
        return Term(text, dtype)
    if want == "mask":
        return Term(f"kv::ne({text}, {text} - {text})" if cpp else f"{text} != 0", dtype)
    if cpp:
        return Term(f"kv::to_{want}({text})", dtype)
    return Term(f"{text}.to(tl.{'float32' if want == 'float' else dtype})", dtype)


def is_call(text: str) -> bool:
    if not text.endswith(")") or "(" not in text:
        return False
    head = text[: text.index("(")]
    if head and not all(part.isidentifier() for part in head.replace("::", ".").split(".")):
        return False
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and char == ")":
            return place == len(text) - 1
    return False
