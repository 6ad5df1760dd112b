"""Kinds: what sort of work an FX node is.

Regions anchor on everything that is neither pointwise nor a view, and grow through those two. A node that must not be
moved or repeated (mutation, randomness, sizes that depend on data, unusual layouts) has a reason instead of a kind.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import fx

from torch_kevolve.task import DTYPE_BYTES


class Kind(Enum):
    """POINTWISE, VIEW and MAKE (constants, counters) fuse into anything; the others anchor regions."""

    POINTWISE = "pointwise"
    VIEW = "view"
    MAKE = "make"
    PICK = "pick"
    REDUCE = "reduce"
    GATHER = "gather"
    SCAN = "scan"
    MATMUL = "matmul"
    POOL = "pool"
    BAG = "bag"


FUSES = frozenset({Kind.POINTWISE, Kind.VIEW, Kind.MAKE, Kind.PICK})
ANCHORS = frozenset(Kind) - FUSES

_VIEWS = [
    "view",
    "_unsafe_view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "expand",
    "permute",
    "transpose",
    "t",
    "slice",
    "select",
    "as_strided",
    "alias",
    "detach",
    "split",
    "split_with_sizes",
    "unbind",
    "flatten",
]
_MAKES = ["full", "scalar_tensor", "iota", "arange", "zeros", "ones", "empty"]
_REDUCES = [
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "var",
    "var_mean",
    "std",
    "prod",
    "argmax",
    "argmin",
    "any",
    "all",
    "logsumexp",
    "linalg_vector_norm",
    "norm",
]
_KIND: dict[str, Kind] = {
    **dict.fromkeys(_VIEWS, Kind.VIEW),
    **dict.fromkeys(_MAKES, Kind.MAKE),
    **dict.fromkeys(_REDUCES, Kind.REDUCE),
    **dict.fromkeys(["gather", "embedding", "index_select", "index", "take_along_dim"], Kind.GATHER),
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], Kind.BAG),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"], Kind.SCAN),
    **dict.fromkeys(["mm", "addmm", "bmm", "baddbmm"], Kind.MATMUL),
    **dict.fromkeys(
        [
            "_low_memory_max_pool_with_offsets",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d",
            "avg_pool2d_backward",
            "avg_pool3d_backward",
        ],
        Kind.POOL,
    ),
    **dict.fromkeys(
        ["where", "clone", "convert_element_type", "bitwise_not", "logical_not", "copysign"], Kind.POINTWISE
    ),
}
LIBRARY: dict[str, str] = {
    **dict.fromkeys(["convolution", "convolution_backward", "_convolution_pointwise"], "convolution"),
    **dict.fromkeys(
        [
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ],
        "attention",
    ),
    **dict.fromkeys(["sort", "topk"], "sort"),
    **dict.fromkeys(["scatter", "scatter_add", "scatter_reduce", "index_put", "embedding_dense_backward"], "scatter"),
}
"""Hot operators that are left to the library for now, with the reason's slug."""

_FORBIDDEN = {
    torch.Tag.nondeterministic_seeded: "random",
    torch.Tag.data_dependent_output: "data-dependent",
    torch.Tag.dynamic_output_shape: "data-dependent",
}


def name_of(node: fx.Node) -> str:
    """`sum` for aten.sum.dim_IntList; the callable's own name for what is no ATen operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def fuses_natively(target: torch._ops.OpOverload) -> bool:
    """Inductor has its own form of this operator that is as good as the library's: pointwise work, views, matmuls."""
    from torch._inductor.lowering import lowerings

    kind = _KIND.get(target._schema.name.split("::")[1])
    plain = kind in (Kind.VIEW, Kind.MAKE, Kind.POINTWISE, Kind.MATMUL) or torch.Tag.pointwise in target.tags
    return plain and target in lowerings


_SEEN = "kevolve_kind"


def kind_of(node: fx.Node) -> Kind | None:
    """The node's kind; None where it is an input, an output, or nothing that a region may hold.

    Remembered at the node (it was half of the time spent on a 24-layer model) until `forget`.
    """
    if _SEEN not in node.meta:
        node.meta[_SEEN] = _kind_of(node)
    found: Kind | None = node.meta[_SEEN]
    return found


def forget(nodes: Iterable[fx.Node]) -> None:
    """Leave no trace of ours in nodes that others will copy."""
    for node in nodes:
        node.meta.pop(_SEEN, None)


def origin_of(node: fx.Node) -> str:
    """The ATen operator that was decomposed into this node, `aten._softmax.default`; empty if unknown."""
    made_by = node.meta.get("original_aten")
    return "" if made_by is None else str(made_by)


def instance_of(node: fx.Node) -> tuple[str, str]:
    """The operator that a node was decomposed from, and which call of it in the program, as far as it is known."""
    calls = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    return origin_of(node), str(calls[-1][0]) if calls else ""


def _kind_of(node: fx.Node) -> Kind | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return Kind.PICK if isinstance(source, fx.Node) and kind_of(source) is not None else None
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if refusal(node) is not None:
        return None
    kind = _KIND.get(name_of(node))
    if kind is None and torch.Tag.pointwise in target.tags:
        kind = Kind.POINTWISE
    return kind


def refusal(node: fx.Node) -> str | None:
    """Why a node must stay out of every region, as a slug; None where nothing speaks against it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None if target is operator.getitem else "foreign-operator"
    for tag, reason in _FORBIDDEN.items():
        if tag in target.tags:
            return reason
    if target._schema.is_mutable:
        return "mutation"
    for value in tensors_of(node.meta.get("val")):
        unusual = _unusual(value)
        if unusual is not None:
            return unusual
    return None if tensors_of(node.meta.get("val")) else "no-tensor"


def _unusual(value: torch.Tensor) -> str | None:
    if value.layout is not torch.strided:
        return "sparse"
    if value.is_complex() or str(value.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return "dtype"
    if value.is_conj() or value.is_neg():
        return "conjugate"
    for size in (*value.shape, *value.stride()):
        if isinstance(size, torch.SymInt) and _unbacked(size):
            return "unbacked"
    return None


def _unbacked(size: torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that a node's `meta["val"]` holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def is_tensor(node: fx.Node) -> bool:
    """The node's value is one tensor, or several."""
    return bool(tensors_of(node.meta.get("val")))


def axes_of(node: fx.Node) -> frozenset[int] | None:
    """The axes a reduction or scan runs over, counted from the front; None for other nodes."""
    kind = kind_of(node)
    if kind not in (Kind.REDUCE, Kind.SCAN) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    value = node.args[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    rank = value.dim()
    dim = node.kwargs.get("dim")
    names = [arg.name for arg in node.target._schema.arguments]  # type: ignore[union-attr]
    if dim is None and "dim" in names and len(node.args) > names.index("dim"):
        dim = node.args[names.index("dim")]
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if not dims:
        return frozenset(range(rank))
    return frozenset(d % rank if rank else 0 for d in dims)
