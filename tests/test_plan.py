"""Plan: building, checking, the JSON form."""

import json

import pytest

from torch_kevolve.errors import PlanError
from torch_kevolve.plan import LaunchPlan, PlanBuilder, build
from torch_kevolve.sizes import Symbol, evaluate, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

S0 = symbol("s0")
X = TensorSpec("float32", (S0, 100), (100, 1))
W = TensorSpec("float32", (100,), (1,), frozen=True)
GRAPH = TaskGraph((X, W), (Op("aten.mul.Tensor", (Ref(0), Ref(1)), (X,)),), (Ref(2),))
TASK = KernelTask(GRAPH, (Symbol("s0"),))


def launch(p, x, w):
    rows, columns = x.shape
    y = p.empty((rows, columns), x.dtype)
    (packed,) = p.prepare(lambda p: p.aten("aten.neg.default", (w,), (W,)))
    p.run(
        "scale", grid=(p.cdiv(rows, 4),), args=(x, packed, y, rows, 0.5), BLOCK=p.next_power_of_2(columns), num_warps=8
    )
    return y


def test_round_trip():
    plan = build(TASK, launch)
    assert LaunchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.kernels == ("scale",)


def test_sizes_are_expressions_of_the_tasks_symbols():
    run = build(TASK, launch).steps[-1]
    assert evaluate(run.grid[0], {"s0": 9}) == 3
    assert dict(run.meta) == {"BLOCK": 128} and dict(run.options) == {"num_warps": 8}


@pytest.mark.parametrize(
    ("bad", "cure"),
    [
        (lambda p, x, w: x, "write it to a new tensor"),
        (lambda p, x, w: p.empty((3, 100), "float32"), "the task wants"),
        (lambda p, x, w: (), "has 1 outputs"),
        (lambda p, x, w: p.empty(x.shape, "complex64"), "use one of"),
        (lambda p, x, w: p.run("not a name"), "names no kernel"),
        (lambda p, x, w: p.run("k", grid=(1, 1, 1, 1)), "at most 3"),
        (lambda p, x, w: p.run("k", args=(object(),)), "use tensors of the plan"),
        (lambda p, x, w: p.aten("os.system", (), ()), "aten.name.overload"),
        (lambda p, x, w: p.next_power_of_2(x.shape[0]), "loop over it"),
        (lambda p, x, w: p.prepare(lambda q: q.aten("aten.neg.default", (x,), (X,))), "no frozen input"),
        (lambda p, x, w: p.empty(x.shape, x.dtype) if x else None, "cannot branch"),
    ],
)
def test_a_mistake_is_named_with_its_cure(bad, cure):
    with pytest.raises(PlanError, match=cure):
        build(TASK, bad)


def test_bounded_symbol_takes_its_upper_bound():
    assert PlanBuilder(KernelTask(GRAPH, (Symbol("s0", 2, 100),))).next_power_of_2(S0) == 128


@pytest.mark.parametrize("data", [{}, {"inputs": [], "steps": [{"step": "exec"}], "outputs": []}, {"inputs": 1}])
def test_a_broken_text_is_refused(data):
    with pytest.raises(PlanError):
        LaunchPlan.from_json(data)
