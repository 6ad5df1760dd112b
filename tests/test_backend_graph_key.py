"""A graph's key: equal for equal work in any process, different where the work differs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_kevolve.lowering.facts import fp32_products
from torch_kevolve.lowering.graph_key import Unnamed, _Naming, graph_key


def key_of(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = False, buckets: bool = False, **facts: Any
) -> str | None:
    keys: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        keys.append(graph_key(gm, facts, buckets))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    assert len(keys) == 1
    return keys[0]


X = torch.ones(4, 6)


def test_names_and_places_leave_no_trace() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        half = x * 0.5
        return half.relu()

    def other(value: torch.Tensor) -> torch.Tensor:

        scaled = value * 0.5

        return scaled.relu()

    assert key_of(one, X) == key_of(other, X) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 0.5, lambda x: x * 0.25),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.relu(), lambda x: x.tanh()),
        (lambda x: x[:, 1:3], lambda x: x[:, 1:4]),
        (lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float16)),
        (lambda x: torch.cat([x, x + 1]), lambda x: torch.cat([x + 1, x])),
        (lambda x: torch.nn.functional.pad(x, (0, 1)), lambda x: torch.nn.functional.pad(x, (1, 0))),
    ],
    ids=["constant", "axis", "operator", "slice", "dtype", "order", "padding"],
)
def test_different_work_has_different_keys(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert key_of(one, X) != key_of(other, X)


@pytest.mark.parametrize(
    "other",
    [torch.ones(4, 7), torch.ones(6, 4).t(), X.double(), X.clone().requires_grad_()],
    ids=["shape", "strides", "dtype", "requires_grad"],
)
def test_input_specs_count(other: torch.Tensor) -> None:
    assert key_of(torch.relu, X) != key_of(torch.relu, other)


def test_dynamic_sizes_are_named_anew() -> None:
    def mul(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert key_of(mul, X, dynamic=True) == key_of(mul, torch.ones(9, 5), dynamic=True)
    assert key_of(mul, X, dynamic=True) != key_of(mul, X)
    assert key_of(mul, torch.ones(4, 4), dynamic=True) != key_of(mul, X, dynamic=True), "equal sizes share a symbol"


def test_the_buckets_of_dynamic_sizes_count() -> None:
    def at(*shape: int, buckets: bool = True, dynamic: bool = True) -> str | None:
        return key_of(torch.relu, torch.ones(*shape), dynamic=dynamic, buckets=buckets)

    assert at(4, 6) == at(16, 3) is not None
    assert len({at(4, 6), at(4, 17), at(17, 4), at(300, 6), at(4, 6, buckets=False)}) == 5
    assert at(4, 6, buckets=False) == at(300, 6, buckets=False)
    assert at(4, 6, dynamic=False) == at(4, 6, dynamic=False, buckets=False)


def test_functions_that_torch_made_in_a_function_have_a_name() -> None:
    assert key_of(lambda x: torch.nn.functional.max_pool2d(x, 2), torch.ones(1, 4, 6)) is not None

    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    own.__module__, own.__name__ = "torch.nn.functional", "max_pool2d"
    with pytest.raises(Unnamed):
        _Naming().callable(own)


def test_facts_and_flags_count() -> None:
    base = key_of(torch.relu, X)
    assert key_of(torch.relu, X, numerics="fast") != base
    trained = X.clone().requires_grad_()
    assert key_of(torch.relu, trained) != key_of(torch.relu, X)
    with torch.no_grad():
        assert key_of(torch.relu, X) == base, "nothing asks for a gradient"
    torch.use_deterministic_algorithms(True)
    try:
        assert key_of(torch.relu, X) != base
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key_of(torch.relu, X) != base


@pytest.mark.parametrize(("backend", "new", "word"), [("cuda", "tf32", "high"), ("mkldnn", "bf16", "medium")])
def test_the_newer_switches_of_precision_count(backend: str, new: str, word: str) -> None:
    """Set for one backend alone they make torch's older getters raise."""
    base, matmul = key_of(torch.relu, X), getattr(torch.backends, backend).matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = new
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert key_of(torch.relu, X) not in (base, None)
        assert fp32_products({"mkldnn": "cpu"}.get(backend, backend)) == word
        assert fp32_products({"mkldnn": "cuda"}.get(backend, "cpu")) == "highest"
    finally:
        matmul.fp32_precision = before
    assert key_of(torch.relu, X) == base


def test_nested_graphs_count() -> None:
    def branch(bias: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda t: t + bias, lambda t: t - 1, (x,))

        return run

    assert key_of(branch(1.0), X) == key_of(branch(1.0), X) is not None
    assert key_of(branch(1.0), X) != key_of(branch(2.0), X)


SCRIPT = """
import torch
from torch_kevolve.lowering.graph_key import graph_key
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)
    def forward(self, x):
        return torch.nn.functional.softmax(self.lin(self.norm(x)), -1)
def backend(gm, inputs):
    print(graph_key(gm, {"a": 1}))
    return gm.forward
torch.compile(Net(), backend=backend)(torch.ones(4, 6))
"""


def test_equal_in_two_processes_from_two_folders(tmp_path: Path) -> None:
    keys = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / f"net_{folder}.py"
        file.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": str(len(keys) + 1)}
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=env, check=True)
        keys.append(done.stdout.strip())
    assert keys[0] == keys[1] and len(keys[0]) == 64


@pytest.mark.parametrize("seed", ["1", "20"])
def test_keys_last(seed: str) -> None:
    """Graph keys and task keys are those on file, which another process wrote: a stored kernel is found by them."""
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "PYTHONHASHSEED": seed}
    command = [sys.executable, str(tests / "lasting_keys.py"), "--compare"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
