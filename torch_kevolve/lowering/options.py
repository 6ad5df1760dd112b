"""Options: what torch.compile passes, split and checked.

Dynamo hands `mode` and `options` over unvalidated, and refuses both at once, so a mode is taken inside the options too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch_kevolve.errors import BadSetting, UnknownOption
from torch_kevolve.settings import PREFIX, Settings


def split(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Settings, dict[str, Any]]:
    """Our settings, and the patches of Inductor's configuration (a mode's, then the explicit ones).

    Raises UnknownOption for a key that neither knows, naming the nearest, and BadSetting for a value or mode that
    cannot be used.
    """
    given = dict(options or {})
    inner = given.pop("mode", None)
    if mode and inner and mode != inner:
        raise BadSetting(name="options['mode']", value=inner, why=f"mode={mode!r} was given too", cure="one of the two")
    ours = {key: value for key, value in given.items() if key.startswith(PREFIX)}
    rest = {key.replace("-", "_"): (key, value) for key, value in given.items() if not key.startswith(PREFIX)}
    patches = {**_mode_patches(mode or inner), **{name: _checked(name, *pair) for name, pair in rest.items()}}
    return Settings.make(ours), patches


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if not mode or mode == "default":
        return {}
    import torch._inductor

    known = torch._inductor.list_mode_options(None, None)
    if mode not in known:
        raise BadSetting(name="mode", value=mode, why="there is no such mode", cure=" or ".join(sorted(known)))
    return {key.replace("-", "_"): value for key, value in torch._inductor.list_mode_options(mode, None).items()}


def _checked(name: str, key: str, value: Any) -> Any:
    from torch._inductor import config

    known = config.get_config_copy()
    if name not in known:
        ours = [PREFIX + each for each in Settings.__dataclass_fields__]
        nearest = difflib.get_close_matches(key, [*ours, *known], n=1, cutoff=0.0)[0]
        raise UnknownOption(name=key, nearest=nearest, known=", ".join(sorted(ours)) + " and Inductor's own")
    held = known[name]
    if held is not None and type(held) in (bool, int, str) and not isinstance(value, type(held) | bool):
        raise BadSetting(
            name=key,
            value=value,
            why=f"Inductor expects a {type(held).__name__} there",
            cure=f"a {type(held).__name__}",
        )
    return value
