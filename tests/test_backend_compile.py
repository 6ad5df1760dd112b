"""torch.compile(model, backend="kevolve"), end to end on a CPU; kernels are real, the judge is a double."""

import dataclasses
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import samples
import torch_kevolve
from forced import forced
from torch_kevolve import one_graph
from torch_kevolve import session as session_module
from torch_kevolve.backend import explain, metrics, report_regions, reset_metrics
from torch_kevolve.errors import EvaluationError
from torch_kevolve.lowering import passage as passages
from torch_kevolve.lowering import replace as replacing
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.session import Session
from torch_kevolve.settings import Settings

KEYS = {"regions", "replaced", "hits", "misses", "searches", "candidates", "left"}


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
def passes(monkeypatch):
    """The pass's name each time it ran."""
    ran = []
    inner = replacing.replace_regions

    def counted(graph, work, passage):
        ran.append(work.hooks.uuid)
        inner(graph, work, passage)

    monkeypatch.setattr(replacing, "replace_regions", counted)
    return ran


def softmax(x):
    return torch.softmax(x, -1)


def compiled(function, **options):
    torch._dynamo.reset()
    options = {"gate": "off", "on_error": "raise", "effort": "none", **options}
    given = {f"kevolve.{name}": value for name, value in options.items() if "." not in name}
    return torch.compile(function, backend="kevolve", options=given)


def run(function, *args, **options):
    with torch.no_grad():
        return compiled(function, **options)(*args)


X = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))


def session():
    return Session.open(Settings.make())


def test_a_region_is_replaced_and_computes_what_eager_does():
    with forced() as judge:
        made = run(softmax, X, effort="quick")
    torch.testing.assert_close(made, softmax(X))
    counts = metrics()
    assert set(counts) == KEYS and counts["left"] == {}
    assert (counts["regions"], counts["replaced"], counts["searches"], counts["misses"]) == (1, 1, 1, 1)
    assert counts["candidates"] > 0 and len(judge.opened) == 1
    assert torch_kevolve.metrics() == counts


def test_effort_none_searches_nothing_and_says_so():
    with forced() as judge:
        made = run(softmax, X)
    torch.testing.assert_close(made, softmax(X))
    assert not judge.opened and metrics()["left"] == {"not-searched": 1} and metrics()["candidates"] == 0
    assert [wish["share"] > 0 for wish in session().store.wishes()] == [True]


def test_a_kernel_gained_is_used_next_time_and_another_leaves_the_hit_alone(passes):
    run(softmax, X)
    assert passes == [None], "no record: Inductor's caches are passed by"
    run(softmax, X)
    run(softmax, X)
    assert len(passes) == 2 and passes[1] is not None, "the third time Inductor's cache answers"
    assert metrics()["regions"] == 3, "the record counts where the pass does not run"

    with forced():
        run(lambda x: torch.softmax(x * 2, -1), torch.randn(32, 300), effort="quick")
    before = len(passes)
    run(softmax, X)
    assert len(passes) == before, "a kernel for another graph"

    with forced():
        run(softmax, X, effort="quick")
    reset_metrics()
    made = run(softmax, X)
    assert metrics()["replaced"] == 1
    ran = len(passes)
    run(softmax, X)
    assert len(passes) == ran and metrics()["replaced"] == 2 and metrics()["regions"] == 2
    torch.testing.assert_close(made, softmax(X))


def test_a_kernel_put_by_someone_else_is_picked_up(passes):
    with forced():
        run(softmax, X, effort="quick")
    (kernel,) = session().store.ls()
    session().store.remove(kernel.task.key, kernel.fingerprint, "a test")
    run(softmax, X)
    run(softmax, X)
    assert report_regions()[-1].status == "left"
    ran = len(passes)
    session().store.put(kernel)
    run(softmax, X)
    assert len(passes) == ran + 1 and report_regions()[-1].status == "replaced"


def test_a_changed_body_under_the_same_task_is_never_served_stale():
    with forced():
        run(softmax, X, effort="quick")
    (kernel,) = session().store.ls()
    run(softmax, X)
    source = kernel.candidate.source
    place = source.rindex('extern "C"')
    body = source.index("{", place) + 1
    sevens = " if (true) { for (int i = 0; i < 64 * 500; i++) y0[i] = 7.0f; return; } "
    other = dataclasses.replace(kernel.candidate, source=source[:body] + sevens + source[body:])
    session().store.put(dataclasses.replace(kernel, candidate=other))
    made = run(softmax, X)
    assert report_regions()[-1].kernel != kernel.key
    assert torch.equal(made, torch.full_like(X, 7.0))


def test_forward_and_backward_see_one_frozen_name(passes):
    def loss(x):
        return torch.nn.functional.layer_norm(x, (500,)).softmax(-1)

    x = X.clone().requires_grad_()
    with forced():
        compiled(loss, effort="quick")(x).square().sum().backward()
        assert passes == [None, None]
        first = x.grad
        x.grad = None
        compiled(loss)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, first)
    assert len(passes) == 4 and passes[2] == passes[3] is not None
    eager = X.clone().requires_grad_()
    loss(eager).square().sum().backward()
    torch.testing.assert_close(x.grad, eager.grad, rtol=1e-4, atol=1e-6)
    assert {region.phase for region in report_regions()} == {"forward", "backward"}


def test_a_record_keeps_the_backward_when_only_the_forward_is_compiled():
    x = X.clone().requires_grad_()
    with forced():
        compiled(softmax, effort="quick")(x).square().sum().backward()
    compiled(softmax)(x)
    (record,) = _records()
    assert {region.phase for region in record.regions} == {"forward", "backward"}


def _records():
    store = session().store
    found = [store.get_record(path.stem) for path in (Settings.make().home_path / "records").glob("*.json")]
    return [record for record in found if isinstance(record, GraphRecord) and len(record.regions) > 0]


def test_failures_of_our_own_fall_back_or_raise(monkeypatch):
    def broken(*_):
        raise RuntimeError("our own fault")

    monkeypatch.setattr(Session, "choose", broken)
    torch.testing.assert_close(run(softmax, X, on_error="fallback"), softmax(X))
    assert metrics()["left"].get("session") == 2, "one fault, one region"
    with pytest.raises(Exception, match="our own fault"):
        run(softmax, X, on_error="raise")


def test_a_backend_that_breaks_at_the_door_leaves_the_graph_to_inductor(monkeypatch, passes):
    def broken(*_):
        raise RuntimeError("no store")

    monkeypatch.setattr(Session, "open", broken)
    torch.testing.assert_close(run(softmax, X, on_error="fallback"), softmax(X))
    assert metrics()["left"] == {"backend": 1}
    torch.testing.assert_close(run(softmax, X, on_error="fallback"), softmax(X))
    assert len(passes) == 1, "Inductor's caches answer"
    with pytest.raises(Exception, match="no store"):
        run(softmax, X, on_error="raise")


def test_ctrl_c_ends_the_search_not_the_compile(monkeypatch):
    with forced() as judge:

        def stop(candidates):
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(judge, "evaluate", stop)
        made = run(softmax, X, effort="quick")
    torch.testing.assert_close(made, softmax(X))
    assert metrics()["left"] == {"interrupted": 1}


def test_unknown_options_are_named_with_the_nearest():
    with pytest.raises(Exception, match=r"kevolve\.efort.*kevolve\.effort"):
        torch.compile(softmax, backend="kevolve", options={"kevolve.efort": "none"})(X)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_pass_through(mode):
    with torch.no_grad(), forced():
        made = torch.compile(softmax, backend="kevolve", mode=mode)(X)
    torch.testing.assert_close(made, softmax(X))


@pytest.mark.parametrize("training", [False, True])
def test_what_a_compilation_worked_with_dies_with_its_functions(training):
    gc.collect()
    before = set(passages._WORKS)
    made = compiled(softmax)
    out = made(X.clone().requires_grad_(training))
    if training:
        out.sum().backward()
    del made, out
    torch._dynamo.reset()
    gc.collect()
    assert set(passages._WORKS) <= before


def test_a_backward_that_is_compiled_later_still_finds_its_work(passes):
    x = X.clone().requires_grad_()
    out = compiled(softmax)(x)
    gc.collect()
    assert len(passes) == 1
    out.sum().backward()
    assert len(passes) == 2 and {region.phase for region in report_regions()} == {"forward", "backward"}


WARM = """
import sys, torch
def softmax(x):
    return torch.softmax(x, -1)
with torch.no_grad():
    options = {"kevolve.gate": "off", "kevolve.effort": "none"}
    torch.compile(softmax, backend="kevolve", options=options)(torch.ones(9, 33))
heavy = ("diskcache", "psutil", "rich", "click")
ours = ("agent", "graph_memory", "evaluation", "languages", "hunt", "templates", "lowering.regions", "lowering.splice")
ours = tuple("torch_kevolve." + name for name in ours)
print(sorted(name for name in sys.modules if name in heavy or name.startswith(ours)))
"""


def test_where_inductors_cache_answers_nothing_of_the_search_is_loaded():
    said = [subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True) for _ in range(3)]
    assert "torch_kevolve.lowering.regions" in said[1].stdout, "the pass ran"
    assert said[2].stdout.strip() == "[]"


def test_one_purse_per_call_of_torch_compile(monkeypatch):
    seen = []
    made = one_graph.OneGraph.compile

    def spy(self):
        seen.append(self.purse)
        return made(self)

    monkeypatch.setattr(one_graph.OneGraph, "compile", spy)

    def broken(x):
        y = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return y.cumsum(-1)

    torch._dynamo.reset()
    one = torch.compile(broken, backend="kevolve", options={"kevolve.effort": "none"})
    one(X)
    one(torch.randn(3, 7))
    other = torch.compile(lambda x: x.exp().sum(-1), backend="kevolve", options={"kevolve.effort": "none"})
    other(X)
    assert len(seen) >= 4 and len({id(purse) for purse in seen[:-1]}) == 1 and seen[-1] is not seen[0]


def test_python_floats_under_dynamic_shapes_restart_through_us():
    def scale(x, by):
        return torch.softmax(x * by, -1)

    torch._dynamo.reset()
    made = torch.compile(scale, backend="kevolve", dynamic=True, options={"kevolve.effort": "none"})
    for by in (0.5, 0.25):
        torch.testing.assert_close(made(X, by), scale(X, by))


def test_many_threads_call_at_once():
    made = compiled(softmax, effort="quick")
    inputs = [torch.randn(16, 100 + 8 * (i % 3)) for i in range(32)]
    barrier = threading.Barrier(32)

    def call(x):
        barrier.wait()
        with torch.no_grad():
            return made(x)

    with forced(), ThreadPoolExecutor(32) as pool:
        outs = list(pool.map(call, inputs))
    for x, out in zip(inputs, outs, strict=True):
        torch.testing.assert_close(out, softmax(x))


def test_explain_names_every_region_in_both_phases():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(500)

        def forward(self, x):
            return torch.softmax(self.norm(x), -1)

    net = Net()
    with forced():
        said = explain(net, X, options={"kevolve.gate": "off"})
    assert all(p.grad is None for p in net.parameters())
    assert {row["phase"] for row in said["regions"]} == {"forward", "backward"}
    for row in said["regions"]:
        assert {"task", "status", "reason", "kernel", "ratio"} <= set(row)
        assert row["status"] in ("replaced", "left") and row["reason"]
    replaced = [row for row in said["regions"] if row["status"] == "replaced"]
    assert replaced and all(len(row["kernel"]) == 64 and row["ratio"] == 2.0 for row in replaced)


def test_explain_leaves_what_is_compiled_alone_and_says_the_same_on_a_hit(passes):
    net = torch.nn.Softmax(-1).eval()
    mine = torch.compile(net, backend="kevolve", options={"kevolve.effort": "none"})
    with torch.no_grad():
        mine(X)
    first = explain(net, X, options={"kevolve.effort": "none"})
    ran = len(passes)
    second = explain(net, X, options={"kevolve.effort": "none"})
    assert first == second and len(first["regions"]) == 1 and len(passes) == ran
    with torch.no_grad():
        mine(X)
    assert len(passes) == ran


def test_a_finished_record_is_reopened_by_a_harder_effort(passes):
    with forced() as judge:
        judge.confirm = lambda candidate: samples.evidence(0.5)
        run(softmax, X, effort="quick")
        assert metrics()["left"] == {"not-faster": 1}
        run(softmax, X, effort="quick")
        run(softmax, X, effort="quick")
        assert len(judge.opened) == 1 and len(passes) == 2, "decided at this effort"
        run(softmax, X, effort="full")
        assert len(judge.opened) == 2 and passes[-1] is None


def two(x):
    return torch.softmax(x, -1).cumsum(0)


def test_what_the_budget_did_not_reach_waits_for_a_larger_one_or_a_harder_effort(passes):
    with forced() as judge:
        run(two, X, effort="quick", budget_s=0)
        assert metrics()["left"] == {"budget": 2} and not judge.opened
        run(two, X, effort="quick", budget_s=0)
        run(two, X, effort="quick", budget_s=0)
        run(two, X, effort="none")
        assert len(passes) == 2 and passes[1] is not None, "decided for this budget"
        run(two, X, effort="quick", budget_s=30)
        assert len(passes) == 3 and passes[-1] is None and len(judge.opened) == 2
    assert report_regions()[-1].status == "replaced"


def test_a_smaller_budget_reopens_nothing_and_a_harder_effort_does():
    left = RegionVerdict("t", "left", "budget", "inference", undecided=True, effort="quick", budget_s=60.0)
    assert not left.open_to("quick", 60.0) and not left.open_to("quick", 10.0) and not left.open_to("none", 1e9)
    assert left.open_to("quick", 61.0) and left.open_to("full", 10.0)
    assert dataclasses.replace(left, reason="interrupted").open_to("quick", 60.0)


def test_under_a_frozen_name_nothing_is_searched_even_where_inductor_compiles_anew(passes, monkeypatch, tmp_path):
    with forced() as judge:
        run(two, X, effort="quick", budget_s=0)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cold"))
        run(two, X, effort="quick", budget_s=0)
        run(two, X)
    assert not judge.opened and passes[1] is not None
    (record,) = _records()
    assert {(r.reason, r.effort) for r in record.regions} == {("budget", "quick")}, "effort none closes nothing anew"


@pytest.mark.parametrize(
    ("error", "reason"), [(EvaluationError(detail="no worker"), "evaluation"), (RuntimeError("our own"), "session")]
)
def test_a_graph_whose_evaluation_or_search_breaks_is_compiled_anew_twice(passes, error, reason):
    with forced() as judge:

        def broken(job, settings):
            judge.opened.append(job.task)
            raise error

        judge.open = broken
        for ran in (1, 2, 3, 3, 3):
            run(softmax, X, effort="quick", on_error="fallback")
            assert len(passes) == ran and len(judge.opened) == min(ran, 2)
        faults = 2 if reason == "session" else 0
        assert metrics()["left"] == {reason: 5 + faults} and passes[:2] == [None, None] and passes[2] is not None


def test_a_rank_that_never_searches_does_not_wait_for_one_that_does(passes, monkeypatch):
    """Of a pipeline's ranks each has graphs that no other one compiles."""
    monkeypatch.setattr(session_module, "_local_rank", lambda: 1)
    with forced() as judge:
        for ran in (1, 2, 2):
            run(softmax, X, effort="quick")
            assert len(passes) == ran and not judge.opened
        assert metrics()["left"] == {"another-rank-searches": 3} and passes[0] is None is not passes[1]
        monkeypatch.setattr(session_module, "_local_rank", lambda: 0)
        run(softmax, X, effort="quick")
    assert passes[2] is None and report_regions()[-1].status == "replaced"


def test_a_kernel_that_went_is_searched_for_again(passes):
    with forced() as judge:
        run(softmax, X, effort="quick")
        (kernel,) = session().store.ls()
        session().store.remove(kernel.task.key, kernel.fingerprint, "a test")
        run(softmax, X, effort="quick")
    assert passes == [None, None] and len(judge.opened) == 2 and report_regions()[-1].status == "replaced"
