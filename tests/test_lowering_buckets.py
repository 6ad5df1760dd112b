"""Buckets: kernels of dynamic sizes are for the bucket of the call's sizes, and Dynamo dispatches on it."""

import inspect

import pytest
import torch
from lowering_kernels import Recorder, is_softmax, softmax

from forced import forced
from torch_kevolve import one_graph
from torch_kevolve.backend import report_regions, reset_metrics
from torch_kevolve.lowering import inductor
from torch_kevolve.lowering import race as racing
from torch_kevolve.lowering import replace as replacing
from torch_kevolve.lowering.buckets import Buckets, bucket
from torch_kevolve.lowering.dispatch import Dispatch
from torch_kevolve.session import Session


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A home and Inductor caches of this test's own: what one test keeps, another must not find."""
    monkeypatch.setenv("KEVOLVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("KEVOLVE_STORE", "disk")
    torch._dynamo.reset()
    reset_metrics()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """Whether a graph was compiled for a bucket, each time Dynamo handed one over."""
    seen = []

    def spy(gm, facts, buckets=False):
        seen.append(buckets)
        return inner(gm, facts, buckets)

    inner = one_graph.graph_key
    monkeypatch.setattr(one_graph, "graph_key", spy)
    return seen


@pytest.fixture
def passes(monkeypatch):
    """The pass's name each time it ran."""
    ran = []
    inner = replacing.replace_regions

    def counted(graph, work, passage):
        ran.append(work.hooks.uuid)
        inner(graph, work, passage)

    monkeypatch.setattr(replacing, "replace_regions", counted)
    return ran


def rows(x):
    return torch.softmax(x, -1)


def compiled(function=rows, dynamic=True, **options):
    torch._dynamo.reset()
    options = {"gate": "off", "on_error": "raise", "effort": "quick", **options}
    given = {f"kevolve.{name}": value for name, value in options.items()}
    return torch.compile(function, backend="kevolve", dynamic=dynamic, fullgraph=True, options=given)


def agree(call, function, *shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    with torch.no_grad(), forced() as judge:
        torch.testing.assert_close(call(x), function(x))
    return [[(s.lo, s.hi) for s in task.symbols] for task in judge.opened]


def test_every_size_is_in_one_bucket_that_ends_with_a_power_of_two():
    ends = [bucket(size) for size in (2, 17, 257, 4097, 65537)]
    assert ends == [(0, 16), (17, 256), (257, 4096), (4097, 65536), (65537, None)]
    for low, high in ends[:-1]:
        assert bucket(low) == bucket(high) == (low, high) != bucket(high + 1)
    assert bucket(10**9) == (65537, None)


def test_each_bucket_has_kernels_of_its_own_and_inside_one_nothing_is_compiled_again(graphs):
    call = compiled()
    assert agree(call, rows, 8, 10) == [[(2, 16), (2, 16)]]
    assert agree(call, rows, 16, 3) == []
    assert agree(call, rows, 8, 300) == [[(2, 16), (257, 4096)]]
    assert agree(call, rows, 2, 4096) == []
    for shape in ((9, 13), (9, 1024)):
        assert agree(call, rows, *shape) == []
    assert graphs == [True] * 2
    placed = report_regions()
    assert len({region.kernel for region in placed}) == len({region.task for region in placed}) == 2
    assert placed[1].detail == "s0 2 to 16, s1 257 to 4096"


def test_switched_off_one_kernel_serves_all(graphs):
    call = compiled(buckets="off")
    assert agree(call, rows, 8, 10) == [[(2, None), (2, None)]]
    assert agree(call, rows, 100, 5000) == [] and graphs == [False]


def test_a_size_that_is_a_product_stays_where_its_symbols_stay():
    def flat(x):
        return torch.softmax(x.reshape(-1, 24).sort().values, -1)

    call = compiled(flat)
    assert agree(call, flat, 4, 30, 24) == [[(34, 4096)]]
    assert agree(call, flat, 16, 256, 24) == []
    assert agree(call, flat, 20, 30, 24) == [[(289, 65536)]]


def test_a_negative_integer_is_in_no_bucket():
    def padded(x, less):
        return torch.softmax(torch.nn.functional.pad(x, (0, 0, 0, -less)).sort(0).values, 0)

    call = compiled(padded)
    for rows, less in ((30, -300), (200, -900), (40, 30)):
        x = torch.randn(rows, 40)
        with torch.no_grad(), forced() as judge:
            torch.testing.assert_close(call(x, less), padded(x, less))
        for task in judge.opened:
            assert task.symbols[0].hi is None, "with less from 0 to 16 there would be 256 rows at most"
    assert [region.status for region in report_regions()] == ["left", "replaced"]


def test_a_dimension_with_a_promised_range_keeps_all_of_it(graphs):
    call = compiled(dynamic=None)

    def marked(*shape):
        x = torch.randn(*shape)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.no_grad(), forced() as judge:
            torch.testing.assert_close(call(x), rows(x))
        return [[(s.lo, s.hi) for s in task.symbols] for task in judge.opened]

    assert marked(8, 10) == [[(2, 64), (2, 16)]]
    assert marked(60, 12) == []
    assert marked(8, 300) == [[(2, 64), (257, 4096)]]
    assert len(graphs) == 2


def test_gradients_are_right_in_every_bucket(graphs):
    def both(x):
        return torch.nn.functional.layer_norm(x, (x.shape[-1],)).softmax(-1)

    call, ranges = compiled(both), []
    for shape in ((8, 300), (9, 400), (40, 300)):
        x = torch.randn(*shape, requires_grad=True)
        weight = torch.randn(*shape)
        with forced() as judge:
            (call(x) * weight).sum().backward()
        mine, x.grad = x.grad, None
        (both(x) * weight).sum().backward()
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-6)
        ranges.append({tuple((s.lo, s.hi) for s in task.symbols) for task in judge.opened})
    assert ranges == [{((2, 16), (257, 4096))}, set(), {((17, 256), (257, 4096))}]
    assert {region.phase for region in report_regions()} == {"forward", "backward"}
    assert len(graphs) == 2


def test_caches_answer_for_the_bucket_they_were_filled_for_and_for_no_other(passes):
    agree(compiled(), rows, 8, 300)
    agree(compiled(), rows, 9, 400)
    assert passes[0] is None and passes[1] is not None, "the second time the record names it, and it is cached"
    call = compiled()
    assert agree(call, rows, 10, 500) == [] and len(passes) == 2, "the third time the cache answers"
    assert agree(call, rows, 10, 20) == [[(2, 16), (17, 256)]], "its guards are those of the bucket"
    assert len(passes) == 3 and passes[2] is None
    agree(compiled(), rows, 10, 30)
    assert len(passes) == 4 and passes[3] not in (None, passes[1])
    agree(compiled(), rows, 11, 40)
    agree(compiled(), rows, 11, 600)
    assert len(passes) == 4


def counting(recorder):
    """A backend with the recorder's kernels in buckets, and the shapes that it compiled for."""
    shapes, inner = [], recorder.backend()

    def backend(gm, inputs):
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return inner(gm, inputs)

    torch._dynamo.reset()
    return torch.compile(rows, backend=backend, dynamic=True), shapes


def test_a_region_that_is_left_adds_no_guard():
    recorder = Recorder(lambda task: None, buckets=True)
    call, shapes = counting(recorder)
    for shape in ((8, 10), (8, 300), (20, 300)):
        agree(call, rows, *shape)
    assert len(shapes) == 1 and [(s.lo, s.hi) for s in recorder.seen[0].task.symbols] == [(2, 16), (2, 16)]


@pytest.mark.parametrize("uuid", [None, "frozen"])
def test_a_guard_comes_with_the_kernels(uuid):
    call, shapes = counting(Recorder(softmax, is_softmax, buckets=True, uuid=uuid))
    for shape in ((8, 10), (8, 300), (9, 400)):
        agree(call, rows, *shape)
    assert len(shapes) == 2


@pytest.mark.parametrize(("kernels_ms", "compilations"), [(1.0, 2), (9.0, 1)])
def test_the_guard_waits_for_the_race_of_the_whole_graph(kernels_ms, compilations, monkeypatch):
    monkeypatch.setattr(racing, "race", lambda arms, *_: {"plain": 3.0, "kernels": kernels_ms})
    recorder = Recorder(softmax, is_softmax, buckets=True, gate_on=True)
    call, shapes = counting(recorder)
    for shape in ((8, 10), (8, 300)):
        agree(call, rows, *shape)
    assert len(shapes) == len(recorder.gates) == compilations and recorder.faults == []


def guarding(call=rows, **given):
    """Compiled by nobody, but guarded as if every graph held kernels. Was each for a bucket, and which one ran?"""
    bucketed, ran = [], []

    def backend(gm, inputs):
        dispatch, number = Dispatch.now(), len(bucketed)
        bucketed.append(dispatch is not None and dispatch.bucketed)
        if bucketed[-1]:
            dispatch.buckets.guard(dispatch.buckets.env.var_to_range)
        if dispatch is not None:
            dispatch.settle()

        def run(*args):
            ran.append(number)
            return gm.forward(*args)

        return run

    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=True, **given), bucketed, ran


SIZES = (2, 16, 17, 256, 257, 4096, 4097)


@pytest.mark.parametrize(("dynamic", "most"), [(True, 3), (None, 4)])
def test_dynamos_limit_is_never_reached(dynamic, most):
    call, bucketed, _ = guarding(dynamic=dynamic)
    for a in SIZES:
        for b in SIZES:
            x = torch.empty(a, b)
            assert call(x).shape == x.shape  # fullgraph: beyond the limit Dynamo raises
    assert bucketed == [True] * 2 + [False] * (most - 2)


def test_one_that_serves_all_sizes_leaves_the_buckets_theirs():
    call, bucketed, ran = guarding(dynamic=True)
    sizes = ((8, 10), (8, 70000), (300, 10), (20, 20), (20, 9000), (9, 80000), (12, 12), (20, 30), (400, 5))
    for a, b in sizes:
        call(torch.empty(a, b))
    assert ran == [0, 1, 2, 2, 2, 1, 0, 2, 2] and len(bucketed) == 3
    other, bucketed, _ = guarding(lambda x: x + 1, dynamic=True)
    for a, b in sizes:
        other(torch.empty(a, b))
    assert len(bucketed) == 3, "what was compiled before a reset of Dynamo is forgotten"


def test_a_promised_range_is_kept_though_an_earlier_bucket_lies_in_it():
    call, bucketed, ran = guarding(dynamic=True)
    call(torch.empty(8, 10))
    for rows in (20, 8):
        x = torch.empty(rows, 10)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        call(x)
    assert bucketed == [True, True] and ran[:2] == [0, 1]


def test_a_size_is_never_narrowed_to_one_value():
    seen = []

    def backend(gm, inputs):
        buckets = Buckets.now()
        seen.extend(buckets.range_of(name) for name in buckets.env.var_to_range)
        buckets.guard(buckets.env.var_to_range)
        return gm.forward

    def short(x):
        torch._check(x.shape[0] <= 17)
        return x + 1

    torch._dynamo.reset()
    call = torch.compile(short, backend=backend, dynamic=True)
    for rows in (17, 9, 3):
        x = torch.ones(rows, 20)
        torch._dynamo.mark_dynamic(x, 0)
        call(x)
    assert [(int(r.lower), int(r.upper)) for r in seen] == [(2, 17), (17, 256)]


def test_no_guard_where_dynamo_may_not_compile_again_or_drops_guards():
    assert Dispatch.now() is None, "Dynamo is not at work"
    ways = [{"options": {"guard_filter_fn": lambda guards: [False] * len(guards)}}, {"recompile_limit": 2}]
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:  # torch 2.11
        ways.pop()
    for given in ways:
        call, bucketed, _ = guarding(dynamic=True, **given)
        call(torch.empty(3, 4))
        assert bucketed == [False], given
    with torch._dynamo.config.patch(error_on_recompile=True):
        call, bucketed, _ = guarding(dynamic=True)
        call(torch.empty(3, 4))
    assert bucketed == [False]


def test_kernels_of_a_bucket_run_on_after_another_was_left(monkeypatch):
    ran, inner = [], inductor.compile

    def spy(*args):
        made, number = inner(*args), len(report_regions())

        def run(*given):
            ran.append(number)
            return made(*given)

        return run

    monkeypatch.setattr(inductor, "compile", spy)
    call = compiled()
    agree(call, rows, 8, 300)
    monkeypatch.setattr(Session, "choose", lambda self, wanted, *_: {})
    for shape in ((8, 20), (300, 20), (9, 400), (9, 22)):
        agree(call, rows, *shape)
    assert [region.status for region in report_regions()] == ["replaced", "left"]
    assert ran == [1, 2, 2, 1, 2]
