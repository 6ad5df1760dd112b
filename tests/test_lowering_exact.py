"""Exact: graphs compared in fp64, and whether one runs in its own types."""

import torch

from torch_kevolve.lowering.exact import runs, same
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import DType, KernelTask, Op, Ref, TaskGraph, TensorSpec

CPU = torch.device("cpu")
CAST = "prims.convert_element_type.default"
F = TensorSpec("float32", (4, 4), (4, 1))
H = TensorSpec("bfloat16", (4, 4), (4, 1))


def graph(*ops, inputs=(F, F)):
    return TaskGraph(inputs, ops, (Ref(len(inputs) + len(ops) - 1),))


def test_a_library_call_that_refuses_a_mixture_of_types_does_not_run_though_it_is_the_same_in_fp64():
    plain = graph(Op("aten.mm.default", (Ref(0), Ref(1)), (F,)))
    mixed = graph(Op(CAST, (Ref(1), DType("bfloat16")), (H,)), Op("aten.mm.default", (Ref(0), Ref(2)), (F,)))
    task = KernelTask(plain)
    assert same(plain, mixed, task)
    assert runs(plain, task, CPU)
    assert not runs(mixed, task, CPU)


def test_a_call_that_gives_another_type_than_the_graph_says_does_not_run():
    said = graph(Op("aten.exp.default", (Ref(0),), (F,)), inputs=(H,))
    assert not runs(said, KernelTask(said), CPU)


def test_what_makes_a_tensor_of_nothing_makes_it_on_the_device():
    iota = Op("prims.iota.default", (4,), (TensorSpec("int64", (4,), (1,)),),
              (("start", 0), ("step", 1), ("dtype", DType("int64")), ("requires_grad", False)))  # fmt: skip
    made = graph(iota, inputs=())
    assert runs(made, KernelTask(made), CPU)


def test_sizes_whose_range_begins_high_are_tried_below_it():
    s0, s1 = symbol("s0"), symbol("s1")
    x, flat = TensorSpec("float32", (s0, s1), (s1, 1)), TensorSpec("float32", (s0 * s1,), (1,))
    late = graph(Op("aten.reshape.default", (Ref(0), (s0 * s1,)), (flat,)),
                 Op("aten.exp.default", (Ref(1),), (flat,)), inputs=(x,))  # fmt: skip
    early = graph(Op("aten.exp.default", (Ref(0),), (x,)),
                  Op("aten.reshape.default", (Ref(1), (s0 * s1,)), (flat,)), inputs=(x,))  # fmt: skip
    for low, high in ((2, 16), (257, 4096), (4097, 65536), (65537, None)):
        task = KernelTask(late, (Symbol("s0", low, high), Symbol("s1", low, high)))
        assert same(late, early, task) and runs(late, task, CPU), low
