"""Proposers: the catalogue of who writes candidates."""

from __future__ import annotations

from torch_kevolve.agent.proposers.scripted import ScriptedProposer
from torch_kevolve.agent.proposers.template import TemplateProposer
from torch_kevolve.registry import Registry

PROPOSERS = Registry("proposers", {"template": TemplateProposer, "scripted": ScriptedProposer})
