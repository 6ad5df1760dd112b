"""Verify: equally good results pass, worse ones do not, at any scale."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_kevolve.evaluation.inputs import Draw, make
from torch_kevolve.evaluation.verify import (
    Pool,
    choice_problem,
    half_ulp,
    pattern_problem,
    pooled_problem,
    strict_problem,
)
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec

NAN, INF = float("nan"), float("inf")


def pools(errors, twin_errors, scales=(1.0,) * 8, size=4096, dtype=torch.float32):
    """Pools over draws with errors of given relative size."""
    dice = torch.Generator().manual_seed(0)
    mine, twin = Pool(), Pool()
    for mine_error, twin_error, scale in zip(errors, twin_errors, scales, strict=True):
        ref = torch.randn(size, generator=dice, dtype=torch.float64) * scale
        noise = [torch.randn(size, generator=dice, dtype=torch.float64) * scale for _ in range(2)]
        other = (ref + noise[1] * twin_error).to(dtype)
        mine.add((ref + noise[0] * mine_error).to(dtype), ref, other)
        twin.add(other, ref, other)
    return mine, twin


def verdict(*args, level="default", **kw):
    mine, twin = pools(*args, **kw)
    return pooled_problem(mine, twin, kw.get("dtype", torch.float32), level)


def test_as_good_as_eager_passes():
    assert verdict([1e-5] * 8, [1e-5] * 8) == ""


def test_twice_as_bad_does_not_unless_it_may():
    assert "rms error" in verdict([2e-5] * 8, [1e-5] * 8)
    assert verdict([2e-5] * 8, [1e-5] * 8, level="fast") == ""
    assert "rms error" in verdict([2e-4] * 8, [1e-5] * 8, level="fast")


@pytest.mark.parametrize(("rows", "columns"), [(12, 251), (256, 1024), (8, 18432)])
def test_a_layer_norm_of_one_pass_is_refused_on_the_draw_far_from_zero(rows, columns):
    """Its sums are exact: what is wrong is only that a difference of large numbers was rounded."""
    spec = TensorSpec("float32", (rows, columns), (columns, 1))
    task = KernelTask(TaskGraph((spec,), (Op("aten.exp.default", (Ref(0),), (spec,)),), (Ref(1),)))
    (x,) = make(task, Draw("offset", 1), "cpu")
    wide = x.double()
    mean, square = (t.mean(-1, keepdim=True).float() for t in (wide, wide.square()))
    ref, twin = (F.layer_norm(t, (columns,)) for t in (wide, x))
    one_pass = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
    two_passes = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
    for y, passes in ((one_pass, False), (two_passes, True)):
        mine, eager = Pool(), Pool()
        mine.add(y, ref, twin)
        eager.add(twin, ref, twin)
        assert (pooled_problem(mine, eager, torch.float32, "fast") == "") is passes


def test_near_the_largest_number_its_infinity_is_as_good():
    ref = torch.tensor([3e38, -3e38, 1e38, 1.0], dtype=torch.float64)
    twin = ref.float()
    for place, value, passes in ((0, INF, True), (0, -INF, False), (0, NAN, False), (1, -INF, True), (2, INF, False)):
        y, mine, eager = twin.clone(), Pool(), Pool()
        y[place] = value
        mine.add(y, ref, twin)
        eager.add(twin, ref, twin)
        assert (pooled_problem(mine, eager, torch.float32, "default") == "") is passes, (place, value)
        assert (pattern_problem(y, twin, ref) == "") is passes, (place, value)


def test_one_bad_element_is_seen():
    mine, twin = pools([1e-6] * 8, [1e-6] * 8)
    ref = torch.randn(4096, dtype=torch.float64)
    y = ref.float()
    y[17] += 2e-5
    mine.add(y, ref, ref.float())
    twin.add(ref.float(), ref, ref.float())
    assert "worst error" in pooled_problem(mine, twin, torch.float32, "default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "passes"), [(0, True), (1, True), (3, False)])
def test_at_an_outlier_the_neighbouring_number_is_as_good(dtype, steps, passes):
    """Eager's is the nearest number to 500 and a bit, the candidate's so many steps further on."""
    step = 500 * torch.finfo(dtype).eps / 2
    mine, twin = pools([1e-6] * 8, [1e-6] * 8, dtype=dtype)
    ref = torch.randn(4096, dtype=torch.float64)
    ref[17] = 500.0 + 0.3 * step
    other = ref.to(dtype)
    got = other.clone()
    for _ in range(steps):
        got[17] = torch.nextafter(got[17].cpu(), torch.tensor(float("inf"), dtype=dtype))
    mine.add(got, ref, other)
    twin.add(other, ref, other)
    assert (pooled_problem(mine, twin, dtype, "default") == "") == passes


def test_a_draw_of_large_values_hides_nothing():
    scales = (1e30, *[1.0] * 7)
    assert verdict([1e-5] * 8, [1e-5] * 8, scales) == ""
    assert "its own scale" in verdict([1e-5, *[1e-2] * 7], [1e-5] * 8, scales)


def test_few_values_leave_room_for_luck():
    """Eight scalars: 27 % of equally good results have 1.25 times the error."""
    dice, refused = torch.Generator().manual_seed(1), 0
    for _ in range(200):
        mine, twin = Pool(), Pool()
        for _ in range(8):
            ref, a, b = torch.randn(3, generator=dice, dtype=torch.float64).split(1)
            other = (ref + b * 1e-4).float()
            mine.add((ref + a * 1e-4).float(), ref, other)
            twin.add(other, ref, other)
        refused += pooled_problem(mine, twin, torch.float32, "default") != ""
    assert refused < 40 and twin.chance > 2


def test_many_values_leave_none():
    _, twin = pools([1e-5] * 8, [1e-5] * 8)
    assert 1.0 < twin.chance < 1.02


def test_where_eager_overflows_nothing_is_asked_and_nothing_is_excused():
    ref = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    twin = torch.tensor([1.0, 2.0, INF])
    mine, other = Pool(), Pool()
    mine.add(torch.tensor([1.0, 2.5, 3.0]), ref, twin)
    other.add(twin, ref, twin)
    assert other.errors().rms == 0.0 and "error" in pooled_problem(mine, other, torch.float32, "default")
    assert pattern_problem(torch.tensor([1.0, 2.0, 3.0]), twin, ref) == ""
    assert "NaN" in pattern_problem(torch.tensor([1.0, NAN, 3.0]), twin, ref)


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)])
def test_an_infinity_near_the_largest_number_passes_but_in_fp16(dtype, passes):
    """40000 is far from what fp32 holds on the way to an fp16 result."""
    twin = torch.tensor([0.61 * torch.finfo(dtype).max, 1.0]).to(dtype)
    y, ref = torch.tensor([INF, 1.0]).to(dtype), twin.double()
    mine, other = Pool(), Pool()
    mine.add(y, ref, twin)
    other.add(twin, ref, twin)
    assert (pattern_problem(y, twin, ref) == "") == (pooled_problem(mine, other, dtype, "default") == "") == passes


def test_exact_infinities_pass_where_eager_has_lost_them():
    """inf - 9e38 is inf; in fp32, where 9e38 is inf itself, it is NaN."""
    ref, twin = torch.tensor([INF, 1.0], dtype=torch.float64), torch.tensor([NAN, 1.0])
    assert pattern_problem(torch.tensor([INF, 1.0]), twin, ref) == ""
    assert pattern_problem(torch.tensor([NAN, 1.0]), twin, ref) == ""
    assert "NaN" in pattern_problem(torch.tensor([0.0, 1.0]), twin, ref)


def test_a_nan_where_eager_is_finite_is_counted():
    ref = torch.ones(10, dtype=torch.float64)
    mine, twin = Pool(), Pool()
    mine.add(torch.full((10,), NAN), ref, ref.float())
    twin.add(ref.float(), ref, ref.float())
    assert "10 elements" in pooled_problem(mine, twin, torch.float32, "fast")


@pytest.mark.parametrize(
    "y, twin", [([NAN, 1], [1, 1]), ([1, 1], [NAN, 1]), ([INF, 1], [-INF, 1]), ([1, 1], [INF, 1]), ([INF, 1], [1, 1])]
)
def test_patterns_that_differ(y, twin):
    twin = torch.tensor(twin, dtype=torch.float32)
    assert pattern_problem(torch.tensor(y, dtype=torch.float32), twin, twin.double())


def test_strict_means_bits():
    a = torch.tensor([0.0, NAN, 1.0])
    assert strict_problem(a, a.clone()) == ""
    assert strict_problem(a, torch.tensor([-0.0, NAN, 1.0])) and strict_problem(a, torch.tensor([0.0, 1.0, 1.0]))


def test_half_an_ulp():
    for scale in (1.0, 1.5, 3.0, 1e-3):
        step = math.ulp(scale) / 2
        assert half_ulp(scale, torch.float64) == pytest.approx(step / scale)


def test_a_choice_must_be_the_best_value_not_the_same_place():
    values = torch.tensor([[1.0, 5.0, 5.0], [9.0, 2.0, 3.0]], dtype=torch.float64)
    twin = torch.tensor([1, 0])
    for y, fine in (([1, 0], True), ([2, 0], True), ([0, 0], False), ([1, 7], False), ([1, -1], False)):
        problem = choice_problem(torch.tensor(y), twin, values, 1, True, torch.float32)
        assert (problem == "") == fine, (y, problem)
    assert choice_problem(torch.tensor([1]), torch.tensor([3]), values, None, True, torch.float32)
