"""Expr: ATen pointwise operators as text.

One printer for the languages "cpp" and "triton". A value is a `Term`: an atom of text and the dtype that ATen gives
it. fp16 and bf16 are held in fp32 between operators (an operator's own rounding to half is left out, as Inductor
does; a cast that the program wrote rounds), integers in their own width, bool as a mask.
float64 and complex are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch_kevolve.task import Arg, DType, Op, Ref, TaskGraph
from torch_kevolve.templates.dialects import COMPARE, FLOAT_OPS, INT_OPS, MASK_OPS, SELECT, TESTS, constant
from torch_kevolve.templates.terms import (
    HELD_FLOATS,
    INTS,
    LANGUAGES,
    Number,
    Term,
    Unprintable,
    cast,
    cast_term,
    is_call,
    kind_of,
    literal,
)

__all__ = [
    "HELD_FLOATS",
    "INTS",
    "LANGUAGES",
    "Number",
    "Term",
    "cast",
    "express",
    "is_pointwise",
    "kind_of",
    "literal",
]

Read: TypeAlias = Callable[[Ref], Term]


_SAME = {  # operators whose operands and result share one kind; the name of the row
    "neg": "neg", "abs": "abs", "add": "add", "sub": "sub", "mul": "mul", "exp2": "exp2",
    "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "square": "square", "sigmoid": "sigmoid", "silu": "silu", "tanh": "tanh", "erf": "erf",
    "relu": "relu", "hardswish": "hardswish", "hardsigmoid": "hardsigmoid", "sin": "sin", "cos": "cos",
    "floor": "floor", "ceil": "ceil", "trunc": "trunc", "sign": "sign", "sgn": "sign", "maximum": "maximum",
    "minimum": "minimum", "fmod": "fmod", "remainder": "remainder", "bitwise_and": "bitwise_and",
    "clamp_min": "maximum", "clamp_max": "minimum", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "bitwise_not": "bitwise_not",
    "threshold_backward": "threshold_backward", "floor_divide": "div_floor",
}  # fmt: skip
_COPIES = ("clone", "alias", "detach", "lift_fresh_copy", "contiguous")
_CASTS = ("convert_element_type", "_to_copy", "to")
_FILLS = ("full", "full_like", "scalar_tensor", "zeros", "ones", "zeros_like", "ones_like", "empty_like")


def is_pointwise(target: str) -> bool:
    """Whether `express` knows the operator (some of its arguments may still be refused)."""
    name = _name(target)
    return name in _SAME or name in _SPECIAL or name in COMPARE or name in TESTS


def express(op: Op, read: Read, language: str, graph: TaskGraph | None = None) -> Term | None:
    """The operator as an expression over its operands' terms; None where there is no text for it.

    `read` gives the term of a tensor operand, broadcast already. The result's text is an expression, not an atom:
    bind it to a name (or bracket it) before it is an operand itself. `graph`: what the operator stands in, if what
    stands before it may choose its text.
    """
    try:
        return _Printer(op, read, language, graph).term()
    except Unprintable:
        return None


def _name(target: str) -> str:
    return target.split(".")[1]


class _Printer:
    def __init__(self, op: Op, read: Read, language: str, graph: TaskGraph | None) -> None:
        self.op, self.read, self.language, self.graph = op, read, language, graph
        self.name, self.kwargs = _name(op.target), dict(op.kwargs)
        self.out = op.outs[0].dtype
        self.column = LANGUAGES.index(language)

    def term(self) -> Term:
        if len(self.op.outs) != 1 or not kind_of(self.out):
            raise Unprintable
        special = _SPECIAL.get(self.name)
        if special is not None:
            return special(self)
        if self.name in COMPARE:
            return Term(self.fill(COMPARE, self.name, self.common(self.arg(0), self.arg(1))), "bool")
        if self.name in TESTS:
            value = self.arg(0)
            if value.kind != "float":
                return literal(False, "bool", self.language)
            return Term(self.fill(TESTS, self.name, (self.atom(value),)), "bool")
        if self.name not in _SAME:
            raise Unprintable
        return self.row(_SAME[self.name], *self.same())

    def same(self) -> list[Term]:
        """All operands, as the result's dtype; `alpha` multiplies the last."""
        terms = [self.to(self.arg(i), self.out) for i in range(len(self.op.args))]
        alpha = self.kwargs.get("alpha", 1)
        if alpha != 1:
            terms[-1] = self.row("mul", terms[-1], self.to(self.scalar(alpha), self.out))
        return terms

    def row(self, name: str, *terms: Term) -> Term:
        table = {"float": FLOAT_OPS, "int": INT_OPS, "mask": MASK_OPS}[kind_of(self.out)]
        return Term(self.fill(table, name, terms), self.out)

    def fill(self, table: dict[str, tuple[str, str]], name: str, terms: tuple[Term, ...]) -> str:
        if name not in table:
            raise Unprintable
        return table[name][self.column].format(*(self.atom(t).text for t in terms))

    def arg(self, place: int) -> Term:
        if place >= len(self.op.args):
            raise Unprintable
        value = self.op.args[place]
        return self.read(value) if isinstance(value, Ref) else self.scalar(value)

    def scalar(self, value: Arg) -> Term:
        if isinstance(value, bool):
            return literal(value, "bool", self.language)
        if isinstance(value, int):
            return literal(value, "int64", self.language)
        if isinstance(value, float):
            return literal(value, "float32", self.language)
        raise Unprintable

    def to(self, term: Term, dtype: str) -> Term:
        # Scalars meet half tensors unrounded: arithmetic is in fp32, as eager's.
        if term.number is not None and kind_of(dtype) == "float":
            return Term(constant(float(term.number), "float", self.language), dtype, float(term.number))
        return self.atom(cast_term(self.atom(term), dtype, self.language))

    def atom(self, term: Term) -> Term:
        plain = term.number is not None or term.text.isidentifier() or is_call(term.text)
        return term if plain else Term(f"({term.text})", term.dtype)

    def common(self, a: Term, b: Term) -> tuple[Term, Term]:
        """Two operands of a comparison in one dtype; a scalar takes the tensor's unless it outranks it."""
        ranks = {"mask": 0, "int": 1, "float": 2}
        if not a.kind or not b.kind:
            raise Unprintable
        for one, other in ((a, b), (b, a)):
            if one.number is not None and other.number is None and ranks[one.kind] <= ranks[other.kind]:
                made = literal(one.number, other.dtype, self.language)
                return (a, made) if other is a else (made, b)
        if a.kind != b.kind:
            dtype = max((a, b), key=lambda t: ranks[t.kind]).dtype
            return self.to(a, dtype), self.to(b, dtype)
        if a.kind == "int" and a.dtype != b.dtype:
            wide = max(a.dtype, b.dtype, key=lambda d: (int("".join(filter(str.isdigit, d))), d))
            return self.to(a, wide), self.to(b, wide)
        return a, b


def _div(p: _Printer) -> Term:
    mode = p.kwargs.get("rounding_mode", p.op.args[2] if len(p.op.args) > 2 else None)
    names = {None: "div", "trunc": "div_trunc", "floor": "div_floor"}
    if mode not in names:
        raise Unprintable
    name = "div_rough" if mode is None and _by_exponential(p) else names[mode]
    return p.row(name, p.to(p.arg(0), p.out), p.to(p.arg(1), p.out))


def _exp(p: _Printer) -> Term:
    users = [op for op in p.graph.ops for ref in op.refs() if _maker(p, ref) is p.op] if p.graph is not None else []
    outs = p.graph.outputs if p.graph is not None else ()
    inside = users and all(map(_adds_one, users)) and all(_maker(p, ref) is not p.op for ref in outs)
    return p.row("exp_of_sigmoid" if inside else "exp", p.to(p.arg(0), p.out))


def _by_exponential(p: _Printer) -> bool:
    """Whether the divisor is exp(x) + 1, as in a sigmoid or SiLU: it is off by 2 ulp itself, and at least 1."""
    made = _maker(p, p.op.args[1])
    power = _maker(p, made.args[0]) if made is not None and _adds_one(made) else None
    return power is not None and _name(power.target) == "exp"


def _adds_one(op: Op) -> bool:
    return _name(op.target) == "add" and not op.kwargs and op.args[1] == 1


def _maker(p: _Printer, value: Arg) -> Op | None:
    if p.graph is None or not isinstance(value, Ref) or value.index < len(p.graph.inputs):
        return None
    return p.graph.ops[value.index - len(p.graph.inputs)]


def _pow(p: _Printer) -> Term:
    base, power = p.arg(0), p.arg(1)
    if power.number is None or base.number is not None:
        return p.row("pow", p.to(base, p.out), p.to(power, p.out))
    names = {1.0: "", 2.0: "square", 3.0: "cube", 4.0: "fourth", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    number = float(power.number)
    value = p.to(base, p.out)
    if number == 0.0:
        return literal(1, p.out, p.language)
    if number == -2.0:
        return p.row("reciprocal", p.row("square", value))
    if number not in names:
        return p.row("pow", value, p.to(power, p.out))
    return p.row(names[number], value) if names[number] else value


def _gelu(p: _Printer) -> Term:
    form = p.kwargs.get("approximate", p.op.args[1] if len(p.op.args) > 1 else "none")
    return p.row("gelu_tanh" if form == "tanh" else "gelu", p.to(p.arg(0), p.out))


def _scalars(p: _Printer, *defaults: float) -> list[float]:
    given = [p.op.args[i + 1] if i + 1 < len(p.op.args) else d for i, d in enumerate(defaults)]
    if not all(isinstance(v, int | float) for v in given):
        raise Unprintable
    return [float(v) for v in given]  # type: ignore[arg-type]


def _numbers(p: _Printer, row: str, *numbers: float) -> Term:
    return p.row(row, p.to(p.arg(0), p.out), *(literal(n, "float32", p.language) for n in numbers))


def _elu(p: _Printer) -> Term:
    alpha, scale, inner = _scalars(p, 1.0, 1.0, 1.0)
    return _numbers(p, "elu", alpha * scale, scale, inner)


def _clamp(p: _Printer) -> Term:
    value = p.to(p.arg(0), p.out)
    bounds = list(p.op.args[1:3]) if p.name != "hardtanh" else list(_scalars(p, -1.0, 1.0))
    for row, bound in zip(("maximum", "minimum"), bounds, strict=False):
        if bound is not None:
            term = p.read(bound) if isinstance(bound, Ref) else p.scalar(bound)
            value = p.row(row, value, p.to(term, p.out))
    return value


def _round(p: _Printer) -> Term:
    if len(p.op.args) > 1 or p.kwargs.get("decimals", 0) != 0:
        raise Unprintable
    return p.row("round", p.arg(0))


def _where(p: _Printer) -> Term:
    mask = p.to(p.arg(0), "bool")
    pair = (p.to(p.arg(1), p.out), p.to(p.arg(2), p.out))
    if kind_of(p.out) == "mask":
        yes, no = (t.text for t in pair)
        text = (
            f"kv::or_(kv::and_({mask.text}, {yes}), kv::and_(kv::not_({mask.text}), {no}))"
            if p.column == 0
            else f"({mask.text} & {yes}) | ((~{mask.text}) & {no})"
        )
        return Term(text, p.out)
    return Term(SELECT[p.column].format(mask.text, *(t.text for t in pair)), p.out)


def _logical(p: _Printer) -> Term:
    row = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor"}
    if p.name == "logical_not":
        return p.row("bitwise_not", p.to(p.arg(0), "bool"))
    return p.row(row[p.name], p.to(p.arg(0), "bool"), p.to(p.arg(1), "bool"))


def _convert(p: _Printer) -> Term:
    wanted = p.kwargs.get("dtype", p.op.args[1] if len(p.op.args) > 1 else None)
    if isinstance(wanted, DType) and wanted.name != p.out:
        raise Unprintable
    return cast_term(p.atom(p.arg(0)), p.out, p.language, p.op.written)


def _full(p: _Printer) -> Term:
    fixed = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1, "empty_like": 0}
    place = 0 if p.name == "scalar_tensor" else 1
    value = fixed.get(p.name, p.op.args[place] if len(p.op.args) > place else None)
    if not isinstance(value, int | float):
        raise Unprintable
    return literal(value, p.out, p.language)


def _copy(p: _Printer) -> Term:
    return p.to(p.arg(0), p.out)


def _add_product(p: _Printer) -> Term:
    a, b, c = (p.to(p.arg(i), p.out) for i in range(3))
    product = p.row("mul" if p.name == "addcmul" else "div", b, c)
    value = p.kwargs.get("value", 1)
    if value != 1:
        product = p.row("mul", product, p.to(p.scalar(value), p.out))
    return p.row("add", a, product)


_SPECIAL: dict[str, Callable[[_Printer], Term]] = {
    "div": _div,
    "exp": _exp,
    "true_divide": _div,
    "pow": _pow,
    "gelu": _gelu,
    "elu": _elu,
    "leaky_relu": lambda p: _numbers(p, "leaky_relu", *_scalars(p, 0.01)),
    "softplus": lambda p: _numbers(p, "softplus", *_scalars(p, 1.0, 20.0)),
    "clamp": _clamp,
    "hardtanh": _clamp,
    "round": _round,
    "where": _where,
    "addcmul": _add_product,
    "addcdiv": _add_product,
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), _logical),
    **dict.fromkeys(_CASTS, _convert),
    **dict.fromkeys(_FILLS, _full),
    **dict.fromkeys(_COPIES, _copy),
}
