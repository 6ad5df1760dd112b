"""Twin rules: from a decomposed group back to the library operator that eager calls.

A rule is handed the operators of one group (one decomposition, found by its origin) and returns guesses: for values of
the group, the library call that makes them. A guess may be wrong; nothing is used that was not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch_kevolve.lowering.canon import RESHAPE
from torch_kevolve.sizes import contiguous_strides, numel
from torch_kevolve.task import Arg, DType, Op, Ref, TaskGraph, TensorSpec

CAST = "prims.convert_element_type.default"
Guess: TypeAlias = "dict[Ref, tuple[Op, int]]"


@dataclass(frozen=True)
class Group:
    """`places`: operators of one decomposition. `wanted`: their values that are read outside, in order."""

    graph: TaskGraph
    places: tuple[int, ...]
    wanted: tuple[Ref, ...]

    def ref(self, place: int, item: int = 0) -> Ref:
        return Ref(place + len(self.graph.inputs), item)

    def all(self, target: str) -> list[int]:
        return [place for place in self.places if self.graph.ops[place].target.split(".")[1] == target]

    def first(self, target: str) -> Op | None:
        found = self.all(target)
        return self.graph.ops[found[0]] if found else None

    def bare(self, arg: Arg) -> Ref:
        """The value before casts that a decomposition put in. Raises LookupError for what is no value."""
        if not isinstance(arg, Ref):
            raise LookupError("no value")
        op = self.graph.op(arg)
        while op is not None and op.target == CAST and not op.written and isinstance(op.args[0], Ref):
            arg = op.args[0]
            op = self.graph.op(arg)
        return arg

    def spec(self, ref: Ref) -> TensorSpec:
        return self.graph.spec(ref)

    def read(self) -> list[Ref]:
        """Values from outside that the group reads, casts taken off, once each."""
        inside = {self.ref(place).index for place in self.places}
        refs = [self.bare(ref) for place in self.places for ref in self.graph.ops[place].refs()]
        return [ref for ref in dict.fromkeys(refs) if ref.index not in inside]


Rule: TypeAlias = "Callable[[Group], Iterator[Guess]]"


def softmax(group: Group) -> Iterator[Guess]:
    """_softmax and _log_softmax: the value with the input's own shape is the result; its maximum says the axis."""
    peak = group.first("amax")
    name = "_log_softmax" if group.first("log") is not None else "_softmax"
    if peak is None or not isinstance(peak.args[1], tuple) or len(peak.args[1]) != 1:
        return
    for source in dict.fromkeys((group.bare(peak.args[0]), peak.args[0])):
        assert isinstance(source, Ref)
        spec = group.spec(source)
        for out in reversed(group.wanted):
            if group.spec(out).shape == spec.shape and group.spec(out).dtype == spec.dtype:
                yield {out: (Op(f"aten.{name}.default", (source, peak.args[1][0], False), (spec,)), 0)}


def softmax_backward(group: Group) -> Iterator[Guess]:
    """_softmax_backward_data, _log_softmax_backward_data."""
    total = group.first("sum")
    exp = group.first("exp")
    if total is None or not isinstance(total.args[1], tuple):
        return
    out = group.wanted[-1]
    axis, dtype = total.args[1][0], DType(group.spec(out).dtype)
    if exp is not None:
        pairs = [(group.bare(total.args[0]), group.bare(exp.args[0]))]
        name = "_log_softmax_backward_data"
    else:
        read = [ref for ref in group.read() if group.spec(ref).shape == group.spec(out).shape]
        pairs = [(a, b) for a in read for b in read if a != b]
        name = "_softmax_backward_data"
    for gradient, output in pairs:
        yield {out: (Op(f"aten.{name}.default", (gradient, output, axis, dtype), (group.spec(out),)), 0)}


def unary(name: str, *rest: Arg) -> Rule:
    """One value in, one out."""

    def rule(group: Group) -> Iterator[Guess]:
        out = group.wanted[-1]
        for source in group.read():
            if group.spec(source).shape == group.spec(out).shape and group.spec(source).dtype == group.spec(out).dtype:
                kwargs: tuple[tuple[str, Arg], ...] = ()
                if name == "gelu" and group.first("tanh") is not None:
                    kwargs = (("approximate", "tanh"),)
                yield {out: (Op(f"aten.{name}.default", (source, *rest), (group.spec(out),), kwargs), 0)}

    return rule


def logsumexp(group: Group) -> Iterator[Guess]:
    peak = group.first("amax")
    if peak is None:
        return
    source, out = group.bare(peak.args[0]), group.wanted[-1]
    keep = len(group.spec(out).shape) == len(group.spec(source).shape)
    args = (source, peak.args[1], True) if keep else (source, peak.args[1])
    yield {out: (Op("aten.logsumexp.default", args, (group.spec(out),)), 0)}


def _epsilon(group: Group) -> float | None:
    for place in group.all("add"):
        value = group.graph.ops[place].args[1]
        if isinstance(value, float | int) and not isinstance(value, bool):
            return float(value)
    return None


def layer_norm(group: Group) -> Iterator[Guess]:
    moments, epsilon = group.first("var_mean"), _epsilon(group)
    if moments is None or epsilon is None or not isinstance(moments.args[1], tuple):
        return
    source = group.bare(moments.args[0])
    spec = group.spec(source)
    normalized = spec.shape[len(spec.shape) - len(moments.args[1]) :]
    affine = [ref for ref in group.read() if group.spec(ref).shape == normalized and ref != source]
    for weight, bias in _affine(affine):
        op = Op("aten.native_layer_norm.default", (source, normalized, weight, bias, epsilon), (spec, *moments.outs))
        guess = _norm_guess(group, source, op)
        if guess:
            yield {**guess, **_statistics(group, op)}
            yield guess


def _affine(found: list[Ref]) -> Iterator[tuple[Ref | None, Ref | None]]:
    if len(found) == 2:
        yield found[0], found[1]
        yield found[1], found[0]
    elif len(found) == 1:
        yield found[0], None
        yield None, found[0]
    else:
        yield None, None


def _statistics(group: Group, op: Op) -> Guess:
    """Mean and inverse deviation, which are saved for the backward: a layer norm's own are of fp32 sums, those of
    var_mean of fp64 ones, to which no kernel of fp32 comes near."""
    guess: Guess = {}
    for out in group.wanted:
        maker = group.graph.op(out)
        if maker is not None and maker.target == "aten.var_mean.correction" and out.item == 1:
            guess[out] = (op, 1)
        elif maker is not None and maker.target == "aten.rsqrt.default":
            guess[out] = (op, 2)
    return guess


def _norm_guess(group: Group, source: Ref, op: Op) -> Guess:
    """The result of the input's shape."""
    spec = group.spec(source)
    guess: Guess = {}
    for out in group.wanted:
        held = group.spec(out)
        if held.shape == spec.shape and held.dtype == spec.dtype:
            guess[out] = (op, 0)
    return guess


def group_norm(group: Group) -> Iterator[Guess]:
    moments, epsilon = group.first("var_mean"), _epsilon(group)
    if moments is None or epsilon is None:
        return
    cut = group.bare(moments.args[0])
    made = group.graph.op(cut)
    if made is None or made.target != RESHAPE:
        return
    source = group.bare(made.args[0])
    spec, shape = group.spec(source), group.spec(cut).shape
    if len(spec.shape) < 2 or len(shape) < 2:
        return
    affine = [ref for ref in group.read() if group.spec(ref).shape == (spec.shape[1],) and ref != source]
    for weight, bias in _affine(affine):
        args = (source, weight, bias, spec.shape[0], spec.shape[1], numel(spec.shape[2:]), shape[1], epsilon)
        guess = _norm_guess(group, source, Op("aten.native_group_norm.default", args, (spec, *moments.outs)))
        if guess:
            yield guess


def layer_norm_backward(group: Group) -> Iterator[Guess]:
    """dx has the input's shape; of the two results of the weight's shape, one is dw and one db."""
    read = group.read()
    outs = {len(group.spec(out).shape): out for out in group.wanted}
    if not outs:
        return
    wide = max((len(group.spec(ref).shape) for ref in read), default=0)
    full = [ref for ref in read if len(group.spec(ref).shape) == wide and group.spec(ref).shape[-1] != 1]
    stats = [ref for ref in read if len(group.spec(ref).shape) == wide and group.spec(ref).shape[-1] == 1]
    flat = [ref for ref in read if len(group.spec(ref).shape) == 1]
    if len(full) != 2 or len(stats) != 2 or len(flat) > 1:
        return
    weight = flat[0] if flat else None
    narrow = [out for out in group.wanted if len(group.spec(out).shape) == 1]
    for gradient, source in (full, full[::-1]):
        for mean, rstd in (stats, stats[::-1]):
            for order in (narrow, narrow[::-1]):
                spec = group.spec(source)
                shape = (spec.shape[-1],)
                flat_spec = TensorSpec(spec.dtype, shape, contiguous_strides(shape))
                mask = (True, weight is not None, weight is not None)
                args = (gradient, source, shape, mean, rstd, weight, weight, mask)
                op = Op("aten.native_layer_norm_backward.default", args, (spec, flat_spec, flat_spec))
                guess: Guess = {out: (op, 0) for out in group.wanted if len(group.spec(out).shape) == wide}
                guess.update({out: (op, 1 + place) for place, out in enumerate(order[:2])})
                yield guess


def nll_loss(group: Group) -> Iterator[Guess]:
    """Mean, sum or no reduction over one index a row; the total weight is the number of rows that count."""
    pick, test = group.first("gather"), group.first("ne")
    if pick is None or test is None:
        return
    source, target = pick.args[0], test.args[0]
    assert isinstance(source, Ref) and isinstance(target, Ref)
    ignored = test.args[1]
    out = group.wanted[-1] if group.first("div") is None else group.ref(group.all("div")[-1])
    scalar = not group.spec(out).shape
    kinds = (1,) if group.first("div") is not None else (2,) if scalar else (0,)
    for reduction in kinds:
        total = TensorSpec(group.spec(source).dtype, (), ())
        op = Op("aten.nll_loss_forward.default", (source, target, None, reduction, ignored), (group.spec(out), total))
        guess: Guess = {out: (op, 0)}
        for place in group.all("convert_element_type"):
            ref = group.ref(place)
            if ref in group.wanted and not group.spec(ref).shape and group.spec(ref).dtype == total.dtype:
                guess[ref] = (op, 1)
        yield guess


def max_pool(group: Group) -> Iterator[Guess]:
    """Values only: the library's indices are not the offsets of the low-memory form."""
    place = group.places[0]
    op = group.graph.ops[place]
    out = group.ref(place, 0)
    if not op.target.startswith("prims._low_memory_max_pool_with_offsets") or out not in group.wanted:
        return
    index = TensorSpec("int64", op.outs[0].shape, op.outs[0].strides)
    yield {out: (Op("aten.max_pool2d_with_indices.default", op.args, (op.outs[0], index)), 0)}


def rms_norm(group: Group) -> Iterator[Guess]:
    mean, epsilon = group.first("mean"), _epsilon(group)
    if mean is None or not isinstance(mean.args[1], tuple):
        return
    wide = [ref for ref in group.read() if len(group.spec(ref).shape) > len(mean.args[1])]
    for source in wide:
        spec = group.spec(source)
        shape = spec.shape[len(spec.shape) - len(mean.args[1]) :]
        weights = [ref for ref in group.read() if group.spec(ref).shape == shape]
        op = Op(
            "aten._fused_rms_norm.default",
            (source, shape, weights[0] if weights else None, epsilon),
            (spec, *mean.outs),
        )
        guess = _norm_guess(group, source, op)
        if guess:
            yield guess


RULES: Mapping[str, Rule] = {
    "aten._softmax.default": softmax,
    "aten._log_softmax.default": softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": softmax_backward,
    "aten.gelu.default": unary("gelu"),
    "aten.silu.default": unary("silu"),
    "aten.softplus.default": unary("softplus"),
    "aten.hardswish.default": unary("hardswish"),
    "aten.mish.default": unary("mish"),
    "aten.logsumexp.default": logsumexp,
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten._fused_rms_norm.default": rms_norm,
    "aten.nll_loss_forward.default": nll_loss,
    "aten.max_pool2d_with_indices.default": max_pool,
}
"""By the operator that was decomposed."""
