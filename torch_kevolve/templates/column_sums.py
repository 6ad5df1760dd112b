"""Column sums: accumulators of reductions with one lane per column.

Float sums are kept in float for BLOCK elements and then flushed to double; integers and flags stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_kevolve.templates.cpp_text import held
from torch_kevolve.templates.expr import kind_of
from torch_kevolve.templates.rows import Reduce


@dataclass(frozen=True)
class Part:
    """What one walk adds up for a reduction. `last`: the result is there after it."""

    reduce: Reduce
    kind: str
    last: bool

    @property
    def sums(self) -> bool:
        return self.kind in ("sum", "mean", "centre", "spread")


def parts_of(reduce: Reduce) -> list[Part]:
    """A variance takes two walks, as the sum of squares alone loses what is small beside the mean."""
    if reduce.kind in ("var", "var_mean"):
        return [Part(reduce, "centre", False), Part(reduce, "spread", True)]
    return [Part(reduce, reduce.kind, True)]


def start(part: Part, dtype: str, u: int) -> list[str]:
    """Declarations. `a3` are the running values, `d3` the sums in double, `b3` the places of the best."""
    name, kind = part.reduce.op, kind_of(dtype)
    if part.kind in ("any", "all"):
        return _fill("kv::vm", f"a{name}", u, f"kv::vm::{'none' if part.kind == 'any' else 'all'}()")
    if part.sums and kind != "float":
        return _fill("kv::vi", f"a{name}", u, "kv::vi((int64_t)0)")
    if part.sums and part.kind == "spread":
        return [f"for (int u = 0; u < {u}; u++) {{ a{name}[u] = kv::vf(0.0f); d{name}[u] = kv::dv{{}}; }}"]
    if part.sums:
        return _fill("kv::vf", f"a{name}", u, "kv::vf(0.0f)") + _fill("kv::dv", f"d{name}", u, "kv::dv{}")
    if part.kind == "prod":
        return _fill("kv::vf", f"a{name}", u, "kv::vf(1.0f)")
    low = part.kind in ("max", "argmax")
    lines = _fill("kv::vf", f"a{name}", u, f"kv::splat({'-' if low else ''}__builtin_inff())")
    return lines + (_fill("kv::iv", f"b{name}", u, "kv::iv{}") if part.kind.startswith("arg") else [])


def step(part: Part, dtype: str, value: str, axis: int) -> tuple[list[str], list[str]]:
    """Statements for one vector, and those that flush."""
    name, kind = part.reduce.op, kind_of(dtype)
    acc = f"a{name}[u]"
    if part.kind in ("any", "all"):
        flag = (
            value
            if kind == "mask"
            else f"kv::ne({value}, {'kv::vf(0.0f)' if kind == 'float' else 'kv::vi((int64_t)0)'})"
        )
        return [f"{acc} = kv::{'or_' if part.kind == 'any' else 'and_'}({acc}, {flag});"], []
    if part.sums and kind != "float":
        return [f"{acc} = {acc} + kv::to_int({value});"], []
    if part.sums:
        flush = [f"d{name}[u] += kv::wide({acc}); {acc} = kv::vf(0.0f);"]
        if part.kind == "spread":
            return [f"{{ const kv::vf away = {value} - m{name}[u]; {acc} = {acc} + away * away; }}"], flush
        return [f"{acc} = {acc} + {value};"], flush
    if part.kind == "prod":
        return [f"{acc} = {acc} * {value};"], []
    if part.kind in ("max", "min"):
        return [f"{acc} = kv::{part.kind}_nan({acc}, {value});"], []
    # The first place of the best; NaN is best, as in eager. Place 0 stands when nothing beats the start value.
    better = "gt" if part.kind == "argmax" else "lt"
    mask = f"kv::or_(kv::{better}({value}, {acc}), kv::and_(kv::ne({value}, {value}), kv::eq({acc}, {acc})))"
    place = f"b{name}[u] = k.v ? kv::iv{{}} + (int32_t)c{axis} : b{name}[u];"
    return [f"{{ const kv::vm k = {mask}; {acc} = kv::select(k, {value}, {acc}); {place} }}"], []


def held_by(part: Part, dtype: str) -> list[tuple[str, str]]:
    """(type, name) of the running values that a walk over a piece of the rows leaves."""
    name, kind = part.reduce.op, kind_of(dtype)
    if part.kind in ("any", "all"):
        return [("kv::vm", f"a{name}")]
    if part.sums:
        return [("kv::dv", f"d{name}")] if kind == "float" else [("kv::vi", f"a{name}")]
    return [("kv::vf", f"a{name}"), *([("kv::iv", f"b{name}")] if part.kind.startswith("arg") else [])]


def join(part: Part, dtype: str, piece: str) -> list[str]:
    """Statements that take the values of the next piece, `a3_all[piece]` and so on, into the running ones."""
    name = part.reduce.op
    kept, *places = [f"{each}_all[{piece}]" for _, each in held_by(part, dtype)]
    if part.sums:
        into = held_by(part, dtype)[0][1]
        return [f"{into}[u] = {into}[u] + {kept};"]
    if places:  # pieces come in order, so of equals the first stands
        better = "gt" if part.kind == "argmax" else "lt"
        worse = f"kv::and_(kv::ne({kept}, {kept}), kv::eq(a{name}[u], a{name}[u]))"
        return [
            f"{{ const kv::vm k = kv::or_(kv::{better}({kept}, a{name}[u]), {worse});",
            f"a{name}[u] = kv::select(k, {kept}, a{name}[u]); b{name}[u] = k.v ? {places[0]} : b{name}[u]; }}",
        ]
    calls = {"any": "kv::or_({}, {})", "all": "kv::and_({}, {})", "prod": "{} * {}"}
    call = calls.get(part.kind, f"kv::{part.kind}_nan({{}}, {{}})").format(f"a{name}[u]", kept)
    return [f"a{name}[u] = {call};"]


def finish(part: Part, dtype: str, result: str, out: str, u: int, count: str) -> list[str]:
    """The result as `result[u]`; of the first walk of a variance the mean `m3[u]`."""
    reduce = part.reduce
    name = reduce.op
    loop = f"for (int u = 0; u < {u}; u++)"
    if part.kind == "centre":
        return [
            f"kv::vf m{name}[{u}];",
            f"{loop} m{name}[u] = kv::vf(__builtin_convertvector(d{name}[u] / (double)({count}), kv::fv));",
        ]
    if part.kind == "spread":
        free = f"((double)({count}) - {reduce.correction})"
        value = f"kv::vf(__builtin_convertvector(d{name}[u] / ({free} > 0 ? {free} : 0.0), kv::fv))"
        twice = [f"const auto& {result}_1 = m{name}; (void){result}_1;"] if reduce.kind == "var_mean" else []
        return [f"{held(out)} {result}[{u}];", f"{loop} {result}[u] = {value};", *twice]
    if part.kind.startswith("arg"):
        value = f"kv::vi(__builtin_convertvector(b{name}[u], kv::lv))"
    elif part.sums and kind_of(dtype) == "float":
        total = f"d{name}[u] / (double)({count})" if part.kind == "mean" else f"d{name}[u]"
        value = f"kv::vf(__builtin_convertvector({total}, kv::fv))"
    else:
        value = f"a{name}[u]"
        if part.sums and kind_of(out) == "float":
            value = f"kv::to_float({value})"
    return [f"{held(out)} {result}[{u}];", f"{loop} {result}[u] = {value};"]


def _fill(kind: str, name: str, u: int, value: str) -> list[str]:
    return [f"{kind} {name}[{u}];", f"for (int u = 0; u < {u}; u++) {name}[u] = {value};"]
