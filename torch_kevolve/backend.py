"""Backend: the door of torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from torch_kevolve.log import configure
from torch_kevolve.lowering.options import split
from torch_kevolve.one_graph import OneGraph
from torch_kevolve.purse import Purse
from torch_kevolve.record import RegionVerdict
from torch_kevolve.settings import Settings
from torch_kevolve.tally import TALLY

_PURSE = "_kevolve_purse"


def kevolve(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph: `torch.compile(model, backend="kevolve", mode=..., options={...})`.

    Raises UnknownOption and BadSetting for options that cannot be used, and whatever Inductor raises. A failure of our
    own leaves its region to Inductor unless `kevolve.on_error` is "raise".
    """
    configure()
    settings, patches = split(how.get("mode"), how.get("options"))
    return OneGraph(gm, inputs, settings, patches, _purse(settings)).compile()


def metrics() -> dict[str, Any]:
    """Counters of this process: regions, replaced, hits, misses, searches, candidates; `left`: {reason: count}."""
    return TALLY.read()


def report_regions() -> list[RegionVerdict]:
    """The verdict of every region compiled in this process since the last `reset_metrics`, in order."""
    return TALLY.regions()


def report_gates() -> list[dict[str, Any]]:
    """What the whole-graph gate decided since the last `reset_metrics`: `phase`, `kept`, and `ms` by arm or `why`."""
    return TALLY.gates()


def reset_metrics() -> None:
    """Set all counters to zero and forget the regions and gates."""
    TALLY.clear()


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Compile `model` anew, run it once on these inputs, and say what became of each region.

    A module in training mode is run forward and backward (its `.grad` is left alone), one in eval mode forward only and
    without gradients; a plain function as the grad mode and its arguments say.
    Returns `{"regions": [{"task", "status", "reason", "kernel", "ratio", ...}]}`. Searches as far as the effort in
    `options` or the environment allows; with effort none it searches nothing.
    """
    before = len(TALLY.regions())

    def door(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        return kevolve(gm, inputs, **how)

    given: dict[str, Any] = {"options": dict(options)} if options else {}
    # A backend of its own makes Dynamo compile again without forgetting what the program has compiled so far.
    with torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16), _grad_mode(model):
        outputs = torch.compile(model, backend=door, **given)(*args, **kwargs)
        _backward(model, outputs, (*args, *kwargs.values()))
    return {"regions": [_row(verdict) for verdict in TALLY.regions()[before:]]}


def _grad_mode(model: object) -> AbstractContextManager[Any]:
    if isinstance(model, torch.nn.Module):
        return torch.set_grad_enabled(model.training)
    return nullcontext()


def _backward(model: object, outputs: Any, args: Sequence[Any]) -> None:
    """The backward graph is compiled when it is first run."""
    leaves = [*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *args]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    made = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if made and wanted:
        torch.autograd.grad(made, wanted, [torch.ones_like(x) for x in made], allow_unused=True)


def _row(verdict: RegionVerdict) -> dict[str, Any]:
    names = ("task", "status", "reason", "kernel", "ratio", "anchor", "phase", "share", "detail")
    return {name: getattr(verdict, name) for name in names}


def _purse(settings: Settings) -> Purse:
    """The purse of the torch.compile call we are in, kept on the wrapper object that Dynamo calls us through.

    Whoever calls the backend by hand has a purse for that call alone.
    """
    owner = _owner()
    purse = getattr(owner, _PURSE, None)
    if not isinstance(purse, Purse):
        purse = Purse(settings.budget.seconds)
        if owner is not None:
            setattr(owner, _PURSE, purse)
    return purse


def _owner() -> Any:
    frame = sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("self") if frame.f_code.co_name == "__call__" else None
        if type(held).__name__ == "_TorchCompileWrapper":
            return held
        frame = frame.f_back  # type: ignore[assignment]
    return None
