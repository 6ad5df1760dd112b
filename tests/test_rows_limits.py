"""Rows: what a 32-bit place or an fp32 partial sum cannot hold is refused, not computed wrongly."""

import pytest

from torch_kevolve.devices import current
from torch_kevolve.sizes import Symbol, contiguous_strides, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.columns_cpp import ColumnsCpp
from torch_kevolve.templates.rowwise_cpp import RowwiseCpp

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
