"""C++: one command, objects that can be checked, errors with their lines."""

import ctypes
from pathlib import Path

import pytest
import torch
from processes import ends

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evaluation.policy import object_problem, plan_problem, problem_of
from torch_kevolve.languages import cpp
from torch_kevolve.languages.cpp import Cpp, compile_command, object_commands
from torch_kevolve.plan import build
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

ROW = TensorSpec("float32", (5, 7), (7, 1))
TASK = KernelTask(TaskGraph((ROW,), (Op("aten.exp.default", (Ref(0),), (ROW,)),), (Ref(1),)))
BODY = """
extern "C" void kernel(float* x, float* y, int64_t n, double scale) {
  for (int64_t i = 0; i < n; i++) y[i] = (float)(std::exp(x[i]) * scale);
}
"""
HEAD = "#include <cmath>\n#include <cstdint>\n"


def candidate(source):
    def launch(p, x):
        y = p.empty_output()
        p.run("kernel", args=(x, y, 35, 2.0))
        return y

    return Candidate("cpp", source, build(TASK, launch), Provenance("scripted"))


def test_arguments_arrive_in_the_order_of_the_plan(tmp_path):
    made = candidate(HEAD + BODY)
    built = Cpp().build(made, {}, "cpu:native", tmp_path)
    assert built.ok and built.profile["object_bytes"] > 0, built.note
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    Cpp().load(built, made)("kernel", (), [x, y, 35, 2.0], {}, {})
    torch.testing.assert_close(y, x.exp() * 2)


def test_a_second_build_of_the_same_text_is_the_same_file(tmp_path):
    first, second = (Cpp().build(candidate(HEAD + BODY), {}, "cpu:native", tmp_path) for _ in range(2))
    assert first.artifact == second.artifact and not list(tmp_path.glob("cpp-*"))


def test_a_folder_with_spaces_is_no_obstacle(tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    built = Cpp().build(candidate(HEAD + BODY), {}, "cpu:native", folder)
    assert built.ok, built.note


def test_a_compile_error_names_its_line(tmp_path):
    built = Cpp().build(candidate(HEAD + "\nint oops = ;\n"), {}, "cpu:native", tmp_path)
    assert not built.ok and "kernel.cpp:4" in built.note and str(tmp_path) not in built.note


def test_a_compiler_that_is_late_leaves_no_child_behind(tmp_path, monkeypatch):
    """g++ only drives: what works, and what holds the pipe, is its child."""
    driver, said = tmp_path / "driver", tmp_path / "child.pid"
    driver.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {said}\nwait\n")
    driver.chmod(0o755)
    monkeypatch.setattr(cpp, "object_commands", lambda *paths: ([str(driver)], ["false"]))
    monkeypatch.setattr(cpp, "COMPILE_S", 3.0)
    built = Cpp().build(candidate(HEAD + BODY), {}, "cpu:native", tmp_path)
    assert not built.ok and "ran past" in built.note
    assert ends(int(said.read_text())) and not list(tmp_path.glob("cpp-*"))


def test_the_two_steps_carry_the_flags_of_the_one_command():
    source, middle, target = Path("/x/k.cpp"), Path("/x/k.o"), Path("/x/k.so")
    whole = compile_command(source, target)
    compiling, linking = object_commands(source, middle, target)
    flags = [word for word in whole if word.startswith(("-O", "-f", "-m"))]
    assert flags and all(flag in compiling and flag in linking for flag in flags)
    assert str(source) in compiling and str(middle) in linking and str(target) in linking


OBJECTS = {
    "clean": ("", ""),
    "state": ("static float last;\nfloat* keep() { return &last; }", "state between calls"),
    "thread state": ("float* keep() { static __thread float last; return &last; }", "state between calls"),
    "start-up code": ("[[gnu::constructor]] void boot() {}", "runs when it is loaded"),
    "static object": ("struct S { int a; S(); ~S(); }; S::S() { a = 1; } S::~S() {} S s;", ""),
    "foreign call": ('extern "C" int puts(const char*); void say() { puts("x"); }', "puts"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_lies_in_an_object_is_seen(tmp_path, name):
    text, word = OBJECTS[name]
    built = Cpp().build(candidate(HEAD + text + BODY), {}, "cpu:native", tmp_path)
    assert built.artifact is not None, built.note
    problem = object_problem(built.artifact.with_suffix(".o"))
    assert (problem == "") == (name == "clean") and word in problem, problem


TEXTS = {
    "asm": 'asm("nop");',
    "joined": 'a\\\nsm("nop");',
    "pasted": '#define J(a, b) a##b\nJ(as, m)("nop");',
    "digraph": "%:define X asm",
    "spelled": '\\u0061sm("nop");',
    "constructor": "__attribute__((constructor)) void f() {}",
    "computed include": "#define H <unistd.h>\n#include H",
    "raw string": 'const char* a = R"(//)"; /* " */ asm("nop");',
}


@pytest.mark.parametrize("name", TEXTS)
def test_words_cannot_be_hidden_from_the_text_check(name):
    assert problem_of(candidate(HEAD + TEXTS[name] + BODY))


def test_an_honest_text_passes():
    text = HEAD + "// asm and system, in a comment\n#define SUM(a) \\\n  ((a) + 1)\n" + BODY
    assert problem_of(candidate(text)) == ""


def test_buffers_beyond_the_allowance_are_refused():
    def launch(p, x):
        p.empty((1 << 20, 1 << 10), "float32")
        return p.aten("aten.exp.default", (x,), (ROW,))

    plan = build(TASK, launch)
    assert "4096 MiB" in plan_problem(plan, {}, 1 << 30) and plan_problem(plan, {}, 1 << 33) == ""


def test_a_missing_function_is_an_error_at_load(tmp_path):
    made = candidate(HEAD + 'extern "C" void other() {}')
    built = Cpp().build(made, {}, "cpu:native", tmp_path)
    with pytest.raises(AttributeError, match="kernel"):
        Cpp().load(built, made)
    assert ctypes.CDLL(str(built.artifact)).other
