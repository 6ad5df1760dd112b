"""Tasks: small ones, each with an honest kernel and room for dishonest ones."""

from __future__ import annotations

from typing import Any

from court import cpp

from samples import softmax_task
from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.plan import build
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

R, C = 12, 251
HEAD = "".join(f"#include <{name}>\n" for name in ("cmath", "cstdint", "cstdlib", "cstring", "limits", "omp.h"))
X, COLUMN = TensorSpec("float32", (R, C), (C, 1)), TensorSpec("float32", (R, 1), (1, 1))


SOFTMAX = softmax_task(R, C)
SOFTMAX_BODY = """
%(top)s
extern "C" void softmax(float* x, float* y, int64_t rows, int64_t cols) {
  %(before)s
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * cols; float* o = y + r * cols;
    float m = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < cols; i++) m = (a[i] > m || a[i] != a[i]) ? a[i] : m;
    %(m)s
    %(sum)s s = 0;
    for (int64_t i = 0; i < cols; i++) s += (%(sum)s)(o[i] = std::exp(a[i] - m));
    for (int64_t i = 0; i < cols; i++) o[i] = %(last)s;
  }
  %(after)s
}
"""


def softmax(
    top: str = "",
    before: str = "",
    m: str = "",
    sum: str = "double",
    last: str = "(float)(o[i] / s)",
    after: str = "",
    head: str = HEAD,
) -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
        return y

    body = SOFTMAX_BODY % {"top": top, "before": before, "m": m, "sum": sum, "last": last, "after": after}
    return cpp(SOFTMAX, head + body, launch)


def scratch_softmax(first: str, wait: str = "") -> Candidate:
    """Row maxima go through scratch memory; the first half of the team makes them, the second half uses them."""
    source = """
extern "C" void softmax(float* x, float* y, float* top, int64_t rows, int64_t cols) {
  #pragma omp parallel num_threads(2)
  {
    if (omp_get_thread_num() == 0) {
      for (volatile int64_t k = 0; k < %(spin)s; k++) {}
      for (int64_t r = %(first)s; r < rows; r++) {
        float m = x[r * cols];
        for (int64_t i = 1; i < cols; i++) m = (x[r * cols + i] > m || x[r * cols + i] != x[r * cols + i]) ?
          x[r * cols + i] : m;
        top[r] = m;
      }
    }
    %(wait)s
    #pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      double s = 0;
      for (int64_t i = 0; i < cols; i++) s += (y[r * cols + i] = std::exp(x[r * cols + i] - top[r]));
      for (int64_t i = 0; i < cols; i++) y[r * cols + i] /= s;
    }
  }
}
"""

    def launch(p: Any, x: Any) -> Any:
        y, top = p.empty_output(), p.empty((R,), "float32")
        p.run("softmax", args=(x, y, top, x.shape[0], x.shape[1]))
        return y

    spin = "0" if wait else "20000000"
    return cpp(SOFTMAX, HEAD + source % {"first": first, "wait": wait, "spin": spin}, launch)


TURNED = TensorSpec("float32", (R, C), (1, R))
TURNED_SUM = KernelTask(
    TaskGraph((TURNED,), (Op("aten.sum.dim_IntList", (Ref(0), (-1,), True), (COLUMN,)),), (Ref(1),))
)
SUM_BODY = """
extern "C" void total(float* x, float* y, int64_t rows, int64_t cols, int64_t down, int64_t right) {
  %s
  for (int64_t r = 0; r < rows; r++) {
    double s = 0;
    for (int64_t i = 0; i < cols; i++) s += x[r * down + i * right];
    y[r] = (float)s;
  }
}
"""


def total(task: KernelTask, before: str = "") -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("total", args=(x, y, *x.shape, *x.strides))
        return y

    return cpp(task, HEAD + SUM_BODY % before, launch)


S0 = symbol("s0")
WIDE = TensorSpec("float32", (R, S0), (S0, 1))
ANY_SUM = KernelTask(
    TaskGraph((WIDE,), (Op("aten.sum.dim_IntList", (Ref(0), (-1,), True), (COLUMN,)),), (Ref(1),)), (Symbol("s0", 2),)
)

VARIANCE = KernelTask(
    TaskGraph(
        (X,),
        (
            Op("aten.mean.dim", (Ref(0), (-1,), True), (COLUMN,)),
            Op("aten.sub.Tensor", (Ref(0), Ref(1)), (X,)),
            Op("aten.mul.Tensor", (Ref(2), Ref(2)), (X,)),
            Op("aten.mean.dim", (Ref(3), (-1,), True), (COLUMN,)),
        ),
        (Ref(4),),
    )
)
TWO_PASSES = """
    double s = 0, q = 0;
    for (int64_t i = 0; i < cols; i++) s += a[i];
    for (int64_t i = 0; i < cols; i++) q += (a[i] - s / cols) * (a[i] - s / cols);
    y[r] = (float)(q / cols);"""
ONE_PASS = """
    float s = 0, q = 0;
    for (int64_t i = 0; i < cols; i++) { s += a[i]; q += a[i] * a[i]; }
    y[r] = q / cols - (s / cols) * (s / cols);"""

CANCELS = """
    double s = 0, q = 0;
    for (int64_t i = 0; i < cols; i++) { s += a[i]; q += a[i] * a[i]; }
    y[r] = (float)(q / cols) - (float)(s / cols) * (float)(s / cols);"""


def variance(body: str) -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("variance", args=(x, y, *x.shape))
        return y

    source = """
extern "C" void variance(float* x, float* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * cols;%s
  }
}
"""
    return cpp(VARIANCE, HEAD + source % body, launch)


LONGS, SUMS = TensorSpec("int64", (R, C), (C, 1), low=-(2**40), high=2**40), TensorSpec("int64", (R, 1), (1, 1))
LONG_SUM = KernelTask(TaskGraph((LONGS,), (Op("aten.sum.dim_IntList", (Ref(0), (-1,), True), (SUMS,)),), (Ref(1),)))


def long_sum(kind: str = "int64_t") -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("total", args=(x, y, *x.shape))
        return y

    source = """
extern "C" void total(int64_t* x, int64_t* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r++) {
    %s s = 0;
    for (int64_t i = 0; i < cols; i++) s += x[r * cols + i];
    y[r] = s;
  }
}
"""
    return cpp(LONG_SUM, HEAD + source % kind, launch)


CHOICES = TensorSpec("int64", (R,), (1,))
ARGMAX = KernelTask(
    TaskGraph(
        (X,),
        (Op("aten.abs.default", (Ref(0),), (X,)), Op("aten.argmax.default", (Ref(1), 1), (CHOICES,))),
        (Ref(2),),
    )
)


def argmax(change: str = "", nans: str = "|| a[i] != a[i]") -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("best", args=(x, y, *x.shape))
        return y

    source = """
extern "C" void best(float* x, int64_t* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * cols;
    int64_t b = 0;
    for (int64_t i = 1; i < cols && a[b] == a[b]; i++) if (std::fabs(a[i]) > std::fabs(a[b]) %s) b = i;
    y[r] = b %s;
  }
}
"""
    return cpp(ARGMAX, HEAD + source % (nans, change), launch)


N = 70_001
LINE = TensorSpec("float32", (N,), (1,))
EXP = KernelTask(TaskGraph((LINE,), (Op("aten.exp.default", (Ref(0),), (LINE,)),), (Ref(1),)))
EXP_BODY = """
extern "C" void kernel(float* x, float* y, int64_t n) {
  for (int64_t k = 0; k < n; k++) { %s i = (%s)k; y[i] = std::exp(x[i]); }
}
"""


def exponential(index: str = "int64_t") -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("kernel", args=(x, y, N))
        return y

    return cpp(EXP, HEAD + EXP_BODY % (index, index), launch)


def library(launch: Any, source: str = "") -> Candidate:
    """A plan that calls the library, with or without a kernel beside it."""
    return Candidate("cpp" if source else "aten", source, build(EXP, launch), Provenance("scripted"))


TRITON_HEAD = "import triton\nimport triton.language as tl\n\n"
TRITON = """
@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    a = tl.load(x + row * n + cols%(load)s)
    %(between)s
    e = tl.exp(a - %(top)s)
    tl.store(y + row * n + cols, e / tl.sum(e, axis=0)%(store)s)
"""


def triton_softmax(
    load: str = ", mask=cols < n, other=float('-inf')",
    store: str = ", mask=cols < n",
    top: str = "tl.max(a, axis=0)",
    between: str = "pass",
    before: str = "",
    rows: int = R,
) -> Candidate:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("softmax", grid=(rows,), args=(x, y, C), BLOCK=p.next_power_of_2(C))
        return y

    text = TRITON_HEAD + before + TRITON % {"load": load, "store": store, "top": top, "between": between}
    return Candidate("triton", text, build(SOFTMAX, launch), Provenance("scripted"))
