"""Exact: graphs compared in fp64, and whether one runs in its own types."""

import torch

from torch_kevolve.lowering.exact import runs, same
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
