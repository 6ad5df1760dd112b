"""Dispatch: which sizes one compilation of a Dynamo frame takes, and which it leaves to earlier ones.

Dynamo asks its newest compilation first. Without more, one that serves all sizes would take over those of every bucket
that was compiled before it, and their kernels would never run again: it is given a guard against them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges

from torch_kevolve.lowering.buckets import Buckets, finite_bounds

Box: TypeAlias = "Mapping[str, ValueRanges[Any]]"
"""Ranges by the source of a size, as Dynamo writes it: all of them at once are what one compilation serves."""

_TAKEN: dict[int, list[tuple[int, Box]]] = {}
"""By frame: the number of a compilation for a bucket, and its box."""


@dataclass(frozen=True)
class Dispatch:
    """Compilation `number` of a frame, `limit` of which Dynamo allows.

    A frame beyond Dynamo's recompile limit stays in eager mode for good, or raises under fullgraph=True. So the first
    two of eight compilations may be for buckets, the third may leave sizes to them, and from the fourth on everything
    is as without buckets: that adds two compilations at most, and a frame that needs six on its own is safe.
    """

    buckets: Buckets
    frame: int
    number: int
    limit: int

    @classmethod
    def now(cls) -> Dispatch | None:
        """Of the graph that Dynamo compiles in this thread; None where no guard on a size may be added."""
        from torch._dynamo import config
        from torch._inductor.virtualized import V

        name, buckets = torch._guards.CompileContext.current_compile_id(), Buckets.now()
        if name is None or name.frame_id is None or name.frame_compile_id is None or buckets is None:
            return None
        if config.error_on_recompile or torch.compiler.is_exporting() or getattr(V, "aot_compilation", False):
            return None
        if _guards_filtered():
            return None
        return cls(buckets, name.frame_id, name.frame_compile_id, config.recompile_limit)

    @property
    def bucketed(self) -> bool:
        return 4 * (self.number + 1) <= self.limit

    def settle(self) -> None:
        """The graph is compiled, or was found in a cache, and its own guards are there."""
        taken = _TAKEN.setdefault(self.frame, [])
        # After a reset of Dynamo numbers begin anew, and what bore them is gone.
        taken[:] = [(number, box) for number, box in taken if number < self.number]
        if 4 * self.number <= self.limit:
            for _, box in taken:
                self._leave(box)
        mine = self._box() if self.bucketed else {}
        if mine:
            taken.append((self.number, mine))

    def _box(self) -> Box:
        """The sizes that stay in their bucket here, whoever said so."""
        box = {}
        for name, held in self.buckets.env.var_to_range.items():
            bucket, sources = self.buckets.bucket_of(name), self.buckets.env.var_to_sources.get(name)
            if bucket is not None and sources and name not in self.buckets.strict and held.issubset(bucket):
                box[_name(sources[0])] = held
        return box

    def _leave(self, box: Box) -> None:
        env = self.buckets.env
        symbols = {_name(source): name for name, sources in env.var_to_sources.items() for source in sources}
        parts = [(symbols.get(source), part) for source, part in box.items()]
        sizes = [None if name in self.buckets.strict else self.buckets.size(name) for name, _ in parts]
        if None in sizes or all(size in part for size, (_, part) in zip(sizes, parts, strict=True)):
            return
        env.evaluate_expr(sympy.Or(*(sympy.Not(bound) for name, part in parts for bound in finite_bounds(name, part))))


def _name(source: Any) -> str:
    """In torch 2.11 the name is a method."""
    return str(source.name() if callable(source.name) else source.name)


def _guards_filtered() -> bool:
    """Whether a `guard_filter_fn` may drop our guard: without it a kernel would run at sizes that it cannot serve.

    Dynamo's ahead-of-time compilation sets one too.
    """
    from torch._dynamo.hooks import Hooks

    frame = sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("hooks")
        if isinstance(held, Hooks):
            return held.guard_filter_fn is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False
