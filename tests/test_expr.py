"""The expression printer against eager, operator by operator, in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_kevolve.task import DType, Op, Ref, TensorSpec
from torch_kevolve.templates.dialects import module
from torch_kevolve.templates.expr import Term, express, is_pointwise, literal

aten = torch.ops.aten
R0, R1, R2 = Ref(0), Ref(1), Ref(2)
FLOAT = "float32"

# (target, arguments after tensors are put for Refs, keyword arguments, input dtypes); libdevice rows need a device.
CASES: dict[str, tuple[str, tuple, dict, tuple[str, ...]]] = {
    **{
        name: (f"aten.{name}.default", (R0,), {}, (FLOAT,))
        for name in [
            "neg",
            "abs",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log1p",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sigmoid",
            "silu",
            "tanh",
            "erf",
            "relu",
            "hardswish",
            "hardsigmoid",
            "sin",
            "cos",
            "floor",
            "ceil",
            "trunc",
            "round",
            "sign",
            "isnan",
            "isinf",
            "gelu",
            "elu",
            "leaky_relu",
            "softplus",
            "hardtanh",
        ]
    },
    "add_alpha": ("aten.add.Tensor", (R0, R1), {"alpha": 2}, (FLOAT, FLOAT)),
    "sub": ("aten.sub.Tensor", (R0, R1), {}, (FLOAT, FLOAT)),
    "mul_scalar": ("aten.mul.Tensor", (R0, -0.5), {}, (FLOAT,)),
    "div": ("aten.div.Tensor", (R0, R1), {}, (FLOAT, FLOAT)),
    "div_trunc": ("aten.div.Tensor_mode", (R0, R1), {"rounding_mode": "trunc"}, (FLOAT, FLOAT)),
    "gelu_tanh": ("aten.gelu.default", (R0,), {"approximate": "tanh"}, (FLOAT,)),
    "clamp": ("aten.clamp.default", (R0, -1.0, 0.5), {}, (FLOAT,)),
    "clamp_min": ("aten.clamp_min.default", (R0, 0), {}, (FLOAT,)),
    "maximum": ("aten.maximum.default", (R0, R1), {}, (FLOAT, FLOAT)),
    "minimum": ("aten.minimum.default", (R0, R1), {}, (FLOAT, FLOAT)),
    "pow2": ("aten.pow.Tensor_Scalar", (R0, 2), {}, (FLOAT,)),
    "pow3": ("aten.pow.Tensor_Scalar", (R0, 3), {}, (FLOAT,)),
    "pow_half": ("aten.pow.Tensor_Scalar", (R0, 0.5), {}, (FLOAT,)),
    "pow_minus2": ("aten.pow.Tensor_Scalar", (R0, -2), {}, (FLOAT,)),
    "pow0": ("aten.pow.Tensor_Scalar", (R0, 0), {}, (FLOAT,)),
    "gt_scalar": ("aten.gt.Scalar", (R0, 0.1), {}, (FLOAT,)),
    "le": ("aten.le.Tensor", (R0, R1), {}, (FLOAT, FLOAT)),
    "eq_int": ("aten.eq.Scalar", (R0, 3), {}, ("int64",)),
    "where": ("aten.where.self", (R0, R1, R2), {}, ("bool", FLOAT, FLOAT)),
    "logical_and": ("aten.logical_and.default", (R0, R1), {}, (FLOAT, "bool")),
    "logical_not": ("aten.logical_not.default", (R0,), {}, ("bool",)),
    "bitwise_not": ("aten.bitwise_not.default", (R0,), {}, ("bool",)),
    "bitwise_xor_int": ("aten.bitwise_xor.Tensor", (R0, R1), {}, ("int64", "int64")),
    "add_int_float": ("aten.add.Tensor", (R0, 0.5), {}, ("int64",)),
    "div_int": ("aten.div.Tensor", (R0, R1), {}, ("int64", "int64")),
    "floor_div_int": ("aten.div.Tensor_mode", (R0, R1), {"rounding_mode": "floor"}, ("int64", "int64")),
    "trunc_div_int": ("aten.div.Tensor_mode", (R0, R1), {"rounding_mode": "trunc"}, ("int64", "int64")),
    "remainder_int": ("aten.remainder.Tensor", (R0, R1), {}, ("int64", "int64")),
    "fmod_int": ("aten.fmod.Tensor", (R0, R1), {}, ("int64", "int64")),
    "convert_int": ("prims.convert_element_type.default", (R0, DType("int64")), {}, (FLOAT,)),
    "convert_bool": ("prims.convert_element_type.default", (R0, DType("float32")), {}, ("bool",)),
    "addcmul": ("aten.addcmul.default", (R0, R1, R2), {"value": 0.5}, (FLOAT, FLOAT, FLOAT)),
    "threshold_backward": ("aten.threshold_backward.default", (R0, R1, 0), {}, (FLOAT, FLOAT)),
    "gt_half": ("aten.gt.Scalar", (R0, 0.1), {}, ("float16",)),
    "silu_half": ("aten.silu.default", (R0,), {}, ("float16",)),
}
NEEDS_DEVICE = {
    "fmod": ("aten.fmod.Tensor", (R0, R1), {}, (FLOAT, FLOAT)),
    "remainder": ("aten.remainder.Tensor", (R0, R1), {}, (FLOAT, FLOAT)),
    "div_floor": ("aten.div.Tensor_mode", (R0, R1), {"rounding_mode": "floor"}, (FLOAT, FLOAT)),
    "pow": ("aten.pow.Tensor_Scalar", (R0, 2.5), {}, (FLOAT,)),
}
EXACT = (
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "relu",
    "neg",
    "abs",
    "maximum",
    "minimum",
    "clamp",
    "div",
    "mul_scalar",
)


def values(dtype: str, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.rand(256, generator=made) > 0.5
    if dtype == "int64":
        ints = torch.randint(-9, 10, (256,), generator=made)
        return torch.where(ints == 0, 3, ints)
    x = torch.randn(256, generator=made) * torch.logspace(-6, 1.2, 256)
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        88.0,
        -88.0,
        1e30,
        -1e30,
        1e-30,
        0.1,
    ]
    shift = seed % 3
    x[shift * 16 : shift * 16 + 16] = torch.tensor(special)
    x[48:64] = torch.tensor(special)
    return x.to(getattr(torch, dtype))


def eager(target: str, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> torch.Tensor:
    ns, name, overload = target.split(".")
    op = getattr(getattr(getattr(torch.ops, ns), name), overload)

    def real(value: object) -> object:
        if isinstance(value, Ref):
            return inputs[value.index]
        return getattr(torch, value.name) if isinstance(value, DType) else value

    return op(*map(real, args), **kwargs)


def make_op(case: tuple[str, tuple, dict, tuple[str, ...]], out: str) -> tuple[Op, list[TensorSpec]]:
    target, args, kwargs, dtypes = case
    spec = TensorSpec(out, (256,), (1,))
    return Op(target, args, (spec,), tuple(sorted(kwargs.items()))), [TensorSpec(d, (256,), (1,)) for d in dtypes]


def source(case: tuple[str, tuple, dict, tuple[str, ...]], out: str, name: str) -> str:
    op, specs = make_op(case, out)
    term = express(op, lambda ref: Term(f"v{ref.index}", specs[ref.index].dtype), "triton")
    assert term is not None and term.dtype == out
    loads = []
    for i, spec in enumerate(specs):
        held = {"float16": ".to(tl.float32)", "bfloat16": ".to(tl.float32)", "bool": " != 0"}.get(spec.dtype, "")
        loads.append(f"    v{i} = tl.load(x{i} + o){held}")
    params = "".join(f"x{i}, " for i in range(len(specs)))
    body = "\n".join(
        [f"@triton.jit\ndef k_{name}({params}y):", "    o = tl.arange(0, 256)", *loads, f"    r = {term.text}"]
    )
    return (
        f"{body}\n    tl.store(y + o, r + tl.zeros([256], tl.int1))\n"
        if out == "bool"
        else (
            f"{body}\n    tl.store(y + o, tl.broadcast_to(r, [256]).to(y.dtype.element_ty))\n"
            if term.number is None
            else f"{body}\n    tl.store(y + o, tl.full([256], r, y.dtype.element_ty))\n"
        )
    )


RUNNER = """
import json, sys, torch
import test_expr as t
sys.path.insert(0, {tmp!r})
import kernels
out = {{}}
for name, case in t.CASES.items():
    inputs = [t.values(d, i) for i, d in enumerate(case[3])]
    want = t.eager(*case[:3], inputs)
    got = torch.empty_like(want)
    getattr(kernels, "k_" + name)[(1,)](*inputs, got)
    out[name] = t.compare(name, got, want, case, inputs)
json.dump(out, open({tmp!r} + "/out.json", "w"))
"""


def compare(name: str, got: torch.Tensor, want: torch.Tensor, case: tuple, inputs: list[torch.Tensor]) -> str:
    """Empty where equal: bit for bit for exact rows, else within 2^-21 of the result's and the operand's size."""
    if want.dtype in (torch.bool, torch.int64):
        same = got == want
        if case[0].startswith("prims") and want.dtype == torch.int64:
            same = same | (inputs[0].abs() > 1e9) | inputs[0].isnan()  # out of range: undefined in C
    elif name in EXACT:
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    else:
        scale = 2.0**-21 if want.dtype == torch.float32 else 2.0**-10
        near = (want.abs() + inputs[0].float().abs().clamp(max=2.0)) * scale + 1e-37
        same = ((got - want).abs() <= near) | (got == want) | (got.isnan() & want.isnan())
    bad = (~same).nonzero().flatten().tolist()
    return (
        "" if not bad else f"at {inputs[0][bad[0]].item()}: {got[bad[0]].item()} for {want[bad[0]].item()} ({len(bad)})"
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tmp = tmp_path_factory.mktemp("expr")
    bodies = []
    for name, case in CASES.items():
        out = str(eager(*case[:3], [values(d, i) for i, d in enumerate(case[3])]).dtype).removeprefix("torch.")
        bodies.append(source(case, out, name))
    (tmp / "kernels.py").write_text(module("\n\n".join(bodies)))
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    command = [sys.executable, "-W", "ignore", "-c", RUNNER.format(tmp=str(tmp))]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((tmp / "out.json").read_text()))


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_eager(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", [*CASES, *NEEDS_DEVICE])
def test_cpp_has_the_same_operators(name: str) -> None:
    case = {**CASES, **NEEDS_DEVICE}[name]
    out = str(eager(*case[:3], [values(d, i) for i, d in enumerate(case[3])]).dtype).removeprefix("torch.")
    op, specs = make_op(case, out)
    term = express(op, lambda ref: Term(f"v{ref.index}", specs[ref.index].dtype), "cpp")
    assert term is not None and "tl." not in term.text and term.text.count("(") == term.text.count(")")


def test_refusals_are_none() -> None:
    spec = TensorSpec("float64", (4,), (1,))
    assert express(Op("aten.exp.default", (R0,), (spec,)), lambda r: Term("v", "float64"), "triton") is None
    spec = TensorSpec("float32", (4,), (1,))
    op = Op("aten.round.decimals", (R0,), (spec,), (("decimals", 2),))
    assert express(op, lambda r: Term("v", "float32"), "triton") is None
    assert not is_pointwise("aten.sum.dim_IntList")


def test_a_written_cast_rounds_and_a_silent_one_does_not() -> None:
    spec = TensorSpec("bfloat16", (4,), (1,))
    for written, text in ((True, "v.to(tl.bfloat16).to(tl.float32)"), (False, "v")):
        op = Op("prims.convert_element_type.default", (R0, DType("bfloat16")), (spec,), written=written)
        term = express(op, lambda r: Term("v", "float32"), "triton")
        assert term is not None and term.text == text


def test_literals_are_exact() -> None:
    assert literal(0.1, "bfloat16", "triton").number == 0.10009765625
    assert literal(-math.inf, "float32", "triton").text == 'float("-inf")'
    assert literal(0.1, "float32", "cpp").text == "kv::vf(0x1.99999a0000000p-4f)"
