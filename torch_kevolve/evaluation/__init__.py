"""Evaluation: the catalogue of evaluators."""

from __future__ import annotations

from collections.abc import Callable

from torch_kevolve.evaluation.base import Evaluator
from torch_kevolve.evaluation.inline import InlineEvaluator
from torch_kevolve.evaluation.local import LocalEvaluator
from torch_kevolve.registry import Registry

EVALUATORS: Registry[Callable[[], Evaluator]] = Registry(
    "evaluators", {"local": LocalEvaluator, "inline": InlineEvaluator}
)
