"""C++ anchors with symbolic sizes: one kernel, many sizes."""

import pytest
import torch
from cpp_cases import candidates, normal, run

from torch_kevolve.sizes import Symbol, contiguous_strides, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.matmul_cpp import MatmulCpp
from torch_kevolve.templates.pooling_cpp import PoolingCpp
from torch_kevolve.templates.scan_cpp import ScanCpp

S0, S1 = symbol("s0"), symbol("s1")


def spec(*shape):
    return TensorSpec("float32", shape, contiguous_strides(shape))


def task(op, inputs, out):
    graph = TaskGraph(tuple(inputs), (Op(op[0], tuple(op[1:]), (out,)),), (Ref(len(inputs)),))
    return KernelTask(graph, (Symbol("s0"), Symbol("s1")))


X, W = spec(S0, S1), spec(S1, 40)
IMAGE, HALF = spec(S0, 3, S1, 20), spec(S0, 3, S1 - 2, 18)
POOL = ("aten.avg_pool2d.default", Ref(0), (3, 3), (1, 1))
CASES = {
    "scan last": (ScanCpp(), task(("aten.cumsum.default", Ref(0), 1), [X], X), lambda x: x.cumsum(1)),
    "scan first": (ScanCpp(), task(("aten.cumsum.default", Ref(0), 0), [X], X), lambda x: x.cumsum(0)),
    "matmul": (MatmulCpp(), task(("aten.mm.default", Ref(0), Ref(1)), [X, W], spec(S0, 40)), lambda x, w: x @ w),
    "pool": (PoolingCpp(), task(POOL, [IMAGE], HALF), lambda x: torch.nn.functional.avg_pool2d(x, 3, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_right_at_every_size(name):
    family, made, function = CASES[name]
    for label, candidate in candidates(family, made, 2):
        for a, b in ((3, 3), (17, 33), (100, 7), (31, 64)):
            sizes = {"s0": a, "s1": b}
            inputs = [
                normal(*(s if isinstance(s, int) else sizes[s.name] for s in each.shape)) for each in made.graph.inputs
            ]
            (got,) = run(candidate, made, inputs)
            want = function(*(x.double() for x in inputs))
            assert (got - want).abs().max() <= 1e-4, f"{label} at {sizes}"
