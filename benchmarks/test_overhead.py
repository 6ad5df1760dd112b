"""Host overhead of a replaced region: a compiled model with kernels in it beside the same one by plain Inductor.

    pytest benchmarks/test_overhead.py --benchmark-enable --benchmark-columns=median,iqr,rounds

The regions are softmaxes over a few numbers, so a call is all host work: what differs between the two programs is how
the kernel is called. `extra_info["us_per_region"]` is the difference of the two medians of interleaved calls over the
number of regions; goal: at most 2. It may be negative, since Inductor's kernels do some work too. `test_call` is free
of that: one call of a baked kernel that does nothing, with two tensors and two sizes. `test_baked` compares one kernel
as the graph has it with the same one as a search built and timed it: `extra_info["ratio"]`, goal within 5 % of 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowering_kernels import Recorder, is_softmax, kernel
from torch import Tensor

from torch_kevolve.lowering.bake_text import Entry
from torch_kevolve.plan import Buffer, Run
from torch_kevolve.plan import Tensor as Plan
from torch_kevolve.sizes import symbol

REGIONS = 16
ROUNDS, CALLS = 300, 50
SOURCE = """
#include <cmath>
#include <cstdint>
extern "C" void softmax(const float* __restrict x, float* __restrict y, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * n;
    float* b = y + r * n;
    float m = -INFINITY, s = 0;
    for (int64_t i = 0; i < n; i++) m = a[i] > m ? a[i] : m;
    for (int64_t i = 0; i < n; i++) { b[i] = std::exp(a[i] - m); s += b[i]; }
    for (int64_t i = 0; i < n; i++) b[i] = b[i] / s;
  }
}
"""


def softmaxes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One region for each: Inductor does not fuse them, since no two have one size."""
    return tuple(torch.softmax(x, -1) for x in tensors)


def chain(x: Tensor) -> Tensor:
    """Regions that depend on one another, between operators that are Inductor's own."""
    for _ in range(REGIONS):
        x = torch.softmax(x, -1).cumsum(-1)
    return x


def softmax(task: Any) -> Any:
    def launch(p: Any, x: Any) -> Any:
        y = p.empty_output()
        p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
        return y

    return kernel(task, "cpp", SOURCE, launch)


def inputs(name: str) -> tuple[Tensor, ...]:
    if name == "chain":
        return (torch.rand(2, 8),)
    return tuple(torch.rand(2, 8 + i) for i in range(REGIONS))


PROGRAMS: dict[str, Callable[..., Any]] = {"softmaxes": softmaxes, "chain": chain}


def compiled(name: str, dynamic: bool) -> tuple[Callable[..., Any], Callable[..., Any], Recorder]:
    """Plain Inductor's program, ours, and what ours recorded. Both are checked against eager."""
    args = inputs(name)
    made: list[Callable[..., Any]] = []
    recorder = Recorder(softmax, is_softmax)
    for backend in ("inductor", recorder.backend()):
        torch._dynamo.reset()
        made.append(torch.compile(PROGRAMS[name], backend=backend, dynamic=dynamic))
        torch.testing.assert_close(made[-1](*args), PROGRAMS[name](*args))
    return made[0], made[1], recorder


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, of `CALLS` in a row."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS


def test_call(benchmark: Any) -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    source = 'extern "C" void nothing(const float* x, float* y, int64_t rows, int64_t n) {}'
    tensor, shape = Plan("x", (2, 8), "float32", (8, 1)), (symbol("s0"), symbol("s1"))
    run = Run("nothing", (), (tensor, dataclasses.replace(tensor, name="y"), *shape))
    entry = Entry(source, (run,), (), ("x",), (Buffer("y", "float32", (2, 8), (8, 1)),), ("s0", "s1"), "0" * 64)
    text = "#include <cstdint>\n" + entry.text("kernel", shared=False)
    call = CppPythonBindingsCodeCache.load_pybinding(entry.arg_types, text)
    x, y = torch.rand(2, 8), torch.rand(2, 8)
    benchmark(lambda: call(x, y, 2, 8))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_overhead(benchmark: Any, name: str, dynamic: bool) -> None:
    plain, ours, recorder = compiled(name, dynamic)
    assert len(recorder.replaced) == REGIONS and not recorder.faults
    args = inputs(name)
    with torch.no_grad():
        for _ in range(3):
            seconds(lambda: plain(*args)), seconds(lambda: ours(*args))
        pairs = [(seconds(lambda: plain(*args)), seconds(lambda: ours(*args))) for _ in range(ROUNDS)]
        benchmark(lambda: ours(*args))
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    each = statistics.median(b - a for a, b in pairs) / REGIONS
    benchmark.extra_info.update(
        regions=REGIONS,
        us_inductor=round(theirs * 1e6, 3),
        us_kevolve=round(mine * 1e6, 3),
        us_per_region=round(each * 1e6, 3),
    )
    print(f"\n{name} dynamic={dynamic}: {benchmark.extra_info}")


def test_baked(benchmark: Any, tmp_path: Any) -> None:
    from torch_kevolve.languages.cpp import Cpp
    from torch_kevolve.languages.replay import Replay

    x = torch.rand(2048, 4096)
    recorder = Recorder(softmax, is_softmax)
    torch._dynamo.reset()
    baked = torch.compile(lambda x: torch.softmax(x, -1), backend=recorder.backend())
    with torch.no_grad():
        expected = baked(x)
        task = recorder.seen[0].task
        candidate, member = softmax(task).candidate, Cpp()
        built = member.build(candidate, {}, "cpu:native", tmp_path)
        assert built.ok, built.note
        searched = Replay(candidate.plan, task, member.load(built, candidate))
        assert torch.equal(searched(x)[0], expected)
        pairs = []
        for place in range(30):
            pair = [0.0, 0.0]
            for which in (0, 1) if place % 2 else (1, 0):
                started = time.perf_counter()
                baked(x) if which == 0 else searched(x)
                pair[which] = time.perf_counter() - started
            pairs.append(pair)
        benchmark.pedantic(lambda: baked(x), rounds=5)
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    benchmark.extra_info.update(ms_baked=round(mine * 1e3, 3), ms_search=round(theirs * 1e3, 3))
    benchmark.extra_info["ratio"] = round(statistics.median(a / b for a, b in pairs), 4)
    print(f"\nbaked: {benchmark.extra_info}")
