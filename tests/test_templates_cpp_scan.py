"""Scan C++: right at ragged sizes, in every dtype, with work before and after."""

import pytest
import torch
from cpp_cases import normal, problems, special

from torch_kevolve.templates.scan_cpp import ScanCpp

bf16, f16 = torch.bfloat16, torch.float16
CASES = {
    "last": (lambda x: x.cumsum(-1), [normal(19, 1000)]),
    "last short": (lambda x: x.cumsum(-1), [normal(17, 3)]),
    "last one row": (lambda x: x.cumsum(-1), [normal(1, 33)]),
    "last long row": (lambda x: x.cumsum(-1), [normal(70001)]),
    "last two long rows": (lambda x: x.cumsum(-1), [normal(2, 50003)]),
    "first": (lambda x: x.cumsum(0), [normal(100, 133)]),
    "first narrow": (lambda x: x.cumsum(0), [normal(33, 3)]),
    "first wide": (lambda x: x.cumsum(0), [normal(3, 1024)]),
    "middle": (lambda x: x.cumsum(1), [normal(3, 17, 40)]),
    "bf16": (lambda x: x.cumsum(-1), [normal(9, 257, dtype=bf16)]),
    "fp16 first": (lambda x: x.cumsum(0), [normal(100, 17, dtype=f16)]),
    "product": (lambda x: x.cumprod(-1), [1 + 0.01 * normal(9, 515)]),
    "int64": (lambda x: x.cumsum(-1), [torch.arange(900).view(9, 100)]),
    "int64 first": (lambda x: x.cumsum(0), [torch.arange(900).view(9, 100)]),
    "bool": (lambda x: x.cumsum(-1), [normal(9, 100) > 0]),
    "masked": (lambda x, m: (x * m).cumsum(1), [normal(9, 100), normal(9, 100) > 0]),
    "around": (lambda x, b: torch.relu(torch.sigmoid(x).cumsum(1)) + b, [normal(3, 67, 18), normal(18)]),
    "around last": (lambda x, b: torch.exp(-torch.abs(x)).cumsum(-1) * b, [normal(20, 67), normal(67)]),
    "special": (lambda x: x.cumsum(-1), [special(20, 515)]),
    "special first": (lambda x: x.cumsum(0), [special(20, 70)]),
    "transposed": (lambda x: x.cumsum(-1), [normal(65, 20).t()]),
    "transposed first": (lambda x: x.cumsum(0), [normal(65, 20).t()]),
}


@pytest.mark.parametrize("name", CASES)
def test_scans_are_right(name):
    function, inputs = CASES[name]
    assert problems(ScanCpp(), function, inputs, count=4) == {}


def test_sixteen_lanes_are_right():
    assert problems(ScanCpp(), lambda x: x.cumsum(-1), [normal(33, 100)], vector=64) == {}
    assert problems(ScanCpp(), lambda x: x.cumsum(0), [normal(33, 100)], vector=64) == {}
