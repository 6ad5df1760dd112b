"""Rows: what a 32-bit place or an fp32 partial sum cannot hold is refused, not computed wrongly."""

from dataclasses import replace

import pytest
import torch
from triton_cases import H200, trace

from torch_kevolve.devices import current
from torch_kevolve.sizes import Symbol, contiguous_strides, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.columns_cpp import ColumnsCpp
from torch_kevolve.templates.kernel_text import is_wide
from torch_kevolve.templates.rowwise_cpp import RowwiseCpp
from torch_kevolve.templates.rowwise_triton import RowwiseTriton

S0 = symbol("s0")


def spec(dtype, *shape):
    return TensorSpec(dtype, shape, contiguous_strides(shape))


def reduced(target, dtype, shape, dim, out="int64", symbols=()):
    kept = tuple(size for place, size in enumerate(shape) if place != dim)
    axis = dim if "arg" in target else (dim,)
    return KernelTask(
        TaskGraph((spec(dtype, *shape),), (Op(target, (Ref(0), axis), (spec(out, *kept),)),), (Ref(1),)), symbols
    )


def claims(family, task):
    return family().match(task, current("cpu").facts()) is not None


@pytest.mark.parametrize(("family", "dim"), [(RowwiseCpp, 1), (ColumnsCpp, 0)])
def test_argmax_over_more_than_2_to_31_is_left(family, dim):
    def task(size, symbols=()):
        shape = (4, size) if dim else (size, 64)
        return reduced("aten.argmax.default", "float32", shape, dim, symbols=symbols)

    assert claims(family, task(1000))
    assert not claims(family, task(2**31))
    assert claims(family, task(S0, (Symbol("s0", 2, 4096),)))
    assert not claims(family, task(S0, (Symbol("s0"),)))


def test_a_sum_of_integers_along_the_row_is_left_and_a_count_is_not():
    assert not claims(RowwiseCpp, reduced("aten.sum.dim_IntList", "int64", (4, 1000), 1))
    assert claims(RowwiseCpp, reduced("aten.sum.dim_IntList", "bool", (4, 1000), 1))


@pytest.mark.parametrize(("apart", "wide"), [(100, False), (2**19 - 1, False), (2**20, True)])
def test_few_columns_of_many_need_offsets_of_64_bits(apart, wide):
    columns = replace(spec("float32", S0, 100), strides=(apart, 1))
    task = KernelTask(
        TaskGraph((columns,), (Op("aten.relu.default", (Ref(0),), (spec("float32", S0, 100),)),), (Ref(1),)),
        (Symbol("s0", 257, 4096),),
    )
    assert is_wide(task) == wide


def test_where_torch_is_deterministic_no_program_helps_itself():
    """One that waits in vain for the others adds up in another order."""
    (task, _) = trace(lambda x: torch.softmax(x, -1), [torch.ones(2, 70001)])
    space, lasting = (
        RowwiseTriton().match(each, H200) for each in (task, replace(task, flags=(("deterministic", "1"),)))
    )
    for each, offered in ((space, True), (lasting, False)):
        assert any(point["algorithm"] == "cooperative" for point in each.points()) == offered
