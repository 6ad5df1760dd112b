"""Rowwise C++: softmax, norms and losses against fp64, with values and lengths that break shortcuts."""

import pytest
import torch
import torch.nn.functional as F
from cpp_cases import candidates, facts, normal, problems, run, special
from triton_cases import trace

from torch_kevolve.templates.rowwise_cpp import RowwiseCpp

ROWWISE = RowwiseCpp()


def cross_entropy(x, y):
    return F.cross_entropy(x, y)


def classes(rows, count):
    return torch.arange(rows) * 7 % count


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def group_norm_silu(x, w, b):
    return F.silu(F.group_norm(x, 4, w, b))


CASES = {
    "softmax": (lambda x: x.softmax(-1), (normal(5, 2531, scale=3.0),)),
    "softmax bf16": (lambda x: x.softmax(-1), (normal(5, 2531, dtype=torch.bfloat16, scale=3.0),)),
    "softmax, NaN and inf": (lambda x: x.softmax(-1), (special(7, 1203),)),
    "softmax of ever larger values": (lambda x: x.softmax(-1), (torch.linspace(-300.0, 90.0, 4099).repeat(3, 1),)),
    "log_softmax": (lambda x: x.log_softmax(-1), (normal(5, 2531, scale=3.0),)),
    "logsumexp, NaN and inf": (lambda x: torch.logsumexp(x, -1), (special(9, 1203),)),
    "cross-entropy": (cross_entropy, (normal(11, 3001, scale=3.0), classes(11, 3001))),
    "layer norm bf16": (layer_norm, tuple(normal(*s, dtype=torch.bfloat16) for s in ((9, 1000), (1000,), (1000,)))),
    "layer norm bf16, NaN and inf": (layer_norm, (special(9, 1000).bfloat16(), *(normal(1000).bfloat16(),) * 2)),
    "layer norm": (layer_norm, (special(9, 515), normal(515), normal(515))),
    "group norm with SiLU": (group_norm_silu, (normal(3, 8, 7, 13) * 20, normal(8), normal(8))),
    "sigmoid of a row's distance": (lambda x: (x - x.mean(-1, keepdim=True)).sigmoid(), (special(4, 300) * 40,)),
    "exp without a shift": (lambda x: x.exp() * x.sum(-1, keepdim=True), (normal(4, 300, scale=2.0),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_right_as_eager(name):
    function, inputs = CASES[name]
    assert problems(ROWWISE, function, inputs, count=6) == {}


@pytest.mark.parametrize("vector", [32, 64])
def test_both_vector_widths(vector):
    assert problems(ROWWISE, cross_entropy, (special(5, 700), classes(5, 700)), count=3, vector=vector) == {}


@pytest.mark.parametrize("length", [2, 7, 8, 31, 32, 33, 1024, 1025, 2049])
def test_online_maximum_and_sum_at_the_ends_of_blocks(length):
    def both(x):
        high = x.amax(-1, keepdim=True)
        return high, (x - high).exp().sum(-1)

    x = normal(4, length, scale=5.0)
    x[0, :-1] = float("-inf")
    x[1, 0] = float("nan")
    x[2] = float("-inf")
    x[3, -1] = float("inf")
    task, _ = trace(both, (x,))
    space = ROWWISE.match(task, facts())
    assert 1 in space.axes["ONLINE"]
    point = {**space.start[0], "ONLINE": 1}
    high, total = run(space.render(point), task, (x,))
    want_high, want_total = both(x.double())
    assert torch.equal(high.double(), want_high) or torch.equal(high.nan_to_num(3), want_high.float().nan_to_num(3))
    assert torch.equal(total.isnan(), want_total.isnan())
    torch.testing.assert_close(total.double().nan_to_num(0), want_total.nan_to_num(0), rtol=3e-6, atol=0)


def test_an_exponential_below_the_normal_numbers_is_kept_where_no_maximum_was_taken_off():
    x = torch.linspace(-103.0, -88.0, 64).repeat(2, 1)

    def function(x):
        return x.exp() * (x.sum(-1, keepdim=True) * 0 + 1)

    task, _ = trace(function, (x,))
    for label, candidate in candidates(ROWWISE, task, 2):
        (got,) = run(candidate, task, (x,))
        assert (got > 0).all(), label
        torch.testing.assert_close(got.double(), x.double().exp(), rtol=1e-5, atol=2e-45)


def one_hot_gradient(y, scale, high, log, x):
    hit = torch.where(y.unsqueeze(1) == torch.arange(x.shape[1]).unsqueeze(0), -1.0, 0.0) * scale.unsqueeze(1)
    return hit - (x - high - log).exp() * hit.sum(1, keepdim=True)


@pytest.mark.parametrize("length", [5, 64, 1003])
def test_the_gradient_of_cross_entropy_walks_the_row_once(length):
    x = normal(6, length, scale=3.0)
    high = x.amax(1, keepdim=True)
    log = (x - high).exp().sum(1, keepdim=True).log()
    # A place outside the row hits nothing, as where the target is the index to be ignored.
    y = torch.tensor([0, length - 1, 3, -1, length, -100])
    scale = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0, float("inf")])
    assert problems(ROWWISE, one_hot_gradient, (y, scale, high, log, x), count=4) == {}


@pytest.mark.parametrize("length", [16, 33, 1024])
def test_any_value_is_rounded_to_bfloat16_as_eager_rounds_it(length):
    x = torch.randint(-(2**31), 2**31, (64, length), dtype=torch.int32).view(torch.float32)
    x[0, :4] = torch.tensor([1.00390625, 1.01171875, 3.4e38, -0.0])  # two ties, what rounds to infinity
    x[1, 5] = float("nan")

    def function(x, y):
        return (x + y.sum(-1, keepdim=True)).to(torch.bfloat16)

    y = torch.zeros(64, length)
    task, order = trace(function, (x, y))
    given = tuple((x, y)[i] for i in order)
    want = function(x, y)
    space = ROWWISE.match(task, facts())
    for point in ({**space.start[0], "U": u, "NT": nt} for u in (1, 2, 4) for nt in (0, 1)):
        (got,) = run(space.render(point), task, given)
        assert torch.equal(got.isnan(), want.isnan()), point
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), point


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [7, 8, 515, 1024])
def test_weights_in_a_half_type_are_widened_once(dtype, length):
    inputs = (normal(9, length, dtype=dtype), normal(length, dtype=dtype), normal(length, dtype=dtype))
    task, order = trace(layer_norm, inputs)
    given = tuple(inputs[i] for i in order)
    space = ROWWISE.match(task, facts())
    assert space.axes["WIDEN"] == (0, 1)
    plain, widened = (run(space.render({**space.start[0], "WIDEN": w}), task, given)[0] for w in (0, 1))
    assert torch.equal(plain, widened)
    assert problems(ROWWISE, layer_norm, inputs, count=2) == {}


def test_a_half_result_is_rounded_once():
    x = normal(3, 513, dtype=torch.bfloat16)
    assert problems(ROWWISE, lambda x: F.rms_norm(x, (513,)), (x,), count=6) == {}
