"""Red team: every cheat is caught where it should be, again with that layer off, and its honest twin passes."""

from __future__ import annotations

import pytest
from cheats import CASES, HONEST, TEXTS, TRITON_CASES, TRITON_HONEST
from court import NOT_RUN, ONLY, Court
from tasks import SOFTMAX, softmax, triton_softmax

from torch_kevolve.evaluation import judge
from torch_kevolve.evaluation.policy import problem_of
from torch_kevolve.evidence import Stage


@pytest.fixture(scope="module", autouse=True)
def hurry():
    """Nothing here is about speed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (("GLANCE_S", 0.01), ("LOOK_S", 0.02), ("PATIENCE_S", {})):
            patch.setattr(judge, name, seconds)
        yield


@pytest.fixture(scope="module")
def court():
    made = Court()
    yield made
    made.close()


@pytest.fixture(scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        made = Court()
        yield made
        made.close()


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_twin_passes(court, name):
    task, candidate, binding = HONEST[name]
    evidence = court.evidence(task, binding, candidate)
    assert evidence.ok and evidence.reached is Stage.DONE, evidence.note


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cheat_is_caught_and_again_with_that_layer_off(court, case):
    caught_twice(court, case)


def test_an_honest_triton_kernel_passes(interpreter):
    evidence = interpreter.evidence(SOFTMAX, {}, TRITON_HONEST)
    assert evidence.ok and evidence.reached is Stage.DONE, evidence.note


@pytest.mark.parametrize("case", TRITON_CASES, ids=lambda case: case.name)
def test_a_triton_cheat_is_caught_and_again_with_that_layer_off(interpreter, case):
    caught_twice(interpreter, case)


def caught_twice(court, case):
    evidence = court.evidence(case.task, case.binding, case.candidate)
    assert (evidence.ok, evidence.reached) == (False, case.stage), (evidence.reached, evidence.note)
    assert case.word in evidence.note, evidence.note
    assert evidence.signature
    if case.then == NOT_RUN:
        return
    again = court.evidence(case.task, case.binding, case.candidate, case.first)
    if case.then == ONLY:
        assert again.ok, (again.reached, again.note)
    else:
        stage, word = case.then
        assert (again.ok, again.reached) == (False, stage) and word in again.note, (again.reached, again.note)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_does_more_than_compute_is_refused_with_its_line(name):
    _, before, between, word = TEXTS[name]
    bad = triton_softmax(before=before, between=between or "pass")
    problem = problem_of(bad)
    assert problem.startswith("line ") and word in problem, problem


CALLS = {
    "fork": ("int fork()", "int p = fork(); if (p < 0) return; if (p == 0) _exit(0);", "void _exit(int)"),
    "socket": ("int socket(int, int, int)", "if (socket(2, 1, 0) < 0) return;", "int unused()"),
    "kill": ("int kill(int, int)", "if (kill(1, 0) < 0) return;", "int unused()"),
    "execve": (
        "int execve(const char*, char**, char**); int* __errno_location()",
        'execve("/no/such", nullptr, nullptr); if (*__errno_location() == 1) return;',
        "int unused()",
    ),
    "setrlimit": (
        "int setrlimit(int, const void*); int getrlimit(int, void*)",
        "unsigned long now[2]; getrlimit(7, now); if (setrlimit(7, now) < 0) return;",
        "int unused()",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_filter_refuses_what_the_policy_let_through(court, name):
    """The kernel is right where the call succeeds: with the filter its output stays unwritten, without it passes."""
    first, body, second = CALLS[name]
    bad = softmax(top=f'extern "C" {{ {first}; {second}; }}', before=body)
    assert not court.evidence(SOFTMAX, {}, bad).ok
    refused = court.evidence(SOFTMAX, {}, bad, "text", "object")
    assert (refused.reached, refused.ok) == (Stage.VERIFY, False) and "NaN" in refused.note, refused.note
    free = court.evidence(SOFTMAX, {}, bad, "text", "object", "lock")
    assert free.ok, free.note


def test_there_are_enough_of_them():
    assert len(CASES) + len(TRITON_CASES) + len(TEXTS) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
