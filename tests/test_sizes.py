"""Sizes: the JSON form, evaluation, binding."""

import json

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from torch_kevolve.errors import TaskError
from torch_kevolve.sizes import (
    NextPow2,
    Symbol,
    bind,
    contiguous_strides,
    decode,
    encode,
    evaluate,
    next_power_of_2,
    numel,
    symbol,
    upper_bound,
)

S0, S1 = symbol("s0"), symbol("s1")


@pytest.mark.parametrize(
    "size",
    [7, S0, S0 * S1 + 3, FloorDiv(S0 + 127, 128), Mod(S0, 4), sympy.Max(S0, S1), NextPow2(S0), S0**2, S0 * S1 * 4],
    ids=str,
)
def test_json_round_trip_keeps_the_value(size):
    again = decode(json.loads(json.dumps(encode(size))))
    for binding in ({"s0": 5, "s1": 3}, {"s0": 128, "s1": 1}):
        assert evaluate(again, binding) == evaluate(size, binding)


def test_the_form_does_not_depend_on_how_a_sum_was_written():
    assert encode(S0 + S1 * 2) == encode(2 * S1 + S0)


@pytest.mark.parametrize("tree", ["__import__('os')", "s0+1", ["eval", "s0"], 1.5, True, None, [], {"a": 1}])
def test_a_text_that_is_no_size_is_refused(tree):
    with pytest.raises(TaskError):
        decode(tree)


@given(st.integers(1, 10**9))
def test_next_power_of_2_is_the_least(value):
    power = next_power_of_2(value)
    assert power >= value and power & (power - 1) == 0 and (power == 1 or power // 2 < value)
    assert evaluate(NextPow2(S0), {"s0": value}) == power


def test_bind_reads_symbols_and_checks_the_rest():
    assert bind([((S0, 4), (9, 4)), ((S0 * S1,), (27,)), ((S1,), (3,))]) == {"s0": 9, "s1": 3}
    with pytest.raises(TaskError, match="has 5"):
        bind([((S0, 4), (9, 5))])
    with pytest.raises(TaskError, match="rank"):
        bind([((S0, 4), (9,))])


def test_unbound_symbol_is_an_error_not_a_guess():
    with pytest.raises(TaskError, match="not bound"):
        evaluate(S0 + 1, {"s1": 2})


def test_strides_and_numel():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((0, 3)) == (3, 1)
    assert contiguous_strides((S0, 3)) == (3, 1)
    assert numel(()) == 1 and numel((2, 0)) == 0 and evaluate(numel((S0, 3)), {"s0": 4}) == 12


@pytest.mark.parametrize("size", [S0 - S1, Mod(S0, 8), FloorDiv(S0, S1), S0 * S1 - S1, sympy.Max(3, S0 - S1)], ids=str)
def test_upper_bound_holds_though_a_size_shrinks_with_a_symbol(size):
    bound = upper_bound(size, [Symbol("s0", 17, 64), Symbol("s1", 2, 64)])
    most = max(evaluate(size, {"s0": a, "s1": b}) for a in range(17, 65) for b in range(2, 65))
    assert most <= bound <= 64 * 64


def test_upper_bound_needs_every_bound():
    assert upper_bound(S0 * 2, [Symbol("s0", 2, 8)]) == 16
    assert upper_bound(S0 * S1, [Symbol("s0", 2, 8), Symbol("s1")]) is None
