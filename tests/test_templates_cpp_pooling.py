"""Pooling C++: every window, stride, padding and rounding; places of maxima as eager finds them."""

import pytest
import torch
import torch.nn.functional as F
from cpp_cases import normal, problems, special

from torch_kevolve.templates.pooling_cpp import PoolingCpp

last = torch.channels_last
CASES = {
    "max 3 2 1": (lambda x: F.max_pool2d(x, 3, 2, 1), [normal(2, 5, 17, 23)]),
    "max wide": (lambda x: F.max_pool2d(x, 3, 2, 1), [normal(2, 3, 33, 100)]),
    "max special": (lambda x: F.max_pool2d(x, 3, 2, 1), [special(2, 5, 16, 40)]),
    "max k4 s1": (lambda x: F.max_pool2d(x, 4, 1, 1) * 2, [normal(2, 2, 12, 18)]),
    "max k2 s3": (lambda x: F.max_pool2d(x, 2, 3), [normal(2, 2, 12, 30)]),
    "max dilated": (lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2), [normal(2, 2, 20, 33)]),
    "max ceil": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), [normal(2, 2, 16, 34)]),
    "max channels": (lambda x: F.max_pool2d(x, 3, 2, 1), [special(2, 19, 16, 17).to(memory_format=last)]),
    "max bf16": (lambda x: F.max_pool2d(x, 3, 2, 1), [normal(2, 3, 16, 40, dtype=torch.bfloat16)]),
    "max tiny": (lambda x: F.max_pool2d(x, 2), [normal(1, 1, 2, 3)]),
    "max3d": (lambda x: F.max_pool3d(x, 2), [normal(2, 2, 6, 8, 10)]),
    "avg 2": (lambda x: F.avg_pool2d(x, 2), [normal(3, 2, 10, 34)]),
    "avg 3 1 1": (lambda x: torch.sigmoid(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)), [normal(2, 3, 9, 21)]),
    "avg padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), [normal(2, 3, 9, 37)]),
    "avg ceil": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), [normal(2, 3, 10, 38)]),
    "avg ceil inside": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), [normal(2, 3, 10, 38)]),
    "avg divisor": (lambda x: F.avg_pool2d(x, 3, divisor_override=2), [normal(2, 3, 10, 38)]),
    "avg half": (lambda x: F.avg_pool2d(x, 3, 1, 1), [normal(2, 3, 9, 21, dtype=torch.float16)]),
    "avg special": (lambda x: F.avg_pool2d(x, 2, 2), [special(2, 3, 12, 40)]),
    "avg channels": (lambda x: F.avg_pool2d(x, 3, 2, 1), [normal(2, 19, 9, 11).to(memory_format=last)]),
    "avg3d": (lambda x: F.avg_pool3d(x, 3, 2, 1), [normal(2, 3, 9, 11, 13)]),
    "avg3d uneven": (
        lambda x: F.avg_pool3d(x, (2, 3, 1), (1, 2, 1), (1, 1, 0), count_include_pad=False), [normal(2, 2, 5, 7, 6)]),
    "avg strided": (lambda x: F.avg_pool2d(x, 2), [normal(10, 2, 3, 34).permute(2, 1, 0, 3)]),
    "then a residual": (lambda x, y: torch.relu(F.avg_pool2d(x, 2) + y), [normal(2, 3, 8, 24), normal(2, 3, 4, 12)]),
}  # fmt: skip
PLACES = {
    "3 2 1": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [normal(2, 5, 17, 41)]),
    "ties": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [normal(2, 5, 17, 41).round()]),
    "special": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [special(3, 5, 16, 40)]),
    "channels": (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        [special(3, 19, 8, 9).to(memory_format=last)],
    ),
    "dilated": (lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2, return_indices=True), [special(3, 2, 20, 33)]),
}


@pytest.mark.parametrize("name", CASES)
def test_pools_are_right(name):
    function, inputs = CASES[name]
    assert problems(PoolingCpp(), function, inputs, count=3) == {}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_maxima_are_eagers(name):
    """The offsets operator alone: its own eager form is the reference."""
    _, inputs = PLACES[name]
    dilation = 2 if name == "dilated" else 1

    def pool(x):
        return torch.ops.prims._low_memory_max_pool_with_offsets(x, [3, 3], [2, 2], [1, 1], [dilation] * 2, False)

    assert problems(PoolingCpp(), pool, inputs, count=3) == {}


def test_sixteen_lanes_are_right():
    assert problems(PoolingCpp(), lambda x: F.max_pool2d(x, 3, 2, 1), [normal(2, 3, 33, 100)], count=2, vector=64) == {}
