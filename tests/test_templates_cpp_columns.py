"""Columns C++: right at ragged sizes, in every dtype, with work before and after."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cpp_cases import facts, normal, problems, run, special, trace

from torch_kevolve.templates.columns_cpp import ColumnsCpp

bf16, f16 = torch.bfloat16, torch.float16
CASES = {
    "sum": (lambda x: x.sum(0), [normal(1000, 100)]),
    "sum narrow": (lambda x: x.sum(0), [normal(33, 3)]),
    "sum middle": (lambda x: x.sum(1), [normal(3, 17, 33)]),
    "sum of two": (lambda g, x: (g.sum(0), (g * x).sum(0)), [normal(100, 133), normal(100, 133, seed=1)]),
    "sum outer and middle": (lambda x: x.sum((0, 2)), [normal(3, 17, 5, 40)]),
    "mean bf16": (lambda x: x.mean(0), [normal(100, 33, dtype=bf16)]),
    "max": (lambda x: x.amax(0), [special(33, 100)]),
    "min": (lambda x: x.amin(1), [special(3, 17, 33)]),
    "argmax": (lambda x: x.argmax(0), [special(100, 133)]),
    "argmin": (lambda x: x.argmin(0), [normal(100, 17)]),
    "argmax of ties": (lambda x: x.argmax(0), [normal(100, 33).round()]),
    "softmax": (lambda x: F.softmax(x, 1), [normal(3, 17, 33, scale=3)]),
    "softmax special": (lambda x: F.softmax(x, 0), [special(17, 33)]),
    "log softmax": (lambda x: F.log_softmax(x, 1), [normal(3, 21, 65)]),
    "softmax fp16": (lambda x: F.softmax(x, 0), [normal(17, 40, dtype=f16)]),
    "variance": (lambda x: torch.var_mean(x, 0), [normal(100, 33) + 100]),
    "channel norm": (
        lambda x, w: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True, correction=0) + 1e-5) * w,
        [normal(2, 17, 33), normal(17, 1)],
    ),
    "any": (lambda x: (x > 1).any(0), [normal(10, 33)]),
    "all": (lambda x: (x > -2).all(0), [normal(10, 33)]),
    "count": (lambda x: (x > 0).sum(0), [normal(100, 33)]),
    "int64": (lambda x: x.sum(0), [torch.arange(900).view(9, 100)]),
    "before and after": (lambda x, b: torch.relu(torch.exp(-x.abs()).sum(0) + b), [normal(67, 18), normal(18)]),
    "product": (lambda x: x.prod(0), [1 + 0.01 * normal(17, 33)]),
    "strided": (lambda x: x.sum(0), [normal(50, 80)[::2, ::2]]),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_are_right(name):
    function, inputs = CASES[name]
    assert problems(ColumnsCpp(), function, inputs) == {}


@pytest.mark.parametrize("name", [name for name in CASES if "softmax" not in name and "norm" not in name])
@pytest.mark.parametrize("pieces", [2, 40])
def test_rows_shared_by_threads_are_right(name, pieces):
    function, inputs = CASES[name]
    task, order = trace(function, inputs)
    space = ColumnsCpp().match(task, replace(facts(), units=pieces))
    if name == "variance":  # it takes two walks
        assert space.axes["PIECES"] == (1,)
        return
    given = tuple(inputs[i] for i in order)
    assert any(point["PIECES"] == pieces for point in space.start)
    points = [{**space.start[0], "U": u, "PIECES": pieces} for u in (1, 8)]
    for point in filter(space.valid, points):
        got = run(space.render(point), task, given)
        want = run(space.render({**point, "PIECES": 1}), task, given)
        for mine, whole in zip(got, want, strict=True):
            torch.testing.assert_close(mine, whole, rtol=2e-6, atol=2e-5, equal_nan=True)


def test_sixteen_lanes_are_right():
    assert problems(ColumnsCpp(), lambda x: F.softmax(x, 0), [normal(33, 100)], vector=64) == {}
    assert problems(ColumnsCpp(), lambda x: x.argmax(0), [normal(33, 100)], vector=64) == {}
