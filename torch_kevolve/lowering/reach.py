"""Reach: which node depends on which, and whether a set of nodes can be one.

A set is convex if no path leaves it and comes back: only then can it be computed as one step. Every node has a bit;
ancestors and descendants are masks, so a question costs a few operations on big integers.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


class Reach:
    """Dependencies of one graph. `join` makes a set of nodes one for all later questions."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self._group: dict[fx.Node, int] = {}
        self._joined: list[int] = []
        self._above: list[int] = []
        self._below: list[int] = []
        self._walk()

    def mask(self, nodes: Iterable[fx.Node]) -> int:
        bits = 0
        for node in nodes:
            bits |= 1 << self.place[node]
        return bits

    def between(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Nodes outside the set that lie on a path from it back into it."""
        bits = self.mask(nodes)
        above = below = 0
        for i in _bits(bits):
            above |= self._above[i]
            below |= self._below[i]
        return [self.nodes[i] for i in _bits(above & below & ~bits)]

    def above(self, node: fx.Node, other: fx.Node) -> bool:
        """`other` is an ancestor of `node`."""
        return bool(self._above[self.place[node]] >> self.place[other] & 1)

    def join(self, nodes: Iterable[fx.Node]) -> None:
        """From now on these nodes are one step: what one needs, all need."""
        bits = self.mask(nodes)
        for node in nodes:
            self._group[node] = len(self._joined)
        self._joined.append(bits)
        above = below = 0
        for i in _bits(bits):
            above |= self._above[i]
            below |= self._below[i]
        for i in range(len(self.nodes)):
            # Whoever depends on a member now depends on all members and on all that they need, and the other way round.
            if bits >> i & 1 or self._above[i] & bits:
                self._above[i] |= above | bits
            if bits >> i & 1 or self._below[i] & bits:
                self._below[i] |= below | bits
        for i in _bits(bits):
            self._above[i] &= ~bits
            self._below[i] &= ~bits

    def _walk(self) -> None:
        self._above = [0] * len(self.nodes)
        self._below = [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            for read in node.all_input_nodes:
                at = self.place[read]
                self._above[i] |= self._above[at] | 1 << at
        for i in reversed(range(len(self.nodes))):
            for user in self.nodes[i].users:
                at = self.place[user]
                self._below[i] |= self._below[at] | 1 << at


def _bits(mask: int) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out
