"""Embedding C++: right at ragged sizes, with empty bags, weights, padding and work behind it."""

import pytest
import torch
import torch.nn.functional as F
from cpp_cases import normal, problems

from torch_kevolve.templates.embedding_cpp import EmbeddingCpp

INDICES = torch.randint(0, 50, (101,), generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([0, 0, 3, 40, 40, 90])
BIASED = normal(100)


def bag(mode, **options):
    return lambda w, i, o: torch.ops.aten._embedding_bag(w, i, o, False, mode, False, **options)[0]


CASES = {
    "rows": (lambda w, i: F.embedding(i, w), [normal(50, 100), INDICES]),
    "rows narrow": (lambda w, i: F.embedding(i, w), [normal(50, 3), INDICES]),
    "rows of two": (lambda w, i: F.embedding(i, w), [normal(50, 33), INDICES[:100].view(4, 25)]),
    "rows and position": (
        lambda w, i, p: F.embedding(i, w) + p,
        [normal(50, 40), INDICES[:100].view(4, 25), normal(25, 40)],
    ),
    "rows bf16": (lambda w, i: F.embedding(i, w), [normal(50, 70, dtype=torch.bfloat16), INDICES]),
    "rows int32": (lambda w, i: F.embedding(i, w), [normal(50, 16), INDICES.int()]),
    "table transposed": (lambda w, i: F.embedding(i, w), [normal(20, 50).t(), INDICES]),
    "sum": (bag(0), [normal(50, 100), INDICES, OFFSETS]),
    "mean": (bag(1), [normal(50, 64), INDICES, OFFSETS]),
    "mean narrow": (bag(1), [normal(50, 5), INDICES, OFFSETS]),
    "last offset": (bag(0, include_last_offset=True), [normal(50, 33), INDICES, torch.tensor([0, 5, 5, 101])]),
    "padding": (bag(1, padding_idx=3), [normal(50, 33), INDICES % 5, OFFSETS]),
    "weights": (
        lambda w, i, o, s: torch.ops.aten._embedding_bag(w, i, o, False, 0, False, s)[0],
        [normal(50, 33), INDICES, OFFSETS, normal(101)],
    ),
    "behind": (lambda w, i, o, b: torch.relu(bag(0)(w, i, o) + b), [normal(50, 100), INDICES, OFFSETS, BIASED]),
}


@pytest.mark.parametrize("name", CASES)
def test_lookups_are_right(name):
    function, inputs = CASES[name]
    assert problems(EmbeddingCpp(), function, inputs) == {}


def test_indices_outside_the_table_stay_inside_memory():
    from cpp_cases import candidates, run
    from triton_cases import trace

    table, index = normal(7, 16), torch.tensor([-1, 6, 7, 1 << 40])
    task, order = trace(lambda w, i: F.embedding(i, w), [table, index.clamp(0, 6)])
    for _, candidate in candidates(EmbeddingCpp(), task, 2):
        (got,) = run(candidate, task, [[table, index][i] for i in order])
        assert torch.equal(got, table[[0, 6, 6, 6]])
