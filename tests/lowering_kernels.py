"""Kernels written by hand for the tests of lowering: right, plain and slow."""

from samples import evidence, fingerprint
from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.kernel import Kernel
from torch_kevolve.lowering.hooks import Choice, Hooks
from torch_kevolve.plan import build

SOFTMAX = """
#include <cmath>
#include <cstdint>
#pragma GCC optimize("tree-loop-vectorize","fp-contract=fast","no-math-errno")
extern "C" void softmax(const float* __restrict x, float* __restrict y, int64_t rows, int64_t n) {
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * n;
    float* b = y + r * n;
    float m = -INFINITY, s = 0;
    for (int64_t i = 0; i < n; i++) m = a[i] > m ? a[i] : m;
    for (int64_t i = 0; i < n; i++) { b[i] = std::exp(a[i] - m); s += b[i]; }
    for (int64_t i = 0; i < n; i++) b[i] = b[i] / s * FACTORf;
  }
}
"""


def softmax(task, factor="1.0"):
    def launch(p, x):
        y = p.empty_output()
        p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
        return y

    return kernel(task, "cpp", SOFTMAX.replace("FACTOR", factor), launch)


def kernel(task, language, source, launch):
    return Kernel(task, fingerprint(), Candidate(language, source, build(task, launch), Provenance("test")), evidence())


class Recorder:
    """Hooks that serve `make(task)` for tasks that `wants(task)`, and remember all that they were told."""

    def __init__(self, make, wants=lambda task: True, **hooks):
        self.make, self.wants = make, wants
        self.seen, self.verdicts, self.gates, self.faults = [], [], [], []
        self.hooks = Hooks(
            claims=lambda task, binding: wants(task),
            choose=self.choose,
            note=lambda phase, rows: self.verdicts.extend(rows),
            gate=lambda phase, verdict: self.gates.append((phase, dict(verdict))),
            fault=lambda reason, error: self.faults.append((reason, error)),
            **{"gate_on": False, "min_share": 0.0, **hooks},
        )

    def choose(self, wanted):
        self.seen.extend(wanted)
        out = {}
        for each in wanted:
            made = self.make(each.task)
            out[each.task.key] = Choice(kernel=made, reason="" if made else "no-kernel", ratio=2.0)
        return out

    def backend(self, **patches):
        from torch_kevolve.lowering.inductor import compile

        return lambda gm, inputs, **_: compile(gm, inputs, self.hooks, patches)

    @property
    def replaced(self):
        return [row for row in self.verdicts if row.status == "replaced"]


def is_softmax(task):
    return task.graph.targets == ("aten.amax.default", "aten.sub.Tensor", "aten.exp.default", "aten.sum.dim_IntList",
                                  "aten.div.Tensor")  # fmt: skip
