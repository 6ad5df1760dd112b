"""What torch.compile passes is split and checked before anything is compiled."""

from __future__ import annotations

import pytest

from torch_kevolve.errors import BadSetting, UnknownOption
from torch_kevolve.lowering.options import split


def test_defaults() -> None:
    settings, patches = split(None, None)
    assert settings.effort in ("none", "quick", "full") and patches == {}


def test_ours_are_taken_out_and_the_rest_goes_on() -> None:
    settings, patches = split(None, {"kevolve.effort": "none", "epilogue_fusion": False, "max-fusion-size": 32})
    assert settings.effort == "none"
    assert patches == {"epilogue_fusion": False, "max_fusion_size": 32}


@pytest.mark.parametrize(
    "how", [("max-autotune", None), (None, {"mode": "max-autotune"}), ("max-autotune", {"mode": "max-autotune"})]
)
def test_a_mode_is_taken_in_both_places(how: tuple[str | None, dict[str, str] | None]) -> None:
    assert split(*how)[1]["max_autotune"] is True


def test_an_explicit_option_wins_over_its_mode() -> None:
    assert split(None, {"mode": "max-autotune", "max_autotune": False})[1]["max_autotune"] is False


def test_unknown_option_of_ours_names_the_nearest() -> None:
    with pytest.raises(UnknownOption, match=r"kevolve\.efort.*kevolve\.effort"):
        split(None, {"kevolve.efort": "none"})


def test_unknown_inductor_option_names_the_nearest() -> None:
    with pytest.raises(UnknownOption, match=r"max_autotun\b.*max_autotune"):
        split(None, {"max_autotun": True})


def test_an_option_without_the_prefix_is_not_silently_ours() -> None:
    with pytest.raises(UnknownOption, match=r"kevolve\.effort"):
        split(None, {"effort": "none"})


@pytest.mark.parametrize(
    "bad", [("maxautotune", None), (None, {"mode": "fast"}), ("max-autotune", {"mode": "reduce-overhead"})]
)
def test_bad_modes(bad: tuple[str | None, dict[str, str] | None]) -> None:
    with pytest.raises(BadSetting, match="mode"):
        split(*bad)


@pytest.mark.parametrize("bad", [{"kevolve.effort": "huge"}, {"kevolve.budget_s": "soon"}, {"max_fusion_size": "many"}])
def test_bad_values(bad: dict[str, str]) -> None:
    with pytest.raises(BadSetting):
        split(None, bad)
