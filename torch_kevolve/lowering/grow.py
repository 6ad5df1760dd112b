"""Grow: how far a region reaches, largest first.

A rung of the ladder is one way to cut the graph around an anchor. Growth goes down through everything that depends on
the anchor and up through what that needs, never around: a set that is not convex takes in what lies between or stops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from torch_kevolve.lowering.cost import elements, hint, nbytes
from torch_kevolve.lowering.kinds import (
    FUSES,
    Kind,
    axes_of,
    instance_of,
    is_tensor,
    kind_of,
    name_of,
    refusal,
    tensors_of,
)
from torch_kevolve.lowering.reach import Reach

MOST_NODES = 160
Allow = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Growth:
    """`nodes` in the graph's order. `owned`: those that leave the graph; the rest is cheap and may stay for others."""

    nodes: tuple[fx.Node, ...]
    owned: frozenset[fx.Node]
    cuts: dict[str, str] = field(default_factory=dict)


def ladder(anchor: fx.Node, reach: Reach, taken: set[fx.Node]) -> Iterator[Growth]:
    """The rungs for one anchor, from the largest to the bare anchor."""
    kind = kind_of(anchor)
    fuse = _of_kinds(FUSES)
    quiet = _of_kinds({Kind.VIEW, Kind.MAKE, Kind.PICK})
    if kind is Kind.MATMUL:
        reduce_too = _of_kinds(FUSES | {Kind.REDUCE, Kind.GATHER})
        # What is made of labels (a mask, a count) costs a launch where it stays outside.
        yield grow(anchor, reach, taken, down=reduce_too, up=_either(quiet, _one_per_row(anchor)))
        yield grow(anchor, reach, taken, down=reduce_too, up=quiet)
        rows = _either(fuse, _of_rows(anchor))
        yield grow(anchor, reach, taken, down=rows, up=quiet)
        yield grow(anchor, reach, taken, down=fuse, up=quiet)
        yield grow(anchor, reach, taken, down=_nothing, up=quiet)
    elif kind in (Kind.REDUCE, Kind.GATHER):
        rows = _of_kinds(FUSES | {Kind.REDUCE, Kind.GATHER})
        yield grow(anchor, reach, taken, down=rows, up=rows, around=True)
        yield grow(anchor, reach, taken, down=rows, up=rows)
        alike = _alike(anchor)
        yield grow(anchor, reach, taken, down=alike, up=alike, around=True)
        yield grow(anchor, reach, taken, down=alike, up=alike)
        family = _same_origin(anchor)
        epilogue = _either(family, fuse)
        yield grow(anchor, reach, taken, down=epilogue, up=family)
        yield grow(anchor, reach, taken, down=family, up=family)
        yield grow(anchor, reach, taken, down=_nothing, up=fuse)
    else:
        yield grow(anchor, reach, taken, down=fuse, up=fuse)
        yield grow(anchor, reach, taken, down=fuse, up=quiet)
        yield grow(anchor, reach, taken, down=_nothing, up=quiet)
    yield grow(anchor, reach, taken, down=_nothing, up=_nothing)


def grow(anchor: fx.Node, reach: Reach, taken: set[fx.Node], down: Allow, up: Allow, around: bool = False) -> Growth:
    """Add neighbours until none may be added. `down` and `up` say which, on top of what is always asked.

    `around`: also what else is computed from the values that the anchor needs (the other sums of a backward).
    """
    region = _Set(anchor, reach, taken)
    changed = True
    while changed and len(region.inside) < MOST_NODES:
        changed = False
        for node in sorted(region.inside, key=reach.place.__getitem__):
            if node in region.flow or around:
                for user in node.users:
                    changed |= region.add(user, down, flow=True)
            for read in node.all_input_nodes:
                changed |= region.add(read, up, flow=kind_of(read) not in FUSES)
    region.trim()
    nodes = tuple(sorted(region.inside, key=reach.place.__getitem__))
    inside = region.inside
    owned = frozenset(node for node in nodes if not (_stays(node, inside) and _used_outside(node, inside)))
    return Growth(nodes, owned, region.cuts)


class _Set:
    """A growing set. `flow`: nodes that are anchors or depend on one inside."""

    def __init__(self, anchor: fx.Node, reach: Reach, taken: set[fx.Node]) -> None:
        self.reach, self.taken, self.anchor = reach, taken, anchor
        self.inside = set(_unit(anchor))
        self.flow = set(self.inside)
        self.cuts: dict[str, str] = {}

    def add(self, node: fx.Node, allow: Allow, flow: bool) -> bool:
        if node in self.inside:
            if flow and node not in self.flow:
                self.flow.add(node)
                return True
            return False
        reason = self._refuse(node, allow)
        if reason is None:
            new = set(_unit(node))
            closure = set(self.reach.between(self.inside | new))
            if any(self._refuse(each, allow) for each in closure):
                reason = "not-convex"
            else:
                new |= {each for inner in closure for each in _unit(inner)}
                if self.reach.between(self.inside | new):
                    reason = "not-convex"
        if reason is not None:
            if node.op == "call_function":
                self.cuts.setdefault(name_of(node), reason)
            return False
        self.inside |= new
        if flow:
            self.flow |= new
        return True

    def _refuse(self, node: fx.Node, allow: Allow) -> str | None:
        if node in self.taken:
            return "other-region"
        kind = kind_of(node)
        if kind is None:
            return (refusal(node) or "kind") if node.op == "call_function" else "boundary"
        if not is_tensor(node):
            return "no-tensor"
        return None if allow(node) else kind.value

    def trim(self) -> None:
        """Drop leaves that no kernel is needed for: views at the end, constants and views that only lead outside."""
        changed = True
        while changed:
            changed = False
            for node in list(self.inside):
                if node is self.anchor or (kind_of(node) not in (Kind.VIEW, Kind.MAKE) and not _pick_of_view(node)):
                    continue
                if not any(user in self.inside for user in node.users):
                    self.inside.discard(node)
                    changed = True


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes whose values are wanted outside, in the graph's order.

    Views and casts of the region's inputs are computed again outside, and a view of a value inside is taken of the
    materialised value: what a region returns is a tensor of its own, never an alias.
    """
    inside = set(nodes)
    wanted: set[fx.Node] = set()
    for node in nodes:
        if _used_outside(node, inside):
            wanted |= _materialised(node, inside)
    return [node for node in nodes if node in wanted]


def _materialised(node: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    if node not in inside:
        return set()
    if not _stays(node, inside):
        return {node}
    out: set[fx.Node] = set()
    for read in node.all_input_nodes:
        out |= _materialised(read, inside)
    return out


def _stays(node: fx.Node, inside: set[fx.Node]) -> bool:
    """The node may be computed again outside at no cost worth a write: a view, a constant, a cast of an input, or
    pointwise work on inputs that whoever reads it will fuse anyway."""
    kind = kind_of(node)
    if kind in (Kind.VIEW, Kind.MAKE) or _pick_of_view(node):
        return True
    leaves = _leaves(node, inside)
    if kind is not Kind.POINTWISE or leaves is None:
        return False
    if name_of(node) == "convert_element_type" and len(leaves) == 1:
        return True
    # A value that must be written for somebody is better written here, where it is at hand already.
    fused = all(user in inside or kind_of(user) in (Kind.POINTWISE, Kind.REDUCE) for user in node.users)
    return fused and sum(map(_bytes, leaves)) <= 1.5 * _bytes(node)


def _leaves(node: fx.Node, inside: set[fx.Node]) -> set[fx.Node] | None:
    """The region's inputs that a value is made of; None if an anchor stands between."""
    out: set[fx.Node] = set()
    stack = [node]
    seen = {node}
    while stack:
        for read in stack.pop().all_input_nodes:
            if read in seen:
                continue
            seen.add(read)
            if read not in inside:
                out.add(read)
            elif kind_of(read) in FUSES and not (kind_of(read) is Kind.PICK and not _pick_of_view(read)):
                stack.append(read)
            else:
                return None
    return out


def _bytes(node: fx.Node) -> int:
    return sum(map(nbytes, tensors_of(node.meta.get("val"))))


def _used_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside for user in node.users)


def _pick_of_view(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and kind_of(source) is Kind.VIEW


def _unit(node: fx.Node) -> list[fx.Node]:
    """A node with several results goes with all of its picks."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    picks = [user for user in source.users if user.target is operator.getitem]
    return [source, *picks]


def _of_kinds(kinds: frozenset[Kind] | set[Kind]) -> Allow:
    return lambda node: kind_of(node) in kinds


def _nothing(node: fx.Node) -> bool:
    return kind_of(node) is Kind.PICK


def _one_per_row(anchor: fx.Node) -> Allow:
    """Pointwise work and reductions on tensors that hold at most one element per row of a matrix product."""
    value = anchor.meta["val"]
    rows = elements(value) // max(1, hint(value.shape[-1]))

    def allow(node: fx.Node) -> bool:
        kind = kind_of(node)
        if kind not in FUSES and kind is not Kind.REDUCE:
            return False
        values = [t for each in (node, *node.all_input_nodes) for t in tensors_of(each.meta.get("val"))]
        return all(elements(t) <= rows for t in values)

    return allow


def _of_rows(anchor: fx.Node) -> Allow:
    """Reductions and gathers along the columns of a matrix product."""
    columns = anchor.meta["val"].shape[-1]

    def allow(node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or hint(value.shape[-1]) != hint(columns):
            return False
        if kind_of(node) is Kind.REDUCE:
            return axes_of(node) == frozenset({value.dim() - 1})
        return kind_of(node) is Kind.GATHER and node.args[1] in (-1, value.dim() - 1)

    return allow


def _either(one: Allow, other: Allow) -> Allow:
    return lambda node: one(node) or other(node)


def _alike(anchor: fx.Node) -> Allow:
    """Pointwise work, and reductions over the anchor's own axes of a tensor of its own rank."""
    axes, rank = axes_of(anchor), _rank(anchor)

    def allow(node: fx.Node) -> bool:
        kind = kind_of(node)
        if kind is Kind.REDUCE:
            return axes_of(node) == axes and _rank(node) == rank
        return kind in FUSES or kind is Kind.GATHER

    return allow


def _rank(node: fx.Node) -> int:
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value.dim() if value is not None and hasattr(value, "dim") else -1


def _same_origin(anchor: fx.Node) -> Allow:
    """What was decomposed from the same library operator, and the constants and views it needs."""
    origin = instance_of(anchor)

    def allow(node: fx.Node) -> bool:
        kind = kind_of(node)
        same = origin[0] != "" and instance_of(node) == origin
        return kind is not None and (same or kind in (Kind.VIEW, Kind.MAKE, Kind.PICK))

    return allow
