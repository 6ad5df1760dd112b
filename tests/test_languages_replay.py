"""Replay: a plan does the same after a trip through JSON, and can be read."""

import json

import torch

from torch_kevolve.languages.replay import Replay, replay, show
from torch_kevolve.plan import LaunchPlan, build
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import DType, KernelTask, Op, Ref, TaskGraph, TensorSpec

S0 = symbol("s0")
X = TensorSpec("float32", (S0, 8), (8, 1))
W = TensorSpec("float32", (8, 4), (4, 1), frozen=True)
PACKED = TensorSpec("float32", (4, 8), (8, 1))
Y = TensorSpec("float32", (S0, 4), (4, 1))
TASK = KernelTask(TaskGraph((X, W), (Op("aten.mm.default", (Ref(0), Ref(1)), (Y,)),), (Ref(2),)), (Symbol("s0", 0),))


def launch(p, x, w):
    rows = x.shape[0]

    def pack(q):
        (turned,) = q.aten("aten.permute.default", (w, (1, 0)), (PACKED,))
        return q.aten("aten.clone.default", (turned,), (PACKED,))

    (packed,) = p.prepare(pack)
    y = p.zeros((rows, 4), "float32")
    p.run("matmul", grid=(p.cdiv(rows, 16),), args=(x, packed, y, rows, 0.5, True), BLOCK=16, num_warps=4)
    return y


GOLDEN = """\
def launch(p, x0, x1):
    with prepared_once():
        t0 = aten.permute.default(x1, (1, 0))
        t1 = aten.clone.default(t0)
    t2 = p.zeros((s0, 4), 'float32', strides=(4, 1))
    p.run("matmul", grid=(((s0 + 15)//16),), args=(x0, t1, t2, s0, 0.5, True), BLOCK=16, num_warps=4)
    return t2
"""


class Launches:
    """A launcher that does the work on tensors and remembers how it was called."""

    def __init__(self):
        self.seen = []

    def __call__(self, kernel, grid, args, meta, options):
        x, packed, y, rows, scale, flag = args
        self.seen.append((kernel, grid, rows, scale, flag, dict(meta), dict(options), packed.data_ptr()))
        y.add_(x @ packed.t() * scale)


def test_a_plan_can_be_read():
    assert show(build(TASK, launch)) == GOLDEN


def test_a_plan_does_the_same_after_a_trip_through_json():
    plan = build(TASK, launch)
    again = LaunchPlan.from_json(json.loads(json.dumps(plan.to_json())))
    x, w = torch.randn(33, 8), torch.randn(8, 4)
    first, second = Launches(), Launches()
    (a,), (b,) = replay(plan, TASK, (x, w), first), replay(again, TASK, (x, w), second)
    assert again == plan and torch.equal(a, b)
    torch.testing.assert_close(a, x @ w * 0.5)
    assert [row[:-1] for row in first.seen] == [row[:-1] for row in second.seen]
    assert first.seen[0][:-1] == ("matmul", (3,), 33, 0.5, True, {"BLOCK": 16}, {"num_warps": 4})


def test_prepared_steps_run_once_per_version_of_the_weights():
    launches = Launches()
    plan = Replay(build(TASK, launch), TASK, launches)
    x, w = torch.randn(5, 8), torch.randn(8, 4)
    plan(x, w)
    plan(torch.randn(5, 8), w)
    assert launches.seen[0][-1] == launches.seen[1][-1]
    w.mul_(2)
    (y,) = plan(x, w)
    torch.testing.assert_close(y, x @ w * 0.5)
    other = w.clone()
    other[0] = 0
    (y,) = plan(x, other)
    torch.testing.assert_close(y, x @ other * 0.5)


def test_sizes_are_worked_out_anew_for_other_shapes():
    launches = Launches()
    plan = Replay(build(TASK, launch), TASK, launches)
    w = torch.randn(8, 4)
    for rows in (3, 40, 3):
        (y,) = plan(torch.ones(rows, 8), w)
        assert tuple(y.shape) == (rows, 4)
    assert [row[1] for row in launches.seen] == [(1,), (3,), (1,)]


def test_an_empty_grid_launches_nothing():
    launches = Launches()
    plan = Replay(build(TASK, launch), TASK, launches)
    (y,) = plan(torch.ones(0, 8), torch.ones(8, 4))
    assert tuple(y.shape) == (0, 4) and not launches.seen and plan.launches == 0


def test_inductors_own_prims_are_found_in_a_bare_process():
    """A worker that had not imported Inductor refused every max-pool: its operator was not registered yet."""
    import subprocess
    import sys

    code = (
        "from torch_kevolve.languages.replay import operator; "
        "print(operator('prims._low_memory_max_pool_with_offsets.default'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "prims._low_memory_max_pool_with_offsets.default", done.stderr


def test_a_library_call_that_makes_a_tensor_of_nothing_is_told_where():
    x, places = TensorSpec("float32", (4,), (1,)), TensorSpec("int64", (4,), (1,))
    kwargs = {"start": 0, "step": 1, "dtype": DType("int64")}
    task = KernelTask(TaskGraph((x,), (Op("prims.iota.default", (4,), (places,), tuple(kwargs.items())),), (Ref(1),)))
    plan = build(task, lambda p, x: p.aten("prims.iota.default", (4,), (places,), kwargs))
    (out,) = replay(plan, task, (torch.zeros(4),), None)
    assert out.tolist() == [0, 1, 2, 3]
