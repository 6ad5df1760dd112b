"""Registry: the members of one axis by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from torch_kevolve.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in members are given at construction; strangers come by the entry point group `torch_kevolve.<axis>`.

    Raises UnknownName, which lists the known names, for a name that neither has.
    """

    def __init__(self, axis: str, known: Mapping[str, T]) -> None:
        self.axis = axis
        self._known = dict(known)

    def __getitem__(self, name: str) -> T:
        if name in self._known:
            return self._known[name]
        for point in entry_points(group=f"torch_kevolve.{self.axis}", name=name):
            member: T = point.load()
            return member
        raise UnknownName(axis=self.axis, name=name, known=", ".join(self.names()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Built-in names in their order of declaration, then the strangers' in order."""
        strangers = {point.name for point in entry_points(group=f"torch_kevolve.{self.axis}")}
        return [*self._known, *sorted(strangers - set(self._known))]
