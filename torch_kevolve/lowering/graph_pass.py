"""Graph pass: the one place where Inductor hands us a graph."""

from __future__ import annotations

import logging
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_kevolve.lowering.passage import enrolled, passage_now

log = logging.getLogger(__name__)


class RegionPass(CustomGraphPass):  # type: ignore[misc]
    """Inductor's post-grad pre-pass. `first`: a pass of the user's own that stood in the same place."""

    def __init__(self, token: int, uuid: str | None, first: Any = None) -> None:
        self.token, self._uuid, self.first = token, uuid, first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        work = enrolled(self.token)
        if work is None:
            return
        passage = passage_now()
        passage.ran = True
        try:
            # Loaded when a graph is really compiled: where Inductor's caches answer, that is 0.1 s of imports saved.
            from torch_kevolve.lowering.replace import replace_regions

            replace_regions(graph, work, passage)
        except (
            Exception
        ) as error:  # a fault of ours leaves the graph to Inductor; the hook decides whether it is raised
            log.warning("regions were left to Inductor: %s: %s", type(error).__name__, error)
            work.hooks.fault("pass", error)

    def uuid(self) -> Any:
        """None: Inductor's caches are bypassed, so the pass is sure to run."""
        if self._uuid is None:
            return None
        if self.first is None:
            return self._uuid
        inner = self.first.uuid()
        return None if inner is None else (self._uuid, inner)
