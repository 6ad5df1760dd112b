"""Settings: every knob, declared once."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch_kevolve.errors import BadSetting, UnknownOption

PREFIX = "kevolve."
VERSION = "0.1.0"


@dataclass(frozen=True)
class Budget:
    """What one effort may spend: device-independent limits of a search."""

    seconds: float
    candidates_per_task: int
    draft: int
    stall: int
    """Evaluations without a better kernel after which a task's search ends."""


EFFORT: dict[str, Budget] = {
    "none": Budget(seconds=0.0, candidates_per_task=0, draft=0, stall=0),
    "quick": Budget(seconds=60.0, candidates_per_task=24, draft=8, stall=10),
    "full": Budget(seconds=1800.0, candidates_per_task=200, draft=24, stall=48),
}


def knob(default: Any, env: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    """Declare a setting: its default, environment variable, sentence of help and, if closed, its choices."""
    return field(default=default, metadata={"env": env, "help": help, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """All knobs of one `torch.compile` call or command. Built by `Settings.make`; frozen afterwards.

    Raises BadSetting for a value that cannot be used and UnknownOption for an option that does not exist.
    """

    effort: str = knob("quick", "KEVOLVE_EFFORT", "How hard to search: none, quick or full.", ("none", "quick", "full"))
    budget_s: float = knob(-1.0, "KEVOLVE_BUDGET_S", "Seconds of search per model; negative: what the effort says.")
    numerics: str = knob(
        "default",
        "KEVOLVE_NUMERICS",
        "How exact a kernel must be: strict, default or fast.",
        ("strict", "default", "fast"),
    )
    on_error: str = knob(
        "fallback",
        "KEVOLVE_ON_ERROR",
        "A failure of our own: leave the region to Inductor (fallback) or raise.",
        ("fallback", "raise"),
    )
    skip: str = knob("", "KEVOLVE_SKIP", "Comma-separated operator names or task key prefixes to leave to Inductor.")
    gate: str = knob(
        "on", "KEVOLVE_GATE", "Time the whole graph with and without kernels and keep the faster one.", ("on", "off")
    )
    buckets: str = knob(
        "on",
        "KEVOLVE_BUCKETS",
        "Dynamic sizes: kernels for 2-16, 17-256, 257-4096, ..., compiled when first met (on), or one for all (off).",
        ("on", "off"),
    )
    proposer: str = knob("template", "KEVOLVE_PROPOSER", "Who proposes candidates.")
    selection: str = knob("best_first", "KEVOLVE_SELECTION", "Which attempt is refined next.")
    evaluator: str = knob("local", "KEVOLVE_EVALUATOR", "Where candidates are judged: local or inline (tests).")
    store: str = knob("tiered", "KEVOLVE_STORE", "Where kernels are kept: tiered, disk or memory.")
    languages: str = knob("", "KEVOLVE_LANGUAGES", "Comma-separated languages to use; empty: all that work here.")
    memory_fraction: float = knob(0.3, "KEVOLVE_MEMORY_FRACTION", "Share of free device memory a search may use.")
    candidate_s: float = knob(20.0, "KEVOLVE_CANDIDATE_S", "Seconds after which one candidate is killed.")
    seed: int = knob(0, "KEVOLVE_SEED", "Seed of the search's random choices.")
    progress: str = knob(
        "auto", "KEVOLVE_PROGRESS", "The progress line: auto (terminals only), on, off.", ("auto", "on", "off")
    )
    home: str = knob("", "KEVOLVE_HOME", "Folder of all state; empty: the XDG user data folder.")

    @classmethod
    def make(cls, options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Defaults, then the environment, then `options` (keys with or without `kevolve.`)."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for knob_ in fields(cls):
            name = knob_.metadata["env"]
            if name in env and env[name] != "":
                values[knob_.name] = _convert(knob_, name, env[name])
        for key, value in (options or {}).items():
            name = key.removeprefix(PREFIX)
            knob_ = cls._field(name, key)
            values[name] = _convert(knob_, key, value)
        return cls(**values)

    @classmethod
    def _field(cls, name: str, key: str) -> dataclasses.Field[Any]:
        known = {f.name: f for f in fields(cls)}
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UnknownOption(
                name=key, nearest=PREFIX + nearest, known=", ".join(PREFIX + each for each in sorted(known))
            )
        return known[name]

    @property
    def budget(self) -> Budget:
        """The effort's limits, with `budget_s` in place of its seconds when that is set."""
        budget = EFFORT[self.effort]
        if self.budget_s >= 0 and self.effort != "none":
            budget = dataclasses.replace(budget, seconds=self.budget_s)
        return budget

    @property
    def home_path(self) -> Path:
        """The folder of all state, absolute; it need not exist."""
        if self.home:
            return Path(os.path.expanduser(self.home)).absolute()
        import platformdirs

        try:
            home = Path(platformdirs.user_data_dir("kevolve", appauthor=False))
        except RuntimeError:
            home = Path("~")
        # A user id without HOME and without an entry in the user database: name a folder that cannot be made, so that
        # everything is kept in memory, rather than a folder `~` wherever the process happens to run.
        return home if home.is_absolute() else Path(os.devnull, "kevolve")

    @property
    def semantic(self) -> dict[str, str]:
        """The part that can change what a compiled graph computes or holds: it is in the graph key."""
        return {"numerics": self.numerics, "skip": self.skip, "gate": self.gate, "languages": self.languages}


def _convert(knob_: dataclasses.Field[Any], name: str, value: Any) -> Any:
    kind: Any = type(knob_.default)
    choices: tuple[str, ...] = knob_.metadata["choices"]
    try:
        converted = kind(value)
    except (TypeError, ValueError):
        raise BadSetting(name=name, value=value, why="it is no number", cure=f"a {kind.__name__}") from None
    if choices and converted not in choices:
        raise BadSetting(name=name, value=value, why="it is not one of the choices", cure=" or ".join(choices))
    return converted
