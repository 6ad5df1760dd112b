"""Task: the canonical form and its key."""

import json
import subprocess
import sys

import pytest

from torch_kevolve.errors import TaskError
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import DType, KernelTask, Op, Ref, TaskGraph, TensorSpec, canonical

S9 = symbol("s9")
ROW = TensorSpec("float32", (S9, 4), (4, 1))
COLUMN = TensorSpec("float32", (S9, 1), (1, 1))


def op(target, *args, out=ROW, **kwargs):
    return Op(target, args, (out,), tuple(sorted(kwargs.items())))


def softmax(dead=False, swapped=False):
    """Softmax, optionally with a dead operator, or with its independent operators in the other order."""
    ops = [
        op("aten.amax.default", Ref(0), (-1,), True, out=COLUMN),
        op("aten.sub.Tensor", Ref(0), Ref(1)),
        op("aten.exp.default", Ref(2)),
        op("aten.sum.dim_IntList", Ref(3), (-1,), True, out=COLUMN),
        op("aten.div.Tensor", Ref(3), Ref(4)),
    ]
    if dead:
        ops.append(op("aten.neg.default", Ref(0)))
    return TaskGraph((ROW,), tuple(ops), (Ref(5),))


def task(graph):
    made, _, names = canonical(graph)
    return KernelTask(made, tuple(Symbol(names[old]) for old in names))


def test_key_survives_json():
    one = task(softmax())
    again = KernelTask.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one and again.key == one.key


def test_dead_work_leaves_no_trace():
    assert task(softmax(dead=True)).key == task(softmax()).key


def test_order_of_inputs_and_independent_operators_leaves_no_trace():
    a, b = TensorSpec("float32", (8,), (1,)), TensorSpec("bfloat16", (8,), (1,))
    out = TensorSpec("float32", (8,), (1,))
    first = TaskGraph(
        (a, b),
        (
            op("aten.exp.default", Ref(0), out=a),
            op("aten.neg.default", Ref(1), out=b),
            op("aten.add.Tensor", Ref(2), Ref(3), out=out),
        ),
        (Ref(4),),
    )
    second = TaskGraph(
        (b, a),
        (
            op("aten.neg.default", Ref(0), out=b),
            op("aten.exp.default", Ref(1), out=a),
            op("aten.add.Tensor", Ref(3), Ref(2), out=out),
        ),
        (Ref(4),),
    )
    made, places, _ = canonical(second)
    assert made == canonical(first)[0] and places == (1, 0)


def test_what_is_computed_is_in_the_key_and_how_it_is_judged_is_not():
    graph, _, _ = canonical(softmax())
    plain = KernelTask(graph, (Symbol("s0"),))
    assert KernelTask(graph, (Symbol("s0"),), numerics="strict").key != plain.key
    assert KernelTask(graph, (Symbol("s0"),), flags=(("tf32", "1"),)).key != plain.key
    assert KernelTask(graph, (Symbol("s0", 2, 9),)).key != plain.key
    assert KernelTask(graph, (Symbol("s0"),), twin=graph).key == plain.key


def test_key_is_the_same_in_another_process():
    text = json.dumps(task(softmax()).to_json())
    code = (
        "import json,sys; from torch_kevolve.task import KernelTask; "
        "print(KernelTask.from_json(json.loads(sys.argv[1])).key)"
    )
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == task(softmax()).key


def test_key_is_the_same_for_ever():
    """A changed key orphans every stored kernel: raise FORM and rekey on purpose, never by accident."""
    assert task(softmax()).key[:16] == "8b51a2627fc81768"


def test_symbols_get_numbers():
    at = task(softmax()).at({"s0": 7})
    assert at.graph.inputs[0].shape == (7, 4) and at.symbols == ()


def test_floats_and_dtypes_are_exact():
    values = (0.1, float("inf"), float("-inf"), -0.0, 1e-45)
    graph = TaskGraph((ROW,), (op("aten.full.default", Ref(0), values, dtype=DType("bfloat16")),), (Ref(1),))
    again = TaskGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert repr(again.ops[0].args[1]) == repr(values) and again == graph


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["ops"][0].update(op="os.system"),
        lambda d: d["ops"][0].update(args=[{"v": 3}]),
        lambda d: d.update(outputs=[[99, 0]]),
        lambda d: d.update(outputs=[[1, 1]]),
        lambda d: d["inputs"][0].update(dtype="complex64"),
        lambda d: d.pop("ops"),
    ],
)
def test_a_broken_text_is_refused(change):
    data = softmax().to_json()
    change(data)
    with pytest.raises(TaskError):
        TaskGraph.from_json(data)
