"""Inductor: the host, with our pass in it and a gate around it.

Every graph is compiled with the kernels that were found; if any was put in, it is compiled without them too, both are
timed, and the faster one is what the user gets.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from torch_kevolve.lowering.graph_pass import RegionPass
from torch_kevolve.lowering.hooks import Hooks
from torch_kevolve.lowering.passage import Passage, Work, enroll, recording
from torch_kevolve.record import RegionVerdict

log = logging.getLogger(__name__)

SLOT = "post_grad_custom_pre_pass"
PLAIN, KERNELS = "plain", "kernels"
_EXAMPLE_ELEMENTS = 2**22


def compile(gm: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks, patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor and our kernels. `patches`: Inductor's configuration for this call.

    Raises what Inductor raises; faults of ours go to `hooks.fault` and leave the region, or the graph, to Inductor.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    work = Work(hooks, _integers(inputs))
    first = dict(patches).get(SLOT, getattr(config, SLOT))
    ours = RegionPass(enroll(work), hooks.uuid, first)
    gate = _Gate(work, ours)

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return gate.compile(gm, example_inputs, args, kwargs)

    return compile_fx(gm, inputs, inner_compile=inner, config_patches={**patches, SLOT: ours})  # type: ignore[no-any-return]


def _integers(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of the small integer inputs."""
    found = [x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point() and not x.is_complex()]
    plain = [x for x in found if type(x) is torch.Tensor and x.layout is torch.strided and x.device.type != "meta"]
    return [x.detach().clone() for x in plain if x.numel() <= _EXAMPLE_ELEMENTS]


@dataclass
class _Gate:
    """Compiles one graph in up to three ways and keeps one."""

    work: Work
    ours: RegionPass

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        phase = _phase(kwargs)
        hooks = self.work.hooks
        build = _Build(gm, inputs, args, kwargs)
        known = hooks.known_gate.get(phase)
        if known == PLAIN:
            return build.arm({SLOT: self.ours.first}, keep=False)
        options = hooks.arms.get(known, {}) if known is not None else {}
        ways = known is None and bool(hooks.arms)
        racing = hooks.gate_on and known is None and not _ahead_of_time()
        graphs = _graphs_asked(kwargs)
        # Without a name nothing of this compilation is cached, so a guard may wait for the race.
        with recording(phase, waits=racing and hooks.uuid is None) as passage:
            made = self._kernels_or_plain(build, passage, {SLOT: self.ours, **options}, keep=racing)
        if not racing or not (passage.replaced or (ways and passage.verdicts)):
            if passage.replaced and known is None:
                hooks.gate(phase, {"kept": KERNELS, "why": "not raced"})
            if passage.ran:
                hooks.note(phase, passage.verdicts)
            passage.keep()
            return made
        first = KERNELS if passage.replaced else PLAIN
        if graphs:
            return self._raced_without_graphs(build, {first: made}, passage, ways)
        arms = self._racers(build, {first: made}, passage, ways)
        return build.settle(arms[self._decide(lambda: arms, inputs, passage)])

    def _raced_without_graphs(self, build: _Build, made: dict[str, Any], passage: Passage, ways: bool) -> Any:
        """A CUDA graph recorded in the race would hold the made-up inputs, so the race is one of compilations without
        it. The arm that is kept is `made`, or compiled as it was asked for."""
        racers = partial(self._racers, build.without_graphs(), {}, passage, ways)
        kept = self._decide(racers, build.inputs, passage)
        if kept in made:
            return build.settle(made[kept])
        # Inductor notes here that it could make no graph; of another arm it may.
        build.kwargs["cudagraphs"].value = True
        with recording(passage.phase):
            return build.arm(self._patches(kept), keep=False)

    def _patches(self, name: str) -> dict[str, Any]:
        """Inductor's configuration for one arm."""
        if name == PLAIN:
            return {SLOT: self.ours.first}
        return {SLOT: self.ours, **self.work.hooks.arms.get(name, {})}

    def _racers(self, build: _Build, ready: dict[str, Any], passage: Passage, ways: bool) -> dict[str, Any]:
        """The arms that are to be raced, of which `ready` are compiled already."""
        # Hot regions and no kernel: one of Inductor's own option sets may still be faster than its default.
        names = [*([KERNELS] if passage.replaced else []), PLAIN, *(self.work.hooks.arms if ways else ())]
        made = dict(ready)
        for name in names:
            if name not in made:
                try:
                    with recording(passage.phase, waits=passage.waits):
                        made[name] = build.arm(self._patches(name), keep=True)
                except Exception as error:  # an option set that nobody asked for is no reason to fail
                    if name in (KERNELS, PLAIN) or _is_control_flow(error):
                        raise
                    self.work.hooks.fault("compile", error)
        return made

    def _kernels_or_plain(self, build: _Build, passage: Passage, patches: dict[str, Any], keep: bool) -> Any:
        """The one place where whatever goes wrong with kernels inside is caught: the graph then compiles without them.

        Dynamo's restarts are exceptions too and are none of ours; and if the plain graph fails as well, its error is
        the user's to see.
        """
        try:
            return build.arm(patches, keep=True)
        except Exception as error:
            if _is_control_flow(error) or not passage.replaced:
                raise
            made = build.arm({SLOT: self.ours.first}, keep=keep)
            self.work.hooks.fault("compile", error)
            log.warning("the graph was compiled without kernels: %s: %s", type(error).__name__, str(error)[:300])
            detail = f"{type(error).__name__}: {error}"[:300]
            self.work.refuse(passage.verdicts, "compile", detail)
            passage.verdicts[:] = _all_left(passage.verdicts, "compile", detail)
            passage.forget()
            return made

    def _decide(self, racers: Callable[[], dict[str, Any]], inputs: Sequence[Any], passage: Passage) -> str:
        """The name of the arm to keep. One that cannot be called is left here, before the user calls it."""
        from torch_kevolve.lowering.race import MARGIN, race

        hooks = self.work.hooks
        try:
            arms = racers()
            times = race(arms, inputs, self.work.examples)
        except Exception as error:  # a timing that failed is no reason to lose the compilation
            hooks.fault("race", error)
            hooks.gate(passage.phase, {"kept": PLAIN, "why": f"race failed: {type(error).__name__}"})
            hooks.note(passage.phase, _all_left(passage.verdicts, "race", str(error)[:300]))
            return PLAIN
        best = min((name for name in arms if name != PLAIN), key=times.__getitem__, default=PLAIN)
        # Kernels are proven faster on their own and may tie; an option set must earn its longer compilation.
        limit = times[PLAIN] * (MARGIN if passage.replaced else 1 / MARGIN)
        kept = best if times[best] <= limit else PLAIN
        hooks.gate(passage.phase, {"kept": kept, "ms": {name: round(ms, 6) for name, ms in times.items()}})
        if kept == PLAIN:
            detail = f"graph {times[best]:.4g} ms with kernels, {times[PLAIN]:.4g} ms without"
            passage.verdicts[:] = _all_left(passage.verdicts, "graph-not-faster", detail)
        else:
            passage.keep()
        hooks.note(passage.phase, passage.verdicts)
        return kept


@dataclass
class _Build:
    """One graph, as Inductor's inner compiler is to have it. `arm` compiles a copy under some configuration."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    strides: dict[int, list[Any]] = field(default_factory=dict)
    graphs: bool = True

    def arm(self, patches: dict[str, Any], keep: bool) -> Any:
        """`keep`: the graph is compiled again later, so this arm gets a copy."""
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.clear()
        gm = copy.deepcopy(self.gm) if keep else self.gm
        with config.patch({**patches, **({} if self.graphs else {"triton.cudagraphs": False})}):
            made = compile_fx_inner(gm, self.inputs, *self.args, **self.kwargs)
        if context is not None and context.output_strides is not None:
            self.strides[id(made)] = list(context.output_strides)
        return made

    def without_graphs(self) -> _Build:
        """The same, to be compiled without CUDA graphs, whatever was asked for."""
        from torch._inductor.utils import BoxedBool

        return replace(self, kwargs={**self.kwargs, "cudagraphs": BoxedBool(False)}, graphs=False, strides={})

    def settle(self, made: Any) -> Any:
        """The strides that the surrounding trace will expect are those of the arm that is kept, not of the last one."""
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None and id(made) in self.strides:
            context.output_strides[:] = self.strides[id(made)]
        return made


def _phase(kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def _ahead_of_time() -> bool:
    """Packages cannot be called here."""
    from torch._inductor.virtualized import V

    return bool(getattr(V, "aot_compilation", False))


def _graphs_asked(kwargs: Mapping[str, Any]) -> bool:
    cudagraphs = kwargs.get("cudagraphs")
    return torch.cuda.is_available() and bool(getattr(cudagraphs, "value", False))


def _is_control_flow(error: BaseException | None) -> bool:
    from torch._dynamo import exc

    names = ("RestartAnalysis", "SkipFrame", "TensorifyScalarRestartAnalysis", "UncapturedHigherOrderOpError")
    kinds = tuple(kind for name in names if (kind := getattr(exc, name, None)) is not None)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__
    return False


def _all_left(verdicts: Sequence[RegionVerdict], reason: str, detail: str) -> list[RegionVerdict]:
    return [replace(v, status="left", reason=reason, detail=detail) if v.status == "replaced" else v for v in verdicts]
