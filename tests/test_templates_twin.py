"""The eager twin as a plan of library calls."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from triton_cases import H200, spec_of, trace

from torch_kevolve.languages.replay import replay
from torch_kevolve.plan import Aten
from torch_kevolve.task import Op, Ref, TaskGraph
from torch_kevolve.templates.twin import Twin


def test_replays_as_eager() -> None:
    x, w, b = torch.randn(6, 40), torch.randn(40), torch.randn(40)
    task, order = trace(lambda x, w, b: F.layer_norm(x, (40,), w, b), (x, w, b))
    given = [(x, w, b)[i] for i in order]
    outs = tuple(spec_of(t) for t in torch.ops.aten.native_layer_norm(x, [40], w, b, 1e-5))
    args = tuple(Ref(order.index(i)) for i in range(3))
    op = Op("aten.native_layer_norm.default", (args[0], (40,), args[1], args[2], 1e-5), outs)
    twin = TaskGraph(task.graph.inputs, (op,), (Ref(3),))
    space = Twin().match(replace(task, twin=twin), H200)
    assert space is not None and space.language == "aten"
    candidate = space.render(space.start[0])
    assert [step.target for step in candidate.plan.steps if isinstance(step, Aten)] == [op.target]
    assert torch.equal(replay(candidate.plan, task, given, None)[0], F.layer_norm(x, (40,), w, b))


def test_no_twin_and_a_twin_that_returns_an_input_have_no_space() -> None:
    task, _ = trace(torch.sin, (torch.randn(3),))
    assert Twin().match(task, H200) is None
    alias = TaskGraph(task.graph.inputs, (), (Ref(0),))
    assert Twin().match(replace(task, twin=alias), H200) is None
