"""Dialects: how one pointwise step is written.

Each row names an operation and its spelling in C++ (over `kv::vf` vectors and `kv::vm` masks) and in Triton. `{0}`,
`{1}`, `{2}` are operands; they are atoms (a name, a call, a literal in parentheses), so no row needs to guard them.
Triton rows that start with `kv_` call a helper whose text stands in `HELPERS`; the renderer puts it in the source.
"""

from __future__ import annotations

import math
import re

FLOAT_OPS: dict[str, tuple[str, str]] = {
    "neg": ("-{0}", "-{0}"),
    "abs": ("kv::abs({0})", "tl.abs({0})"),
    "add": ("{0} + {1}", "{0} + {1}"),
    "sub": ("{0} - {1}", "{0} - {1}"),
    "mul": ("{0} * {1}", "{0} * {1}"),
    # Triton's `/` is div.full.f32 (2 ulp); eager rounds correctly.
    "div": ("{0} / {1}", "kv_div({0}, {1})"),
    # div_rn branches for every element. GroupNorm + SiLU on an H200 took 1.7 ms with it and 1.28 ms without.
    "div_rough": ("{0} / {1}", "{0} / {1}"),
    "div_trunc": ("kv::trunc({0} / {1})", "kv_trunc(kv_div({0}, {1}))"),
    "div_floor": ("kv::floor_div({0}, {1})", "kv_floor_div({0}, {1})"),
    "fmod": ("kv::fmod({0}, {1})", "libdevice.fmod({0}, {1})"),
    "remainder": ("kv::remainder({0}, {1})", "kv_remainder({0}, {1})"),
    "exp": ("kv::exp({0})", "tl.exp({0})"),
    # tl.exp keeps denormal results, which 1 + exp(x) does not see; the registers for it cost a third of the programs.
    "exp_of_sigmoid": ("kv::exp({0})", "tl.exp2({0} * 1.4426950408889634)"),
    "exp2": ("kv::exp2({0})", "tl.exp2({0})"),
    "expm1": ("kv::expm1({0})", "kv_expm1({0})"),
    "log": ("kv::log({0})", "tl.log({0})"),
    "log2": ("kv::log2({0})", "tl.log2({0})"),
    "log1p": ("kv::log1p({0})", "kv_log1p({0})"),
    "sqrt": ("kv::sqrt({0})", "tl.sqrt_rn({0})"),
    "rsqrt": ("kv::rsqrt({0})", "tl.rsqrt({0})"),
    "reciprocal": ("kv::vf(1.0f) / {0}", "kv_div(1.0, {0})"),
    "square": ("{0} * {0}", "{0} * {0}"),
    "cube": ("{0} * {0} * {0}", "{0} * {0} * {0}"),
    "fourth": ("({0} * {0}) * ({0} * {0})", "({0} * {0}) * ({0} * {0})"),
    "pow": ("kv::pow({0}, {1})", "libdevice.pow({0}, {1})"),
    "sigmoid": ("kv::sigmoid({0})", "1.0 / (1.0 + tl.exp2({0} * -1.4426950408889634))"),
    "silu": ("{0} * kv::sigmoid({0})", "{0} / (1.0 + tl.exp2({0} * -1.4426950408889634))"),
    "tanh": ("kv::tanh({0})", "kv_tanh({0})"),
    "erf": ("kv::erf({0})", "tl.erf({0})"),
    "gelu": (
        "kv::vf(0.5f) * {0} * (kv::vf(1.0f) + kv::erf({0} * kv::vf(0.70710678118654752f)))",
        "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    ),
    "gelu_tanh": (
        (
            "kv::vf(0.5f) * {0} * (kv::vf(1.0f) + "
            "kv::tanh(kv::vf(0.7978845608f) * ({0} + kv::vf(0.044715f) * {0} * {0} * {0})))"
        ),
        "0.5 * {0} * (1.0 + kv_tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))",
    ),
    # A comparison, not a maximum: eager's relu keeps NaN and -0.0.
    "relu": ("kv::select(kv::lt({0}, kv::vf(0.0f)), kv::vf(0.0f), {0})", "tl.where({0} < 0.0, 0.0, {0})"),
    "leaky_relu": ("kv::select(kv::gt({0}, kv::vf(0.0f)), {0}, {0} * {1})", "tl.where({0} > 0.0, {0}, {0} * {1})"),
    "elu": (  # {1}: alpha * scale, {2}: scale, {3}: input scale
        "kv::select(kv::gt({0}, kv::vf(0.0f)), {0} * {2}, kv::expm1({0} * {3}) * {1})",
        "tl.where({0} > 0.0, {0} * {2}, kv_expm1({0} * {3}) * {1})",
    ),
    "softplus": (  # {1}: beta, {2}: threshold
        "kv::select(kv::gt({0} * {1}, {2}), {0}, kv::log1p(kv::exp({0} * {1})) / {1})",
        "tl.where({0} * {1} > {2}, {0}, kv_log1p(tl.exp({0} * {1})) / {1})",
    ),
    "hardswish": (
        "{0} * kv::min_nan(kv::max_nan({0} + kv::vf(3.0f), kv::vf(0.0f)), kv::vf(6.0f)) / kv::vf(6.0f)",
        "kv_div({0} * kv_min(kv_max({0} + 3.0, 0.0), 6.0), 6.0)",
    ),
    "hardsigmoid": (
        "kv::min_nan(kv::max_nan({0} + kv::vf(3.0f), kv::vf(0.0f)), kv::vf(6.0f)) / kv::vf(6.0f)",
        "kv_div(kv_min(kv_max({0} + 3.0, 0.0), 6.0), 6.0)",
    ),
    "sin": ("kv::sin({0})", "tl.sin({0})"),
    "cos": ("kv::cos({0})", "tl.cos({0})"),
    "floor": ("kv::floor({0})", "tl.floor({0})"),
    "ceil": ("kv::ceil({0})", "tl.ceil({0})"),
    "trunc": ("kv::trunc({0})", "kv_trunc({0})"),
    "round": ("kv::rint({0})", "kv_rint({0})"),
    # torch.sign of NaN is 0, which the two comparisons give.
    "sign": (
        (
            "kv::select(kv::gt({0}, kv::vf(0.0f)), kv::vf(1.0f), "
            "kv::select(kv::lt({0}, kv::vf(0.0f)), kv::vf(-1.0f), kv::vf(0.0f)))"
        ),
        "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    ),
    "maximum": ("kv::max_nan({0}, {1})", "kv_max({0}, {1})"),
    "minimum": ("kv::min_nan({0}, {1})", "kv_min({0}, {1})"),
    "threshold_backward": (
        "kv::select(kv::le({1}, {2}), kv::vf(0.0f), {0})",
        "tl.where({1} <= {2}, 0.0, {0})",
    ),
}
"""Operations on fp32 values, in which fp16 and bf16 are computed too."""

INT_OPS: dict[str, tuple[str, str]] = {
    "neg": ("-{0}", "-{0}"),
    "abs": ("kv::abs({0})", "tl.abs({0})"),
    "add": ("{0} + {1}", "{0} + {1}"),
    "sub": ("{0} - {1}", "{0} - {1}"),
    "mul": ("{0} * {1}", "{0} * {1}"),
    # Triton's // on integers cuts towards zero, as C does.
    "div_trunc": ("{0} / {1}", "{0} // {1}"),
    "div_floor": ("kv::floor_div({0}, {1})", "kv_floor_div_int({0}, {1})"),
    "fmod": ("{0} % {1}", "{0} % {1}"),
    "remainder": ("kv::remainder({0}, {1})", "kv_remainder_int({0}, {1})"),
    "square": ("{0} * {0}", "{0} * {0}"),
    "cube": ("{0} * {0} * {0}", "{0} * {0} * {0}"),
    "relu": ("kv::max({0}, {0} - {0})", "tl.maximum({0}, 0)"),
    "maximum": ("kv::max({0}, {1})", "tl.maximum({0}, {1})"),
    "minimum": ("kv::min({0}, {1})", "tl.minimum({0}, {1})"),
    "bitwise_and": ("{0} & {1}", "{0} & {1}"),
    "bitwise_or": ("{0} | {1}", "{0} | {1}"),
    "bitwise_xor": ("{0} ^ {1}", "{0} ^ {1}"),
    "bitwise_not": ("~{0}", "~{0}"),
    "floor": ("{0}", "{0}"),
    "ceil": ("{0}", "{0}"),
    "trunc": ("{0}", "{0}"),
    "round": ("{0}", "{0}"),
}

MASK_OPS: dict[str, tuple[str, str]] = {
    "bitwise_and": ("kv::and_({0}, {1})", "{0} & {1}"),
    "bitwise_or": ("kv::or_({0}, {1})", "{0} | {1}"),
    "bitwise_xor": ("kv::xor_({0}, {1})", "{0} ^ {1}"),
    "bitwise_not": ("kv::not_({0})", "~{0}"),
    "mul": ("kv::and_({0}, {1})", "{0} & {1}"),
    "maximum": ("kv::or_({0}, {1})", "{0} | {1}"),
    "minimum": ("kv::and_({0}, {1})", "{0} & {1}"),
}

COMPARE: dict[str, tuple[str, str]] = {
    "eq": ("kv::eq({0}, {1})", "{0} == {1}"),
    "ne": ("kv::ne({0}, {1})", "{0} != {1}"),
    "lt": ("kv::lt({0}, {1})", "{0} < {1}"),
    "le": ("kv::le({0}, {1})", "{0} <= {1}"),
    "gt": ("kv::gt({0}, {1})", "{0} > {1}"),
    "ge": ("kv::ge({0}, {1})", "{0} >= {1}"),
}
TESTS: dict[str, tuple[str, str]] = {
    "isnan": ("kv::ne({0}, {0})", "{0} != {0}"),
    "isinf": ("kv::eq(kv::abs({0}), kv::vf(__builtin_inff()))", 'tl.abs({0}) == float("inf")'),
}
SELECT = ("kv::select({0}, {1}, {2})", "tl.where({0}, {1}, {2})")
ROUND = {  # a cast to a half type that the program wrote, of a value that is held in fp32
    "bfloat16": ("kv::round_bf16({0})", "{0}.to(tl.bfloat16).to(tl.float32)"),
    "float16": ("kv::round_fp16({0})", "{0}.to(tl.float16).to(tl.float32)"),
}

HELPERS: dict[str, str] = {
    "kv_div": "def kv_div(a, b):\n    return tl.math.div_rn(a, b)\n",
    "kv_max": "def kv_max(a, b):\n    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)\n",
    "kv_min": "def kv_min(a, b):\n    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)\n",
    "kv_trunc": "def kv_trunc(x):\n    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))\n",
    # Adding and taking away 2^23 rounds half to even below it; above, fp32 has no fraction. -0.0 stays.
    "kv_rint": (
        "def kv_rint(x):\n    a = tl.abs(x)\n    r = (a + 8388608.0) - 8388608.0\n    r = tl.where(x < 0.0, -r, r)\n"
        "    return tl.where((a < 8388608.0) & (a > 0.0), r, x)\n"
    ),
    "kv_remainder": (
        "def kv_remainder(a, b):\n    r = libdevice.fmod(a, b)\n"
        "    return tl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), r + b, r)\n"
    ),
    "kv_floor_div": (
        "def kv_floor_div(a, b):\n    r = libdevice.fmod(a, b)\n    q = tl.math.div_rn(a - r, b)\n"
        "    q = tl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), q - 1.0, q)\n    f = tl.floor(q)\n"
        "    f = tl.where(q - f > 0.5, f + 1.0, f)\n    f = tl.where(q != 0.0, f, 0.0 * tl.math.div_rn(a, b))\n"
        "    return tl.where(b == 0.0, tl.math.div_rn(a, b), f)\n"
    ),
    "kv_floor_div_int": (
        "def kv_floor_div_int(a, b):\n    q = a // b\n"
        "    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)\n"
    ),
    "kv_remainder_int": (
        "def kv_remainder_int(a, b):\n    r = a % b\n    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)\n"
    ),
    # Below 0.6 a least-squares odd polynomial (relative error 3e-9 before rounding), above it the exponential form.
    "kv_tanh": (
        "def kv_tanh(x):\n    a = tl.abs(x)\n    s = x * x\n"
        "    p = -0.00589514 * s + 0.02079596\n    p = p * s - 0.05378383\n    p = p * s + 0.13331924\n"
        "    p = p * s - 0.33333298\n    p = p * s * x + x\n"
        "    e = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)\n"
        "    return tl.where(a < 0.6, p, tl.where(x < 0.0, -e, e))\n"
    ),
    "kv_expm1": (
        "def kv_expm1(x):\n    p = 1.0 + x * (1.0 / 9.0)\n    p = 1.0 + x * 0.125 * p\n"
        "    p = 1.0 + x * (1.0 / 7.0) * p\n"
        "    p = 1.0 + x * (1.0 / 6.0) * p\n    p = 1.0 + x * 0.2 * p\n    p = 1.0 + x * 0.25 * p\n"
        "    p = 1.0 + x * (1.0 / 3.0) * p\n    p = 1.0 + x * 0.5 * p\n"
        "    return tl.where(tl.abs(x) < 0.5, x * p, tl.exp(x) - 1.0)\n"
    ),
    # log(u) * x / (u - 1) with u = fl(1 + x): the rounding error of u cancels.
    "kv_log1p": (
        "def kv_log1p(x):\n    u = 1.0 + x\n    d = u - 1.0\n"
        "    y = tl.log(u) * tl.math.div_rn(x, tl.where(d == 0.0, 1.0, d))\n"
        '    return tl.where((d == 0.0) | (x == float("inf")), x, y)\n'
    ),
}
"""Triton functions, without their decorator, by name."""

IMPORTS = "import triton\nimport triton.language as tl\n"
LIBDEVICE = "from triton.language.extra import libdevice\n"


def module(body: str) -> str:
    """A Triton source: the imports, the helpers that `body` calls (with those that they call), `body`."""
    need: list[str] = []
    _collect(body, need)
    helpers = "".join(f"\n\n@triton.jit\n{HELPERS[name]}" for name in HELPERS if name in need)
    text = f"{helpers}\n\n{body.strip()}\n"
    return IMPORTS + (LIBDEVICE if "libdevice." in text else "") + text


def _collect(text: str, need: list[str]) -> None:
    for name in re.findall(r"\bkv_\w+", text):
        if name in HELPERS and name not in need:
            need.append(name)
            _collect(HELPERS[name], need)


def constant(value: float | bool, kind: str, language: str) -> str:
    """A literal of kind `float`, `int` or `mask`, as an atom."""
    if language == "cpp":
        if kind == "float":
            return f"kv::vf({_c_float(float(value))})"
        if kind == "int":
            return f"kv::vi({int(value)})"
        return "kv::vm::all()" if value else "kv::vm::none()"
    if kind == "float":
        number = float(value)
        if not math.isfinite(number):
            return f'float("{number}")'
        return repr(number) if number >= 0 and not str(number).startswith("-") else f"({number!r})"
    if kind == "int":
        return str(int(value)) if value >= 0 else f"({int(value)})"
    return "True" if value else "False"


def _c_float(number: float) -> str:
    if math.isnan(number):
        return '__builtin_nanf("")'
    if math.isinf(number):
        return "__builtin_inff()" if number > 0 else "-__builtin_inff()"
    import struct

    try:
        exact = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        exact = math.inf if number > 0 else -math.inf
        return _c_float(exact)
    return f"{exact.hex()}f"
