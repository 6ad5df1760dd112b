"""Matmul C++: every layout, ragged sizes, epilogues, row logsumexp."""

import pytest
import torch
import torch.nn.functional as F
from cpp_cases import candidates, normal, problems, run, special
from triton_cases import trace

from torch_kevolve.templates.matmul_cpp import MatmulCpp

bf16, f16 = torch.bfloat16, torch.float16
LABELS = torch.arange(20) * 34
GROWING = torch.arange(4500)[:, None] / 99
IGNORED = torch.where(torch.arange(20) % 3 == 0, -100, LABELS)


def head(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


CASES = {
    "mm": (lambda a, b: a @ b, [normal(33, 100), normal(100, 70)]),
    "mm tiny": (lambda a, b: a @ b, [normal(1, 1), normal(1, 3)]),
    "mm deep": (lambda a, b: a @ b, [normal(17, 1000), normal(1000, 33)]),
    "mm left transposed": (lambda a, b: a.t() @ b, [normal(100, 33), normal(100, 48)]),
    "linear": (lambda x, w, b: F.linear(x, w, b), [normal(130, 200), normal(129, 200), normal(129)]),
    "linear gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [normal(20, 64), normal(100, 64) / 8, normal(100)]),
    "linear 3d silu": (lambda x, w, b: F.silu(F.linear(x, w, b)), [normal(2, 9, 33), normal(40, 33) / 6, normal(40)]),
    "residual": (lambda x, w, r: torch.relu(F.linear(x, w)) + r, [normal(17, 64), normal(48, 64) / 8, normal(17, 48)]),
    "skinny": (lambda x, w, b: F.relu(F.linear(x, w, b)), [normal(4, 1000), normal(77, 1000) / 32, normal(77)]),
    "one row": (lambda x, w: F.linear(x, w), [normal(1, 333), normal(5, 333)]),
    "skinny bf16": (lambda x, w: F.linear(x, w), [normal(3, 515, dtype=bf16), normal(19, 515, dtype=bf16)]),
    "bf16": (lambda x, w: F.gelu(F.linear(x, w)), [normal(20, 130, dtype=bf16), normal(60, 130, dtype=bf16)]),
    "fp16": (lambda a, b: a @ b, [normal(20, 130, dtype=f16), normal(130, 33, dtype=f16)]),
    "bmm": (lambda a, b: a @ b, [normal(5, 16, 16), normal(5, 16, 16)]),
    "bmm ragged": (lambda a, b: torch.sigmoid(a @ b), [normal(3, 17, 33), normal(3, 33, 9)]),
    "bmm transposed": (lambda a, b: a @ b.transpose(1, 2), [normal(3, 17, 33), normal(3, 40, 33)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [normal(3, 17, 9), normal(3, 17, 33), normal(3, 33, 9)]),
    "special": (lambda a, b: a @ b, [special(20, 64), normal(64, 32)]),
    "logsumexp": (
        lambda x, w, b: torch.logsumexp(F.linear(x, w, b), -1), [normal(20, 64), normal(700, 64) / 4, normal(700)]),
    "logsumexp many rows": (lambda x, w: torch.logsumexp(F.linear(x, w), -1), [normal(300, 33), normal(50, 33)]),
    "logsumexp special": (lambda x, w: torch.logsumexp(F.linear(x, w), -1) * 2, [special(20, 16), normal(100, 16)]),
    "logsumexp of columns that grow": (  # the maximum moves from block to block, by much and by little
        lambda x, w: torch.logsumexp(F.linear(x, w), -1), [normal(7, 8), normal(4500, 8) * GROWING]),
    "logsumexp 3d": (
        lambda x, w, r: torch.logsumexp(F.linear(x, w), -1) * r, [normal(4, 5, 33), normal(50, 33), normal(4, 5)]),
    "logsumexp bf16": (
        lambda x, w: torch.logsumexp(F.linear(x, w), -1), [normal(20, 64, dtype=bf16), normal(99, 64, dtype=bf16)]),
    "cross_entropy": (head, [normal(20, 64), normal(700, 64) / 4, LABELS]),
    "cross_entropy ignored": (head, [normal(20, 64), normal(700, 64) / 4, IGNORED]),
    "cross_entropy bf16": (head, [normal(20, 64, dtype=bf16), normal(700, 64, dtype=bf16) / 4, LABELS]),
    "cross_entropy special": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction="none"),
        [special(20, 16), normal(700, 16), LABELS]),
    "cross_entropy 3d bias": (
        lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b).flatten(0, 1), y, reduction="sum"),
        [normal(4, 5, 33), normal(700, 33) / 4, normal(700), LABELS]),
    "label's logit beside a capped logsumexp": (
        lambda x, w, y: (lambda z: torch.logsumexp(z, -1) - z.gather(1, y.unsqueeze(1)).squeeze(1))(
            torch.tanh(x @ w) * 3), [normal(20, 64), normal(64, 700) / 4, LABELS]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matmuls_are_right(name):
    function, inputs = CASES[name]
    # fp32 sums of the library run over long fused chains; ours over blocks: a few half ulps either way at small K.
    assert problems(MatmulCpp(), function, inputs, count=3, loose=4.0) == {}


def test_sixteen_lanes_are_right():
    assert (
        problems(MatmulCpp(), lambda a, b: a @ b, [normal(33, 100), normal(100, 70)], count=3, loose=4.0, vector=64)
        == {}
    )


@pytest.mark.parametrize("rows", [3, 20])
def test_a_sum_that_overflows_on_the_way_is_exact(rows):
    """fp32 partial sums reach infinity, the result does not; a NaN and an infinity stay where they are."""
    x, w = torch.ones(rows, 64), torch.ones(40, 64)
    x[0, :20], x[0, 20:40] = 3e38, -3e38
    x[1, 3] = float("inf")
    x[2, 3] = float("nan")
    task, order = trace(F.linear, (x, w))
    for label, candidate in candidates(MatmulCpp(), task, 3):
        (got,) = run(candidate, task, [(x, w)[i] for i in order])
        assert (got[0] == 24).all() and (got[1] == float("inf")).all() and got[2].isnan().all(), label
