"""Judge: right candidates pass, wrong ones are refused at the stage that should catch them."""

import time

import pytest

from samples import softmax_task
from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evaluation import EVALUATORS
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evidence import Stage
from torch_kevolve.plan import build
from torch_kevolve.settings import Settings
from torch_kevolve.task import TensorSpec

R, C = 64, 1000
X = TensorSpec("float32", (R, C), (C, 1))

HEAD = """
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
"""
BODY = """
extern "C" void softmax(float* x, float* y, int64_t rows, int64_t cols) {
  %(before)s
  #pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) {
    const float* a = x + r * cols; float* o = y + r * cols;
    float m = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < cols; i++) m = (a[i] > m || a[i] != a[i]) ? a[i] : m;
    double s = 0;
    for (int64_t i = 0; i < cols; i++) s += (o[i] = std::exp(a[i] - m));
    for (int64_t i = 0; i < cols; i++) o[i] = %(last)s;
  }
  %(after)s
}
"""


def softmax(before="", last="(float)(o[i] / s)", after="", source=None):
    def launch(p, x):
        y = p.empty_output()
        p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
        return y

    text = source if source is not None else HEAD + BODY % {"before": before, "last": last, "after": after}
    return Candidate("cpp", text, build(softmax_task(R, C), launch), Provenance("scripted"))


WRONG = {
    "wrong by a thousandth": (softmax(last="(float)(o[i] / s) * 1.001f"), Stage.VERIFY, "error"),
    "zeros": (softmax(last="0.f"), Stage.VERIFY, ""),
    "last row forgotten": (softmax(before="rows -= 1;"), Stage.VERIFY, ""),
    "nan dropped": (softmax(last="(s == s ? (float)(o[i] / s) : 0.f)"), Stage.VERIFY, "NaN pattern"),
    "write past the end": (softmax(after="y[rows * cols] = 1.f;"), Stage.PROBE, "past its end"),
    "write before the start": (softmax(after="y[-1] = 1.f;"), Stage.PROBE, "before its start"),
    "input changed": (softmax(after="x[7] += 1.f;"), Stage.PROBE, "input was changed"),
    "does not compile": (softmax(before="int oops = ;"), Stage.COMPILE, "kernel.cpp:8"),
    "asks the system": (softmax(before='system("true");'), Stage.POLICY, "system"),
    "another header": (softmax(source="#include <unistd.h>\n"), Stage.POLICY, "line 1"),
    "inline assembler": (softmax(before='asm("nop");'), Stage.POLICY, "asm"),
    "no such function": (softmax(source=HEAD + 'extern "C" void other(float*) {}'), Stage.LAUNCH, "softmax"),
}
FATAL = {
    "segfault": (softmax(before="*(volatile int*)8 = 1;"), "SIGSEGV"),
    "division trap": (softmax(before="__builtin_trap();"), "crashed"),
    "spins for ever": (softmax(before="for (volatile int64_t i = 0;; i++) {}"), "killed"),
    "eats memory": (
        softmax(before="for (int64_t k = 0; k < 4096; k++) { volatile char* p = (char*)malloc(1ll << 27); p[0] = 1; }"),
        "SIGSEGV",
    ),
}


@pytest.fixture(scope="module")
def settings():
    return Settings.make({"candidate_s": 8, "memory_fraction": 0.1}, {})


@pytest.fixture(scope="module", params=["inline", "local"])
def trial(request, settings):
    evaluator = EVALUATORS[request.param]()
    trial = evaluator.open(Job(softmax_task(R, C), {}, "cpu", time.monotonic() + 300), settings)
    yield trial
    trial.close()
    evaluator.close()


@pytest.fixture(scope="module")
def walled(settings):
    evaluator = EVALUATORS["local"]()
    trial = evaluator.open(Job(softmax_task(R, C), {}, "cpu", time.monotonic() + 300), settings)
    yield trial
    trial.close()
    evaluator.close()


def judged(trial, *candidates):
    return {candidate.id: evidence for candidate, evidence in trial.evaluate(candidates)}


def test_a_right_candidate_is_measured_and_confirmed(trial):
    good = softmax()
    evidence = judged(trial, good)[good.id]
    assert evidence.reached is Stage.DONE and evidence.ok, evidence.note
    assert evidence.ratio > 0 and evidence.ratio_lo <= evidence.ratio_hi and "candidate" in evidence.arms
    assert evidence.errors[0].rms < 1e-6 and evidence.flags["malloc"]
    again = trial.confirm(good)
    assert again.ok and {"eager", "inductor", "max_autotune", "candidate"} <= set(again.arms), again.note


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_refused_where_it_should_be(trial, name):
    bad, stage, word = WRONG[name]
    evidence = judged(trial, bad)[bad.id]
    assert (evidence.reached, evidence.ok) == (stage, False), evidence.note
    assert word in evidence.note


@pytest.mark.parametrize("name", FATAL)
def test_a_fatal_candidate_costs_itself_only(walled, name):
    bad, word = FATAL[name]
    good = softmax()
    evidence = judged(walled, bad, good)
    assert not evidence[bad.id].ok and word in evidence[bad.id].note, evidence[bad.id].note
    assert evidence[good.id].ok, evidence[good.id].note


def test_the_twin_itself_passes(trial):
    task = softmax_task(R, C)

    def launch(p, x):
        return p.aten("aten._softmax.default", (x, -1, False), (X,))

    twin = Candidate("aten", "", build(task, launch), Provenance("template", "twin"))
    evidence = judged(trial, twin)[twin.id]
    assert evidence.ok, evidence.note
