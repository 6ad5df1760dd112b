"""Selection: the catalogue of policies."""

from __future__ import annotations

from torch_kevolve.agent.selection.best_first import BestFirst
from torch_kevolve.registry import Registry

SELECTIONS = Registry("selection", {"best_first": BestFirst})
