"""The whole-graph gate where CUDA graphs are asked for; the condition is a double, so that a CPU can show it."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from lowering_kernels import Recorder, is_softmax, kernel, softmax

from torch_kevolve.devices import current
from torch_kevolve.lowering import inductor, race
from torch_kevolve.lowering.graph_pass import RegionPass

THROWS = """
#include <cstdint>
#include <stdexcept>
extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t n) {
  if (rows > 0) throw std::runtime_error("only at the call");
}
"""


def around(x):
    return torch.softmax(x, -1) + 1


@pytest.fixture
def x():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def compilations(monkeypatch):
    """(our pass in it, the box that asks for a graph, Inductor's switch) of each compilation, under such a mode."""
    from torch._inductor import compile_fx, config

    inner, seen = compile_fx.compile_fx_inner, []

    def spy(gm, inputs, *args, **kwargs):
        ours = isinstance(config.post_grad_custom_pre_pass, RegionPass)
        seen.append((ours, kwargs["cudagraphs"].value, config.triton.cudagraphs))
        return inner(gm, inputs, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    monkeypatch.setattr(inductor, "_graphs_asked", lambda kwargs: True)
    return seen


def run(recorder, x):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(around, backend=recorder.backend(**{"triton.cudagraphs": True}))(x)


def winner(name):
    return lambda arms, *_: {each: 1.0 if each == name else 2.0 for each in arms}


def test_a_kernel_that_fails_only_at_the_call_does_not_reach_the_user(compilations, x):
    def throws(task):
        return kernel(task, "cpp", THROWS, softmax_launch)

    recorder = Recorder(throws, is_softmax, gate_on=True)
    torch.testing.assert_close(run(recorder, x), around(x))
    assert [reason for reason, _ in recorder.faults] == ["race"] and "only at the call" in str(recorder.faults[0][1])
    assert recorder.gates[0][1]["kept"] == "plain" and [row.reason for row in recorder.verdicts] == ["race"]
    assert compilations == [(True, True, True), (True, False, False), (False, False, False), (False, True, True)]


def softmax_launch(p, x):
    y = p.empty_output()
    p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
    return y


def test_the_race_is_without_graphs_and_the_winner_as_it_was_asked_for(compilations, x, monkeypatch):
    monkeypatch.setattr(race, "race", winner("kernels"))
    recorder = Recorder(lambda task: softmax(task, "2.0"), is_softmax, gate_on=True)
    torch.testing.assert_close(run(recorder, x), 2 * torch.softmax(x, -1) + 1)
    assert compilations == [(True, True, True), (True, False, False), (False, False, False)]
    assert recorder.gates[0][1]["kept"] == "kernels" and set(recorder.gates[0][1]["ms"]) == {"kernels", "plain"}


def test_the_plain_graph_that_won_gets_its_graph_too(compilations, x, monkeypatch):
    monkeypatch.setattr(race, "race", winner("plain"))
    recorder = Recorder(lambda task: softmax(task, "2.0"), is_softmax, gate_on=True)
    torch.testing.assert_close(run(recorder, x), around(x))
    assert compilations[-1] == (False, True, True) and len(compilations) == 4
    assert [row.reason for row in recorder.verdicts] == ["graph-not-faster"]


def test_a_graph_without_kernels_is_compiled_once(compilations, x):
    recorder = Recorder(lambda task: None, is_softmax, gate_on=True)
    torch.testing.assert_close(run(recorder, x), around(x))
    assert compilations == [(True, True, True)] and recorder.gates == []


def test_a_kernel_that_does_not_compile_is_left_in_every_arm(x, monkeypatch):
    monkeypatch.setattr(race, "race", winner("way"))
    broken = THROWS.replace("std::runtime_error", "no_such_thing")
    recorder = Recorder(
        lambda task: kernel(task, "cpp", broken, softmax_launch),
        is_softmax,
        gate_on=True,
        arms={"way": {"epilogue_fusion": False}},
    )
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(around, backend=recorder.backend())(x), around(x))
    assert [reason for reason, _ in recorder.faults] == ["compile"]
    assert [row.reason for row in recorder.verdicts] == ["compile"] and recorder.gates[0][1]["kept"] == "way"


def test_a_race_waits_for_others_before_it_locks_the_device_and_times(x, monkeypatch):
    seen = []

    class Watched(type(current("cpu"))):
        @contextmanager
        def lock(self):
            seen.append("lock")
            yield

    monkeypatch.setattr(race, "current", lambda device: Watched())
    monkeypatch.setattr(race, "wait_for_quiet", lambda device, seconds: seen.append("quiet"))
    race.race({name: partial(lambda name, inputs: seen.append(name), name) for name in "ab"}, [x], [])
    # Once unclocked, for what an arm does at its first call; then the clock.
    assert seen[:4] == ["a", "b", "quiet", "lock"] and seen[4:] == ["a", "b"] * (len(seen[4:]) // 2) != []


def test_an_option_set_that_does_not_compile_is_no_loss(x):
    recorder = Recorder(softmax, is_softmax, gate_on=True, arms={"way": {"no_such_option": True}})
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(around, backend=recorder.backend())(x), around(x))
    assert [reason for reason, _ in recorder.faults] == ["compile"] and set(recorder.gates[0][1]["ms"]) == {
        "kernels",
        "plain",
    }


def test_the_kernel_of_these_tests_would_throw(x):
    """What the gate keeps from the user: without it the call fails."""
    recorder = Recorder(lambda task: kernel(task, "cpp", THROWS, softmax_launch), is_softmax)
    with pytest.raises(RuntimeError, match="only at the call"):
        run(recorder, x)
