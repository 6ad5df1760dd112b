"""Graph memory: what every search learned."""

from torch_kevolve.graph_memory.graph import ExperienceGraph
from torch_kevolve.graph_memory.schema import Case

__all__ = ["Case", "ExperienceGraph"]
