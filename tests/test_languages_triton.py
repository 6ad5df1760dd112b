"""Triton: text that is checked and printed again, compiled without a GPU, run by the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.languages.triton import Triton
from torch_kevolve.languages.triton_source import check
from torch_kevolve.plan import build
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

pytest.importorskip("triton")
X = TensorSpec("float32", (6, 50), (50, 1))
TASK = KernelTask(TaskGraph((X,), (Op("aten._softmax.default", (Ref(0), -1, False), (X,)),), (Ref(1),)))
SOURCE = """
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

@triton.jit
def softmax(x, y, n, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    a = tl.load(x + row * n + cols, mask=cols < n, other=float("-inf"))
    e = tl.exp2((a - tl.max(a, axis=0)) * LOG2E)
    tl.store(y + row * n + cols, e / tl.sum(e, axis=0), mask=cols < n)
"""


def candidate(source=SOURCE, rows=1):
    def launch(p, x):
        y = p.empty_output()
        n = x.shape[1]
        p.run("softmax", grid=(x.shape[0],), args=(x, y, n, rows), BLOCK=p.next_power_of_2(n), num_warps=4)
        return y

    return Candidate("triton", source, build(TASK, launch), Provenance("scripted"))


HEAD = "import triton\nimport triton.language as tl\n@triton.jit\ndef k(x):\n    "
BAD = {
    "another import": ("import os\n" + SOURCE, "line 1"),
    "import inside": (HEAD + "import os\n", "not allowed"),
    "work at module level": (SOURCE + "\nprint(1)\n", "module level"),
    "computed constant": (SOURCE + "\nA = len('x')\n", "module-level"),
    "class": (SOURCE + "\nclass A:\n    pass\n", "ClassDef"),
    "another decorator": ("import triton\n@triton.autotune([], [])\n@triton.jit\ndef k(x):\n    pass\n", "@triton.jit"),
    "underscore attribute": (HEAD + "x.__class__\n", "not allowed"),
    "inline asm": (HEAD + "tl.inline_asm_elementwise('', '', [x], tl.float32, True, 1)\n", "inline_asm"),
    "eval": (HEAD + "eval('1')\n", "eval"),
    "lambda": (HEAD + "f = lambda: 1\n", "Lambda"),
    "default that runs": ("import triton\n@triton.jit\ndef k(x=print(1)):\n    pass\n", "default"),
    "keyword default that runs": ("import triton\n@triton.jit\ndef k(*, x=print(1)):\n    pass\n", "default"),
    "annotation that runs": ("import triton\n@triton.jit\ndef k(x: print(1)):\n    pass\n", "annotated"),
    "replaced library": (SOURCE + "\ntl.load = 3\n", "own"),
    "replaced name": (SOURCE + "\ntl = 3\n", "own"),
    "inner module": (HEAD + "tl.core.builtins.print(1)\n", "not allowed"),
    "runtime": (HEAD + "triton.runtime.driver.active\n", "not allowed"),
    "library renamed": (HEAD + "t = tl\n", "tl.NAME"),
    "from the library": ("from triton.language import core\n" + SOURCE, "line 1"),
    "getattr by another name": (HEAD + "g = getattr\n", "getattr"),
    "function inside": (HEAD + "def f(y):\n        pass\n", "inside"),
    "star arguments": ("import triton\n@triton.jit\ndef k(*x):\n    pass\n", "plain names"),
    "no kernel": ("import triton\n", "no @triton.jit"),
    "no python": ("def (", "line 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_allowed_is_refused(name):
    text, word = BAD[name]
    checked = check(text)
    assert checked.text == "" and word in checked.problem, checked.problem


def test_what_is_printed_is_a_fixed_point():
    once = check(SOURCE)
    assert once.problem == "" and once.kernels == ("softmax",)
    assert check(once.text).text == once.text


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@interpreted
@pytest.mark.parametrize("arch", ["cuda:90", "hip:gfx942"])
def test_it_compiles_without_a_gpu(tmp_path, arch):
    built = Triton().build(candidate(), {}, arch, tmp_path)
    assert built.ok, built.note
    facts = built.profile["softmax"]
    assert facts["registers"] > 0 and facts["stack_bytes"] == 0 and facts["num_warps"] == 4, facts


@interpreted
def test_spilled_registers_are_seen(tmp_path):
    source = SOURCE.replace("cols < n", "cols < n + 0")
    light = Triton().build(candidate(source), {}, "cuda:90", tmp_path)

    def launch(p, x):
        y = p.empty_output()
        p.run("softmax", grid=(6,), args=(x, y, 50, 1), BLOCK=8192, num_warps=1)
        return y

    heavy = Triton().build(
        Candidate("triton", source, build(TASK, launch), Provenance("scripted")), {}, "cuda:90", tmp_path
    )
    assert heavy.profile["softmax"]["stack_bytes"] > light.profile["softmax"]["stack_bytes"] == 0


@interpreted
def test_a_compile_error_is_a_note(tmp_path):
    built = Triton().build(candidate(SOURCE.replace("tl.exp2", "tl.no_such")), {}, "cuda:90", tmp_path)
    assert not built.ok and "no_such" in built.note


def test_a_plan_that_launches_what_is_not_there_is_refused(tmp_path):
    built = Triton().build(candidate(SOURCE.replace("softmax", "other")), {}, "interpret", tmp_path)
    assert not built.ok and "softmax" in built.note


RUN = """
import torch
from pathlib import Path
from test_languages_triton import TASK, candidate
from torch_kevolve.languages.replay import replay
from torch_kevolve.languages.triton import Triton

made = candidate()
built = Triton().build(made, {}, "interpret", Path(__import__("sys").argv[1]))
assert built.ok, built.note
x = torch.randn(6, 50)
(y,) = replay(made.plan, TASK, (x,), Triton().load(built, made))
torch.testing.assert_close(y, x.softmax(-1))
print("equal")
"""


def test_the_interpreter_runs_it(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
