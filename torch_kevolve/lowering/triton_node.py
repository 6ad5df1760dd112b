"""Triton node: one launch as a functional wrapper node that Inductor inlines.

num_warps and num_stages among a node's constants are dropped without a word, so the kernel is wrapped in an autotuner
with one configuration: Inductor reads them from there.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import PlanError, RegionRefused
from torch_kevolve.languages.triton import Triton
from torch_kevolve.lowering.sizes_fx import SizeNodes
from torch_kevolve.plan import Run, Tensor
from torch_kevolve.sizes import evaluate


def functions(candidate: Candidate) -> Mapping[str, Any]:
    """The jitted functions of a candidate's checked and printed source, by name."""
    folder = Path(tempfile.gettempdir()) / "kevolve-triton"
    folder.mkdir(exist_ok=True)
    member = Triton()
    built = member.build(candidate, {}, "interpret", folder)
    if not built.ok:
        raise RegionRefused("triton-source", built.note)
    return member.functions(built, candidate)


def launch(
    graph: fx.Graph, function: Any, run: Run, value: Callable[[Any], Any], sizes: SizeNodes, written: Sequence[str]
) -> dict[str, fx.Node]:
    """Insert the node of one launch; the new nodes of the tensors that it may write (`written`), by name."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    names = list(function.arg_names)[: len(run.args)]
    tensors: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name, arg in zip(names, run.args, strict=True):
        held = value(arg)
        if isinstance(held, fx.Node):
            tensors[name] = held
            if isinstance(arg, Tensor) and arg.name in written:
                keys[arg.name] = name
        else:
            constants[name] = held
    # All three axes: torch 2.11 generates a launcher that asks for each of them.
    grid = tuple(sizes.node(size) for size in (*run.grid, 1, 1, 1)[:3])
    if any(size == 0 for size in grid):
        raise RegionRefused("empty", "a grid without a block is not launched")
    clones = list(dict.fromkeys(keys.values()))
    node = graph.call_function(
        triton_kernel_wrapper_functional,
        kwargs={
            "kernel_idx": kernel_side_table.add_kernel(_configured(function, run)),
            "constant_args_idx": kernel_side_table.add_constant_args(constants),
            "grid": [grid],
            "tma_descriptor_metadata": {},
            "kwargs": tensors,
            "tensors_to_clone": clones,
        },
    )
    node.meta["val"] = {name: tensors[name].meta["val"] for name in clones}
    values = {name: held.meta["val"] for name, held in tensors.items()}
    # Exact strides, not their order alone: Inductor may lay an intermediate out anew.
    # torch 2.11 maps over these beside the node's own arguments and wants the same container types.
    node.meta["eager_input_vals"] = ((), {**node.kwargs, "kwargs": immutable_dict(values)})
    made = {}
    for name, key in keys.items():
        pick = graph.call_function(operator.getitem, (node, key))
        pick.meta["val"] = tensors[key].meta["val"]
        made[name] = pick
    return made


def _configured(function: Any, run: Run) -> Any:
    import triton

    constants = {}
    for name, size in run.meta:
        if hasattr(size, "free_symbols") and size.free_symbols:
            raise PlanError(detail=f"{name} = {size} must be a number where a kernel is compiled")
        constants[name] = evaluate(size, {}) if hasattr(size, "free_symbols") else size
    options = {name: number for name, number in run.options if name in ("num_warps", "num_stages", "num_ctas")}
    return triton.autotune(configs=[triton.Config(constants, **options)], key=[])(function)
