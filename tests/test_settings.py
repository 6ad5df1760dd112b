"""Settings: one place for every knob."""

from dataclasses import fields

import pytest

from torch_kevolve.errors import BadSetting, UnknownOption
from torch_kevolve.settings import EFFORT, Settings


def test_an_explicit_option_wins_over_the_environment():
    env = {"KEVOLVE_EFFORT": "full", "KEVOLVE_BUDGET_S": "5"}
    made = Settings.make({"kevolve.effort": "none"}, env)
    assert made.effort == "none" and made.budget_s == 5.0


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownOption, match=r"Did you mean 'kevolve\.numerics'"):
        Settings.make({"kevolve.numeric": "fast"}, {})


@pytest.mark.parametrize(
    "options", [{"kevolve.effort": "hard"}, {"kevolve.budget_s": "long"}, {"kevolve.on_error": ""}]
)
def test_a_bad_value_names_the_cure(options):
    with pytest.raises(BadSetting, match="Set it to"):
        Settings.make(options, {})


def test_every_knob_has_its_own_variable_and_a_sentence():
    names = [f.metadata["env"] for f in fields(Settings)]
    assert len(set(names)) == len(names) and all(name.startswith("KEVOLVE_") for name in names)
    assert all(f.metadata["help"].endswith(".") for f in fields(Settings))


def test_budget_follows_effort_unless_said():
    assert Settings.make({}, {}).budget == EFFORT["quick"]
    assert Settings.make({"kevolve.budget_s": 7}, {}).budget.seconds == 7
    assert Settings.make({"kevolve.effort": "none", "kevolve.budget_s": 7}, {}).budget.seconds == 0


def test_home(tmp_path, monkeypatch):
    assert Settings.make({}, {"KEVOLVE_HOME": str(tmp_path)}).home_path == tmp_path
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Settings.make({}, {}).home_path == tmp_path / "data" / "kevolve"
