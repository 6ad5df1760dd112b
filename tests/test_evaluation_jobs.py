"""Jobs of other kinds: symbolic sizes, frozen weights, large ones, chosen indices; and cheats that need them."""

import time
from dataclasses import replace

import pytest

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import LEAST_JUDGED, Job
from torch_kevolve.evaluation.exhibits import TEMPORARIES, Exhibits
from torch_kevolve.evaluation.inputs import DISTRIBUTIONS, SPECIAL
from torch_kevolve.evaluation.judge import Judge
from torch_kevolve.evaluation.port import DirectPort
from torch_kevolve.evaluation.switches import Switches
from torch_kevolve.evidence import Stage
from torch_kevolve.plan import build
from torch_kevolve.settings import Settings
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

HEAD = "#include <cmath>\n#include <cstdint>\n#include <cstring>\n"
SETTINGS = Settings.make({"candidate_s": 20, "memory_fraction": 0.1}, {})
S0 = symbol("s0")
X = TensorSpec("float32", (S0, 24), (24, 1))
W = TensorSpec("float32", (24, 16), (16, 1), frozen=True)
Y = TensorSpec("float32", (S0, 16), (16, 1))
MM = KernelTask(TaskGraph((X, W), (Op("aten.mm.default", (Ref(0), Ref(1)), (Y,)),), (Ref(2),)), (Symbol("s0", 2),))
MM_BODY = """
extern "C" void mm(float* x, float* w, float* y, int64_t n) {
  %s
  for (int64_t i = 0; i < n; i++) for (int64_t j = 0; j < 16; j++) {
    double s = 0;
    for (int64_t k = 0; k < 24; k++) s += (double)x[i * 24 + k] * w[k * 16 + j];
    y[i * 16 + j] = (float)s;
  }
}
"""


def mm(before="", prepared=False):
    def launch(p, x, w):
        y = p.empty_output()
        if prepared:
            (w,) = p.prepare(lambda q: q.aten("aten.clone.default", (w,), (replace(W, frozen=False),)))
        p.run("mm", args=(x, w, y, x.shape[0]))
        return y

    return Candidate("cpp", HEAD + MM_BODY % before, build(MM, launch), Provenance("scripted"))


def judge(task, binding, frozen=False, settings=SETTINGS):
    """A judge in this process whose baseline is eager alone: Inductor has its own tests."""
    made = Judge(Job(task, binding, "cpu", time.monotonic() + 300, frozen), settings, DirectPort())
    made._compile_arms = lambda wanted, needed=False: ""
    made.open()
    return made


@pytest.fixture(scope="module")
def dynamic():
    made = judge(MM, {"s0": 50})
    yield made
    made.close()


def verdict(judge_, candidate):
    ((_, evidence),) = judge_.evaluate([candidate])
    return evidence


CHEATS = {
    "honest": ("", Stage.DONE, ""),
    "right at the real size only": ("if (n != 50) return;", Stage.VERIFY, "NaN"),
    "wrong at odd sizes": ("if (n % 2) n--;", Stage.VERIFY, ""),
    "returns early when the work seems done": (
        "double f = 0; for (int64_t k = 0; k < 24; k++) f += (double)x[k] * w[k * 16]; if (y[0] == (float)f) return;",
        Stage.DONE,
        "",
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_symbolic_sizes_are_judged_at_several(dynamic, name):
    before, stage, word = CHEATS[name]
    evidence = verdict(dynamic, mm(before))
    assert (evidence.reached, word in evidence.note) == (stage, True), evidence.note
    assert evidence.sizes == {"s0": 50}


def test_prepared_weights_are_right_in_timed_runs(dynamic):
    evidence = verdict(dynamic, mm(prepared=True))
    assert evidence.ok, evidence.note
    assert dynamic.exhibits.timed == [0, 1]
    first, second = (dynamic.exhibits.all[n] for n in (0, 1))
    assert first.rows[1] == second.rows[1] and first.rows[0] != second.rows[0]


def test_after_the_deadline_only_the_least_are_begun(dynamic):
    job = dynamic.job
    dynamic.job, dynamic._judged = replace(job, deadline=time.monotonic() - 1), LEAST_JUDGED - 1
    try:
        assert len(list(dynamic.evaluate([mm(), mm(prepared=True)]))) == 1
        assert list(dynamic.evaluate([mm(), mm(prepared=True)])) == []
    finally:
        dynamic.job = job


def test_an_output_of_another_layout_is_refused(dynamic):
    def launch(p, x, w):
        y = p.empty((x.shape[0], 16), "float32", strides=(1, x.shape[0]))
        p.run("mm", args=(x, w, y, x.shape[0]))
        return y

    evidence = verdict(dynamic, Candidate("cpp", mm().source, build(MM, launch), Provenance("scripted")))
    assert evidence.reached is Stage.VERIFY and "strides" in evidence.note


def test_a_kernel_that_leaves_what_was_there_in_timed_runs_is_refused(dynamic):
    """It works on poisoned buffers and does nothing on others."""
    check = "uint32_t b; memcpy(&b, y, 4); if (b != 0xFFFFFFFFu && b != 0x3C3C3C3Cu) return;"
    evidence = verdict(dynamic, mm(check))
    assert evidence.reached is Stage.MEASURE and "timed run" in evidence.note, evidence.note


def test_a_job_that_memory_cannot_keep_is_judged_draw_by_draw(monkeypatch):
    task = MM.at({"s0": 4000})
    job = Job(task, {}, "cpu", time.monotonic() + 100)
    exhibits = Exhibits(job, SETTINGS, 0)
    assert not exhibits.lean
    monkeypatch.setattr(Exhibits, "memory_allowed", lambda self: 4_500_000)
    assert Exhibits(job, SETTINGS, 0).lean
    made = judge(task, {})
    try:
        assert made.exhibits.lean and all(exhibit.answer is None for exhibit in made.exhibits.all)
        monkeypatch.setattr(Exhibits, "memory_allowed", lambda self: 1 << 30)
        for before, stage in (("", Stage.DONE), ("n -= 1;", Stage.VERIFY), ("x[0] += 1;", Stage.PROBE)):

            def launch(p, x, w):
                y = p.empty_output()
                p.run("mm", args=(x, w, y, 4000))
                return y

            evidence = verdict(made, Candidate("cpp", mm(before).source, build(task, launch), Provenance("scripted")))
            assert evidence.reached is stage, evidence.note
    finally:
        made.close()
    monkeypatch.setattr(Exhibits, "memory_allowed", lambda self: 10_000)
    with pytest.raises(EvaluationError, match="needs"):
        Exhibits(job, SETTINGS, 0)


def test_a_job_is_judged_with_torch_set_as_the_task_says():
    flags = {"deterministic": "1", "precision": "medium", "bf16_reduction": "0"}
    there, before = Switches(True, True, "medium", False), Switches.now()
    assert Switches.of(flags) == there and Switches.of({"tf32": "1"}) == Switches(precision="high")
    made = judge(replace(MM.at({"s0": 40}), flags=tuple(flags.items())), {})
    try:
        assert Switches.now() == there
        before.put()
        assert made.port.call(made.exhibits.setup_message(True), 10.0) == {}
        assert Switches.now() == there, "the worker, too, where it is another process"
    finally:
        made.close()
    assert Switches.now() == before


ALL = [*DISTRIBUTIONS, *SPECIAL]
ROOM = [
    (1000, 11, ALL, False),
    (1000, 10, ["normal", "again", "rows", "special", "offset"], False),
    (4100, 11, ["normal", "again", "rows", "special", "offset"], False),
    (4100, 4, ["normal", "rows", "special", "offset"], False),
    (4100, 3, ["normal", "rows", "special"], False),
    (4100, 2, ["normal", "again", "rows", "special", "offset"], True),
]


@pytest.mark.parametrize(("columns", "fit", "names", "lean"), ROOM)
def test_where_memory_is_short_fewer_draws_are_kept_rather_than_none(monkeypatch, columns, fit, names, lean):
    """`fit`: draws that fit beside the work of one reference. Above 16 M elements few are made."""
    x = TensorSpec("float32", (4096, columns), (columns, 1))
    job = Job(KernelTask(TaskGraph((x,), (Op("aten.exp.default", (Ref(0),), (x,)),), (Ref(1),))), {}, "cpu", 0.0)
    count = 4096 * columns
    draw, work = (4 + 4 + 8) * count, (TEMPORARIES * 8 + 4) * count
    monkeypatch.setattr(Exhibits, "memory_allowed", lambda self: fit * draw + work)
    made = Exhibits(job, SETTINGS, 0)
    assert ([draw.distribution for draw, _ in made._plan()], made.lean) == (names, lean)


def test_frozen_weights_freeze_inductor_too():
    job = Job(MM.at({"s0": 64}), {}, "cpu", time.monotonic() + 200, frozen=True)
    made = Judge(job, SETTINGS, DirectPort())
    try:
        made.open()
        assert {"eager", "inductor"} <= set(made.baselines), made.notes
    finally:
        made.close()


ROWS, INDEX = TensorSpec("float32", (33, 40), (40, 1)), TensorSpec("int64", (33,), (1,))
ARGMAX = KernelTask(
    TaskGraph(
        (ROWS,),
        (Op("aten.exp.default", (Ref(0),), (ROWS,)), Op("aten.argmax.default", (Ref(1), 1), (INDEX,))),
        (Ref(2),),
    )
)
ARGMAX_BODY = """
extern "C" void best(float* x, int64_t* y) {
  for (int64_t i = 0; i < 33; i++) {
    int64_t b = 0;
    for (int64_t j = 1; j < 40; j++) if (x[i * 40 + j] > x[i * 40 + b] || x[i * 40 + j] != x[i * 40 + j]) {
      b = j; if (x[i * 40 + j] != x[i * 40 + j]) break; }
    y[i] = b %s;
  }
}
"""


@pytest.mark.parametrize("change, fine", [("", True), ("/ 2", False), ("+ 1000", False)])
def test_a_chosen_index_is_judged_by_its_value(change, fine):
    def launch(p, x):
        y = p.empty_output()
        p.run("best", args=(x, y))
        return y

    made = judge(ARGMAX, {})
    try:
        candidate = Candidate("cpp", HEAD + ARGMAX_BODY % change, build(ARGMAX, launch), Provenance("scripted"))
        evidence = verdict(made, candidate)
        assert (evidence.reached is Stage.DONE) == fine, evidence.note
    finally:
        made.close()
