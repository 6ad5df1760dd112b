"""Canon: one spelling for one operator.

Decompositions, passes and torch versions write the same thing in several ways: `sum` over all or over named axes, six
kinds of reshape, scalars in their own overload. A task holds one of them, so that equal work has an equal key and
templates meet fewer forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch_kevolve.languages.replay import operator
from torch_kevolve.sizes import Size, contiguous_strides
from torch_kevolve.task import Arg, DType, Op, Ref, TensorSpec

RESHAPE = "aten.reshape.default"
_RESHAPES = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default",
    "aten.unsqueeze.default", "aten.flatten.using_ints", RESHAPE,
})  # fmt: skip
_SCALAR_FORMS = {f"aten.{name}.Scalar": f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")}
_WHOLE = {
    "aten.sum.default": "aten.sum.dim_IntList",
    "aten.mean.default": "aten.mean.dim",
    "aten.amax.default": "aten.amax.default",
    "aten.amin.default": "aten.amin.default",
    "aten.sum.dim_IntList": "aten.sum.dim_IntList",
    "aten.mean.dim": "aten.mean.dim",
    "aten.var_mean.correction": "aten.var_mean.correction",
    "aten.var.correction": "aten.var.correction",
}
_ONE_AXIS = frozenset({
    "aten.argmax.default", "aten.argmin.default", "aten.cumsum.default", "aten.cumprod.default",
    "aten.logcumsumexp.default", "aten.gather.default", "aten.index_select.default", "aten.select.int",
    "aten.slice.Tensor", "aten.any.dim", "aten.all.dim", "aten.prod.dim_int", "aten.cat.default",
    "aten.cummax.default", "aten.cummin.default", "aten.max.dim", "aten.min.dim",
})  # fmt: skip
_PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking")

SpecOf = Callable[[Ref], TensorSpec]


def canonical_op(op: Op, spec_of: SpecOf) -> Op:
    """The same operator in its one spelling. Placement (device, layout, pinning) is not part of a task."""
    kwargs = tuple((name, value) for name, value in op.kwargs if name not in _PLACEMENT)
    op = replace(op, kwargs=kwargs, target=_SCALAR_FORMS.get(op.target, op.target))
    op = _reshape(op, spec_of)
    op = _constant(op)
    op = _reduction(op, spec_of)
    op = _axis(op, spec_of)
    return _defaults(op)


def _reshape(op: Op, spec_of: SpecOf) -> Op:
    source = op.args[0] if op.args else None
    if not isinstance(source, Ref):
        return op
    dense = op.target == "aten.as_strided.default" and _same_elements(spec_of(source), op.outs[0])
    if op.target not in _RESHAPES and not dense:
        return op
    return Op(RESHAPE, (source, tuple(op.outs[0].shape)), op.outs)


def _same_elements(source: TensorSpec, out: TensorSpec) -> bool:
    """Both row-major and dense, of one size: as_strided is then a reshape."""
    return (
        source.numel == out.numel
        and source.strides == contiguous_strides(source.shape)
        and out.strides == contiguous_strides(out.shape)
    )


def _constant(op: Op) -> Op:
    kwargs = (("dtype", DType(op.outs[0].dtype)),) if op.outs else ()
    if op.target == "aten.scalar_tensor.default":
        return Op("aten.full.default", ((), op.args[0]), op.outs, kwargs)
    if op.target == "aten.full.default":
        return Op("aten.full.default", op.args, op.outs, kwargs)
    if op.target == "aten.arange.default":
        given = dict(op.kwargs)
        rest = (
            ("dtype", given.get("dtype", DType(op.outs[0].dtype))),
            ("requires_grad", False),
            ("start", 0),
            ("step", 1),
        )
        return Op("prims.iota.default", (op.outs[0].shape[0],), op.outs, rest)
    return op


def _reduction(op: Op, spec_of: SpecOf) -> Op:
    """Axes named, counted from the front, sorted."""
    if op.target not in _WHOLE or not isinstance(op.args[0], Ref):
        return op
    rank = len(spec_of(op.args[0]).shape)
    given = op.args[1] if len(op.args) > 1 and op.target not in ("aten.sum.default", "aten.mean.default") else None
    dims = given if isinstance(given, tuple) else () if given is None else (given,)
    axes = tuple(sorted({d % rank for d in dims if isinstance(d, int)})) if dims and rank else tuple(range(rank))
    rest = op.args[2:] if given is not None or len(op.args) > 2 else ()
    return replace(op, target=_WHOLE[op.target], args=(op.args[0], axes, *rest))


def _axis(op: Op, spec_of: SpecOf) -> Op:
    if (
        op.target not in _ONE_AXIS
        or len(op.args) < 2
        or isinstance(op.args[1], bool)
        or not isinstance(op.args[1], int)
    ):
        return op
    source = op.args[0][0] if isinstance(op.args[0], tuple) else op.args[0]
    if not isinstance(source, Ref):
        return op
    rank = max(1, len(spec_of(source).shape))
    return replace(op, args=(op.args[0], op.args[1] % rank, *op.args[2:]))


def _defaults(op: Op) -> Op:
    """Arguments in the schema's order; trailing defaults and keyword defaults dropped."""
    schema = operator(op.target)._schema
    given = dict(op.kwargs)
    args: list[Arg] = []
    trailing = 0
    keyword: dict[str, Arg] = {}
    for place, argument in enumerate(schema.arguments):
        has_default = argument.has_default_value()
        default = _plain(argument.default_value) if has_default else None
        if argument.kwarg_only:
            if argument.name in given and not (has_default and _same(given[argument.name], default)):
                keyword[argument.name] = given[argument.name]
            continue
        value = op.args[place] if place < len(op.args) else given.get(argument.name, default)
        args.append(value)
        trailing = 0 if not has_default or not _same(value, default) else trailing + 1
    kept = tuple(args[: len(args) - trailing]) if trailing else tuple(args)
    return replace(op, args=kept, kwargs=tuple(sorted(keyword.items())))


def _same(value: Arg, default: Arg) -> bool:
    # True == 1 and 1 == 1.0 in Python; a schema tells them apart.
    return type(value) is type(default) and value == default


def _plain(value: object) -> Arg:
    if isinstance(value, list):
        return tuple(_plain(each) for each in value)
    return value  # type: ignore[return-value]


def sizes_of(spec: TensorSpec) -> tuple[Size, ...]:
    """All sizes and strides of a spec."""
    return (*spec.shape, *spec.strides)
