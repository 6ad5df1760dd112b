"""Walls: what a locked process is refused, and what the text check must neither miss nor take for a fault."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cheats import EXP, HEAD, LINE
from tasks import N, softmax

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evaluation import sandbox
from torch_kevolve.evaluation.policy import library_problem, problem_of
from torch_kevolve.plan import build


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_locked_process_is_refused_what_it_tries_and_still_makes_threads():
    done = subprocess.run([sys.executable, "-I", sandbox.__file__], capture_output=True, text=True, timeout=60)
    seen = json.loads(done.stdout)
    assert {"fork", "execve", "setsid", "socket", "ptrace", "kill of others", "seccomp", "no_new_privs"} <= set(seen)
    assert all(seen.values()), seen


@pytest.mark.parametrize("machine", sandbox.NUMBERS)
def test_every_jump_of_the_filter_lands_on_an_instruction(machine):
    for level in (sandbox.NATIVE, sandbox.DEVICE):
        rows = sandbox.program(machine, level, 7)
        assert rows[-1] == (sandbox.RETURN, 0, 0, sandbox.ALLOW) and len(rows) < 4096
        jumps = (sandbox.EQUAL, sandbox.AT_LEAST, sandbox.ANY_BIT)
        for place, (code, yes, no, _) in enumerate(rows):
            assert code in jumps or (yes, no) == (0, 0)
            assert place + 1 + max(yes, no) < len(rows) or code == sandbox.RETURN


def run_filter(rows, number, args=(0, 0, 0), machine="x86_64"):
    """What the filter answers, by interpreting it as the kernel does."""
    words = {sandbox.NR: number, sandbox.ARCH: sandbox.AUDIT[machine]}
    for place, value in enumerate(args):
        words[sandbox.ARGS + 8 * place], words[sandbox.ARGS + 8 * place + 4] = value & 0xFFFFFFFF, value >> 32
    at, held = 0, 0
    while True:
        code, yes, no, operand = rows[at]
        at += 1
        if code == sandbox.RETURN:
            return operand
        if code == sandbox.LOAD:
            held = words[operand]
            continue
        test = {
            sandbox.EQUAL: held == operand,
            sandbox.AT_LEAST: held >= operand,
            sandbox.ANY_BIT: bool(held & operand),
        }[code]
        at += yes if test else no


REFUSED = sandbox.REFUSE | 1
ANSWERS = [
    ("fork", (), REFUSED, sandbox.ALLOW),
    ("execve", (), REFUSED, sandbox.ALLOW),
    ("socket", (), REFUSED, REFUSED),
    ("clone", (0x11,), REFUSED, sandbox.ALLOW),
    ("clone", (0x3D0F00,), sandbox.ALLOW, sandbox.ALLOW),
    ("clone3", (), sandbox.REFUSE | 38, sandbox.ALLOW),
    ("kill", (7, 9), sandbox.ALLOW, sandbox.ALLOW),
    ("kill", (8, 9), REFUSED, REFUSED),
    ("kill", (2**64 - 1, 9), REFUSED, REFUSED),
    ("tgkill", (7, 9), sandbox.ALLOW, sandbox.ALLOW),
    ("prlimit64", (0, 9, 0), sandbox.ALLOW, sandbox.ALLOW),
    ("prlimit64", (0, 9, 0x7FFF00001000), REFUSED, REFUSED),
    ("prlimit64", (0, 9, 0x100000000), REFUSED, REFUSED),
]


@pytest.mark.parametrize("name, args, native, device", ANSWERS)
def test_the_filter_answers_by_call_and_argument(name, args, native, device):
    number, args = sandbox.NUMBERS["x86_64"][name], (*args, 0, 0, 0)[:3]
    assert run_filter(sandbox.program("x86_64", sandbox.NATIVE, 7), number, args) == native
    assert run_filter(sandbox.program("x86_64", sandbox.DEVICE, 7), number, args) == device


def test_the_filter_knows_the_second_set_of_numbers_and_other_processors():
    rows = sandbox.program("x86_64", sandbox.NATIVE, 7)
    assert run_filter(rows, sandbox.X32 + 1) == REFUSED and run_filter(rows, 1) == sandbox.ALLOW
    assert run_filter(rows, 1, machine="aarch64") == REFUSED


HIDDEN = {
    "behind a quote": ("char q = '\"'; asm(\"nop\"); char r = '\"';", "asm"),
    "behind an escaped quote": ("char q = '\\''; asm(\"nop\");", "asm"),
    "behind a prefixed raw string": ('auto t = u8R"(x)";', "raw strings"),
    "behind a digit separator": ("int n = 1'000; asm(\"nop\"); int m = 1'000;", "asm"),
    "in a pragma operator": ('_Pragma("GCC dependency \\"/etc/passwd\\"")', "_Pragma"),
    "in an unknown pragma": ('\n#pragma GCC dependency "/etc/passwd"\n', "#pragma"),
    "on a device": ("\n#pragma omp target\n", "#pragma"),
    "with another directive": ("\n#include_next <unistd.h>\n", "#include_next"),
    "with a name for a line": ('\n#line 1 "x"\n', "#line"),
    "as a C++ attribute": ("[[gnu::constructor]] static void f();", "constructor"),
    "in brackets apart": ("[ [ gnu :: constructor ] ] static void f();", "constructor"),
    "in a list of attributes": ('__attribute__((unused, section("x"))) int a;', "section"),
    "with underscores": ('__attribute__((__ifunc__("f"))) int a();', "ifunc"),
    "under another name": ("\n#define A __attribute__\nA((constructor)) void f();", "attribute"),
    "over two lines": ("__attribute__((\nconstructor)) void f();", "attribute"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_nothing_hides_from_the_text_check(name):
    text, word = HIDDEN[name]
    problem = problem_of(softmax(top=text))
    assert problem.startswith("line ") and word in problem, problem


def test_the_line_is_the_line_of_the_text():
    lines = HEAD.count("\n")
    text = '/* a comment\n over lines */ const char* a = "asm"; /* asm */\n\nint b = 1\'000; // fork\nasm("nop");'
    assert problem_of(softmax(top=text)) == f"line {lines + 6}: asm is not allowed"


def test_honest_texts_are_left_alone():
    text = """
#define HOT inline __attribute__((always_inline, hot))
#pragma GCC optimize("fp-contract=fast")
HOT static long big() { return 1'000'000; } // it's 10 o'clock: "asm"
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
[[maybe_unused]] static char quote() { return '"'; }
static int a[3][2]; static void f() { int i = 0;
  _Pragma("GCC unroll 4") for (; i < 2; i++) {}
  #pragma omp atomic write
  i = a[a[0][1]][0]; }
"""
    assert problem_of(softmax(top=text)) == ""


def plan_of(target, args=(), **kwargs):
    def launch(p, x):
        return p.aten(target, (x, *args), (LINE,), kwargs)[0]

    return Candidate("aten", "", build(EXP, launch), Provenance("scripted")).plan


LIBRARY = {
    "aten.exp.default": ((), True),
    "aten.add.Tensor": ((1.0,), True),
    "aten.exp_.default": ((), False),
    "aten.exp.out": ((), False),
    "aten.resize_.default": (((N,),), False),
    "aten.from_file.default": ((), False),
    "aten.record_stream.default": ((), False),
    "aten.item.default": ((), False),
    "aten.size.int": ((0,), False),
    "aten.no_such.default": ((), False),
    "aten.exp.__class__": ((), False),
    "aten.exp": ((), False),
}


@pytest.mark.parametrize("target", LIBRARY)
def test_library_calls_make_tensors_of_tensors_and_nothing_else(target):
    args, fine = LIBRARY[target]
    assert (library_problem(plan_of(target, args)) == "") == fine
