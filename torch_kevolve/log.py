"""Log: one logger tree, silent until asked."""

from __future__ import annotations

import logging
import os

ROOT = "torch_kevolve"
ENV = "KEVOLVE_LOGS"


def configure(text: str | None = None) -> None:
    """Turn on logs in the manner of TORCH_LOGS: `KEVOLVE_LOGS="lowering,+evaluation,-store"`.

    A bare name means INFO, `+name` DEBUG, `-name` ERROR; `all` names the whole tree. Records go to stderr.
    """
    text = os.environ.get(ENV, "") if text is None else text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        return
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[kevolve] %(name)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    for part in parts:
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(part[0], logging.INFO)
        name = part.lstrip("+-")
        logging.getLogger(ROOT if name in ("all", "kevolve") else f"{ROOT}.{name}").setLevel(level)
