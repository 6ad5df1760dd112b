"""Inputs: the strides and bounds of the specs, the same on every call, and a wall behind the last byte."""

import json
import subprocess
import sys

import pytest
import torch

from torch_kevolve.evaluation.inputs import DISTRIBUTIONS, SPECIAL, Draw, draws, make, other_sizes, special_draws
from torch_kevolve.evaluation.memory import Arena, attach, checksum, describe, place
from torch_kevolve.sizes import Symbol, symbol
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

S0 = symbol("s0")
SPECS = (
    TensorSpec("float32", (S0, 6), (1, S0)),
    TensorSpec("bfloat16", (S0, 5), (0, 1)),
    TensorSpec("float64", (S0, 4), (7, 1)),
    TensorSpec("int64", (S0,), (1,), low=0, high=S0 - 1),
    TensorSpec("float32", (6, 6), (6, 1), frozen=True),
    TensorSpec("bool", (S0,), (1,)),
)
TASK = KernelTask(TaskGraph(SPECS, (Op("aten.exp.default", (Ref(0),), (SPECS[0],)),), (Ref(6),)), (Symbol("s0"),))
BINDING = {"s0": 40}


@pytest.mark.parametrize("draw", [*draws(BINDING), *special_draws(BINDING)], ids=lambda draw: draw.distribution)
def test_tensors_are_as_the_specs_say(draw):
    for tensor, spec in zip(make(TASK, draw, "cpu"), TASK.at(BINDING).graph.inputs, strict=True):
        assert tuple(tensor.shape) == spec.shape and tensor.stride() == spec.strides
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
    again, first = make(TASK, draw, "cpu"), make(TASK, draw, "cpu")
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, first, strict=True))


def test_indices_reach_both_closed_bounds():
    index = torch.cat([make(TASK, draw, "cpu")[3] for draw in draws(BINDING)])
    assert int(index.min()) >= 0 and int(index.max()) == 39


def test_timed_draws_share_their_weights_and_nothing_else():
    first, second, third = (make(TASK, draw, "cpu") for draw in draws(BINDING)[:3])
    assert torch.equal(first[4], second[4]) and not torch.equal(first[4], third[4])
    assert not torch.equal(first[0], second[0])


def test_doubles_have_digits_that_floats_have_not():
    tensor = make(TASK, Draw("normal", 3, (("s0", 40),)), "cpu")[2]
    assert not torch.equal(tensor, tensor.float().double())


def test_special_values_are_there():
    x = make(TASK, special_draws(BINDING)[0], "cpu")[0]
    assert x.isnan().any() and x.isinf().any() and x.isfinite().any()
    assert set(SPECIAL).isdisjoint(DISTRIBUTIONS)


def test_offsets_of_bags_rise_from_zero():
    table, index = TensorSpec("float32", (50, 3), (3, 1)), TensorSpec("int64", (30,), (1,), low=0, high=49)
    offsets, out = TensorSpec("int64", (7,), (1,), low=0, high=30), TensorSpec("float32", (7, 3), (3, 1))
    op = Op("aten._embedding_bag_forward_only.default", (Ref(0), Ref(1), Ref(2)), (out,))
    task = KernelTask(TaskGraph((table, index, offsets), (op,), (Ref(3),)))
    for draw in draws({}):
        bags = make(task, draw, "cpu")[2]
        assert int(bags[0]) == 0 and bool((bags.diff() >= 0).all()) and int(bags[-1]) == 30


def test_other_sizes_stay_in_their_ranges_and_below_the_job():
    found = other_sizes((Symbol("s0", 2, 100), Symbol("s1", 5)), {"s0": 64, "s1": 1000})
    assert len(found) >= 8 and {"s0": 63, "s1": 999} in found and {"s0": 65, "s1": 1001} in found
    assert all(2 <= each["s0"] <= 100 and 5 <= each["s1"] <= 1001 for each in found)
    assert other_sizes((), {}) == []


def test_a_changed_byte_changes_the_checksum():
    block = torch.randint(0, 255, (4096,), dtype=torch.uint8)
    for place_ in (0, 63, 64, 4095):
        before = checksum(block)
        block[place_] ^= 1
        assert checksum(block) != before
    a, b = block[8:16].clone(), block[512:520].clone()
    before = checksum(block)
    block[8:16], block[512:520] = b, a
    assert checksum(block) != before


READ = """
import json, sys, torch, ctypes
from torch_kevolve.evaluation.memory import attach, place
row = json.loads(sys.argv[1])
tensor = place(attach(row["block"]), row)
print(float(tensor.sum()), flush=True)
ctypes.c_float.from_address(tensor.data_ptr() + 4 * tensor.numel() + 4 * int(sys.argv[2])).value
print("read", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="walls need Linux's mmap")
def test_reading_past_a_walled_input_is_a_fault():
    arena = Arena("cpu")
    x = torch.arange(35.0)
    block, handle = arena.block(x.nbytes, walled=True)
    row = {**describe(x), "offset": block.numel() - x.nbytes}
    place(block, row).copy_(x)
    assert float(place(attach(handle), row).sum()) == float(x.sum())
    runs = [
        subprocess.run(
            [sys.executable, "-c", READ, json.dumps({**row, "block": handle}), step], capture_output=True, text=True
        )
        for step in ("-1", "0")
    ]
    arena.close()
    assert runs[0].returncode == 0 and runs[0].stdout.split() == ["595.0", "read"], runs[0].stderr
    assert runs[1].returncode < 0 and runs[1].stdout.split() == ["595.0"]
