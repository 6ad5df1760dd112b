"""Errors: one sentence each, and the cure.

KevolveError
|- UnknownName           a name that no member of an axis has
|- BadSetting            a setting whose value cannot be used
|- UnknownOption         a `kevolve.*` option that does not exist
|- RegionRefused         a region that stays with Inductor, and why
|- PlanError             a launch plan that cannot be built or replayed
|- TaskError             a task text that cannot be read
|- StoreError            a store that cannot do what was asked
|- EvaluationError       the evaluator itself broke (never a bad candidate)
`- FactoryError          a FILE:factory that does not name a model
"""

from __future__ import annotations


class KevolveError(Exception):
    """Base of all errors raised on purpose. `message` is a template over the keyword arguments."""

    message = "{detail}"

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))


class UnknownName(KevolveError):
    message = "no {axis} is called {name!r}. Known: {known}."


class BadSetting(KevolveError):
    message = "{name} = {value!r} cannot be used: {why}. Set it to {cure}."


class UnknownOption(KevolveError):
    message = "unknown option {name!r}. Did you mean {nearest!r}? Known: {known}."


class RegionRefused(KevolveError):
    """A region is left to Inductor. `reason` is a short slug that `metrics()` counts, `detail` is for people."""

    message = "{reason}: {detail}"

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(reason=reason, detail=detail)


class PlanError(KevolveError):
    message = "launch plan: {detail}"


class TaskError(KevolveError):
    message = "task: {detail}"


class StoreError(KevolveError):
    message = "store: {detail}"


class EvaluationError(KevolveError):
    message = "evaluation: {detail}"


class FactoryError(KevolveError):
    message = (
        "{text!r} does not name a model: {why}. Write FILE:factory, where factory() returns (model, args[, kwargs])."
    )
