"""Samples: small whole objects for tests."""

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evidence import Errors, Evidence, Stage, Timing
from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.plan import build
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

ROW = TensorSpec("float32", (8, 16), (16, 1))


def task(target="aten.exp.default"):
    """One pointwise operator over 8 x 16 floats."""
    return KernelTask(TaskGraph((ROW,), (Op(target, (Ref(0),), (ROW,)),), (Ref(1),)))


def softmax_task(rows, columns):
    """softmax over the rows of fp32, decomposed, with the library's own as its twin."""
    x, column = TensorSpec("float32", (rows, columns), (columns, 1)), TensorSpec("float32", (rows, 1), (1, 1))
    ops = (
        Op("aten.amax.default", (Ref(0), (-1,), True), (column,)),
        Op("aten.sub.Tensor", (Ref(0), Ref(1)), (x,)),
        Op("aten.exp.default", (Ref(2),), (x,)),
        Op("aten.sum.dim_IntList", (Ref(3), (-1,), True), (column,)),
        Op("aten.div.Tensor", (Ref(3), Ref(4)), (x,)),
    )
    twin = TaskGraph((x,), (Op("aten._softmax.default", (Ref(0), -1, False), (x,)),), (Ref(1),))
    return KernelTask(TaskGraph((x,), ops, (Ref(5),)), twin=twin)


def candidate(source="// exp", **provenance):
    def launch(p, x):
        y = p.empty_output()
        p.run("kernel", args=(x, y, x.shape[0]))
        return y

    made = Provenance("template", "sample", (("U", 4),), strategies=("vectorise",))
    return Candidate("cpp", source, build(task(), launch), made)


def evidence(ratio=2.0, ok=True, **more):
    return Evidence(
        reached=Stage.DONE if ok else Stage.VERIFY,
        ok=ok,
        errors=(Errors(1e-8, 1e-7),),
        errors_twin=(Errors(1e-8, 1e-7),),
        arms={"eager": Timing(ratio, ratio, ratio, 9), "candidate": Timing(1.0, 1.0, 1.0, 9)},
        ratio=ratio,
        ratio_lo=ratio * 0.98,
        ratio_hi=ratio * 1.02,
        **more,
    )


def fingerprint(**change):
    return Fingerprint.of(
        {"vendor": "AMD CPU", "arch": "x", "name": "sample", "units": 2, "memory": "", "isa": "", **change}
    )


def kernel(source="// exp", ratio=2.0, ok=True):
    return Kernel(task(), fingerprint(), candidate(source), evidence(ratio, ok))
