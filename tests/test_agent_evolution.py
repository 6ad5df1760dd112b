"""The loop with a scripted judge: what it judges, when it ends, what it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from torch_kevolve.agent.evolution import CONFIRM_TRIES, Evolution, Outcome
from torch_kevolve.agent.progress import Quiet
from torch_kevolve.agent.promotion import refusal
from torch_kevolve.agent.proposers import PROPOSERS
from torch_kevolve.agent.proposers.scripted import ScriptedProposer
from torch_kevolve.agent.proposers.template import TemplateProposer
from torch_kevolve.agent.search import Attempt, Past, Search
from torch_kevolve.agent.selection import SELECTIONS
from torch_kevolve.agent.selection.best_first import BestFirst
from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.evaluation.base import LEAST_JUDGED
from torch_kevolve.evidence import Evidence, Stage, Timing
from torch_kevolve.plan import PlanBuilder
from torch_kevolve.settings import Budget, Settings
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.base import Point, Space

SETTINGS = Settings.make({}, env={})
LIMITS = Budget(seconds=60.0, candidates_per_task=24, draft=8, stall=10)


def relu_task() -> KernelTask:
    spec = TensorSpec("float32", (8, 16), (16, 1))
    return KernelTask(TaskGraph((spec,), (Op("aten.relu.default", (Ref(0),), (spec,)),), (Ref(1),)))


TASK = relu_task()


def made(name: str) -> Candidate:
    builder = PlanBuilder(TASK)
    y = builder.empty_output()
    builder.run("kernel", args=(*builder.inputs, y))
    return Candidate("cpp", f"// {name}", builder.finish(y), Provenance("test"))


def library() -> Space:
    def render(point: Point) -> Candidate:
        builder = PlanBuilder(TASK)
        outs = builder.aten("aten.relu.default", builder.inputs, TASK.graph.output_specs)
        return Candidate("aten", "", builder.finish(outs), Provenance("twin"))

    return Space("twin", "aten", {}, render, start=({},))


def grid(family: str = "rows", side: int = 6) -> Space:
    axes: dict[str, Any] = {"tile": tuple(2**i for i in range(side)), "unroll": tuple(range(side))}
    start = ({"tile": 1, "unroll": 0}, {"tile": 4, "unroll": 2})
    return Space(family, "cpp", axes, lambda p: made(f"{family} {p['tile']} {p['unroll']}"), start)


def seen(
    ratio: float | None, stage: Stage = Stage.DONE, ok: bool = True, lo: float | None = None, **more: Any
) -> Evidence:
    arms = {}
    if ratio is not None:
        arms = {"eager": Timing(ratio, ratio, ratio, 9), "candidate": Timing(1.0, 1.0, 1.0, 9)}
        lo = ratio * 0.98 if lo is None else lo
    return Evidence(
        stage, ok, ratio=ratio, ratio_lo=lo, ratio_hi=None if ratio is None else ratio * 1.02, arms=arms, **more
    )


@dataclass
class Judge:
    """A trial whose evidence is computed by a function of the candidate; confirmations by another."""

    of: Callable[[Candidate], Evidence]
    again: Callable[[Candidate], Evidence] | None = None
    judged: list[Candidate] = field(default_factory=list)
    confirmed: list[Candidate] = field(default_factory=list)
    baselines: dict[str, Timing] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        for candidate in candidates:
            self.judged.append(candidate)
            yield candidate, self.of(candidate)

    def confirm(self, candidate: Candidate) -> Evidence:
        self.confirmed.append(candidate)
        return (self.again or self.of)(candidate)

    def close(self) -> None:
        return None


def run(
    judge: Judge,
    spaces: Sequence[Space] = (),
    proposer: Any = None,
    limits: Budget = LIMITS,
    seconds: float = 60.0,
    **more: Any,
) -> tuple[Outcome, Search, list[tuple[Candidate, Evidence]]]:
    search = Search(TASK, {}, spaces, **more)
    cases: list[tuple[Candidate, Evidence]] = []
    evolution = Evolution(
        search=search,
        trial=judge,
        proposer=proposer or TemplateProposer(SETTINGS),
        selection=BestFirst(SETTINGS),
        limits=limits,
        deadline=time.monotonic() + seconds,
        record=lambda candidate, evidence: cases.append((candidate, evidence)),
        progress=Quiet(),
    )
    return evolution.run(), search, cases


def hill(candidate: Candidate) -> Evidence:
    """Fastest at tile 16, unroll 4; every axis step towards it helps."""
    if candidate.language == "aten":
        return seen(1.0)
    point = dict(candidate.provenance.point)
    tile, unroll = int(point["tile"]).bit_length() - 1, int(point["unroll"])
    return seen(2.0 - 0.15 * abs(tile - 4) - 0.1 * abs(unroll - 4))


def test_library_calls_come_first_and_starting_points_next() -> None:
    judge = Judge(hill)
    run(judge, [grid(), library()])
    assert judge.judged[0].language == "aten"
    assert dict(judge.judged[1].provenance.point) == {"tile": 1, "unroll": 0}


def test_climbs_to_the_top_of_a_hill() -> None:
    outcome, search, _ = run(Judge(hill), [grid()], limits=replace(LIMITS, candidates_per_task=36, stall=36))
    assert outcome.reason == "won" and outcome.candidate is not None
    assert dict(outcome.candidate.provenance.point) == {"tile": 16, "unroll": 4}
    children = [a for a in search.attempts if a.candidate.provenance.parent]
    assert children, "refining steps name their parent"
    known = {a.candidate.id for a in search.attempts}
    assert all(a.candidate.provenance.parent in known for a in children)


def test_no_candidate_is_judged_twice_and_a_small_space_ends() -> None:
    judge = Judge(hill)
    outcome, _, _ = run(judge, [grid(side=3)], limits=replace(LIMITS, candidates_per_task=500, stall=500))
    ids = [c.id for c in judge.judged]
    assert len(ids) == len(set(ids)) == 9
    assert outcome.finished


def test_every_judgement_is_recorded_confirmations_too() -> None:
    judge = Judge(hill)
    _, _, cases = run(judge, [grid(), library()])
    assert [c.id for c, _ in cases] == [c.id for c in (*judge.judged, *judge.confirmed)]


def test_candidates_stall_and_roofline_end_it() -> None:
    flat = Judge(lambda c: seen(0.5))
    assert not run(flat, [grid()], limits=replace(LIMITS, candidates_per_task=5))[0].candidate
    assert len(flat.judged) == 5
    stalled = Judge(lambda c: seen(0.5))
    run(stalled, [grid()], limits=replace(LIMITS, draft=4, stall=6, candidates_per_task=36))
    assert 6 <= len(stalled.judged) <= 6 + 4
    at_the_floor = Judge(lambda c: seen(3.0, roofline=0.96))
    outcome, _, _ = run(at_the_floor, [grid()])
    assert outcome.reason == "won" and outcome.finished and len(at_the_floor.judged) <= 4


def test_when_opening_took_all_the_time_a_few_are_judged_and_it_says_budget() -> None:
    judge = Judge(lambda point: seen(0.5))
    outcome, _, _ = run(judge, [grid()], seconds=-1.0)
    assert LEAST_JUDGED <= len(judge.judged) < LEAST_JUDGED + 4
    assert outcome.reason == "budget" and not outcome.finished


@pytest.mark.parametrize(
    "evidence",
    [
        seen(0.8),
        seen(1.3, lo=0.97),
        seen(1.3, lo=1.0),
        seen(None),
        seen(5.0, stage=Stage.VERIFY, ok=False),
        seen(5.0, stage=Stage.DONE, ok=False),
        seen(5.0, stage=Stage.MEASURE),
        seen(5.0, inherited=True),
    ],
    ids=[
        "slower",
        "interval-holds-one",
        "interval-touches-one",
        "not-timed",
        "wrong",
        "done-but-wrong",
        "not-done",
        "inherited",
    ],
)
def test_promotion_cannot_be_passed(evidence: Evidence) -> None:
    assert refusal(evidence)
    fast_at_first = Judge(lambda c: seen(5.0), again=lambda c: evidence)
    outcome, _, _ = run(fast_at_first, [grid()])
    assert outcome.candidate is None and outcome.reason != "won"
    assert fast_at_first.confirmed, "it was given the chance"


def test_promotion_passes_a_right_and_faster_one() -> None:
    assert refusal(seen(1.3)) == ""


def test_wrong_is_never_confirmed_however_fast() -> None:
    judge = Judge(lambda c: seen(99.0, stage=Stage.VERIFY, ok=False))
    outcome, _, _ = run(judge, [grid()])
    assert not judge.confirmed and outcome.reason == "not-right"


def test_next_best_is_confirmed_when_the_best_does_not_hold() -> None:
    slow_again: set[str] = set()

    def again(candidate: Candidate) -> Evidence:
        if not slow_again:
            slow_again.add(candidate.id)
            return seen(0.9)
        return hill(candidate)

    outcome, search, _ = run(Judge(hill, again), [grid()])
    assert outcome.candidate is not None and outcome.candidate.id not in slow_again
    assert outcome.candidate.id == search.ranked()[1].candidate.id


def test_library_calls_far_ahead_of_inductor_do_not_hide_a_kernel_that_beats_eager() -> None:
    def of(candidate: Candidate) -> Evidence:
        return seen(2.4 if candidate.language == "aten" else 1.2)

    outcome, _, _ = run(Judge(of), [library(), grid()])
    assert outcome.candidate is not None and outcome.candidate.language == "cpp"


def test_library_calls_ahead_of_inductor_are_kept_where_no_kernel_beats_eager() -> None:
    def of(candidate: Candidate) -> Evidence:
        return seen(2.4 if candidate.language == "aten" else 0.9)

    outcome, _, _ = run(Judge(of), [library(), grid()])
    assert outcome.candidate is not None and outcome.candidate.language == "aten"


def test_library_calls_are_confirmed_when_kernels_do_not_hold() -> None:
    def of(candidate: Candidate) -> Evidence:
        return seen(2.4 if candidate.language == "aten" else 1.2)

    def again(candidate: Candidate) -> Evidence:
        return seen(2.4 if candidate.language == "aten" else 0.9)

    judge = Judge(of, again)
    outcome, _, _ = run(judge, [library(), grid()])
    assert outcome.candidate is not None and outcome.candidate.language == "aten"
    assert [each.language for each in judge.confirmed] == ["cpp"] * CONFIRM_TRIES + ["aten"]


def test_ctrl_c_keeps_what_is_done() -> None:
    count = 0

    def of(candidate: Candidate) -> Evidence:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return seen(2.0)

    judge = Judge(of, again=lambda c: seen(2.0))
    outcome, search, cases = run(judge, [grid()])
    assert outcome.interrupted and outcome.reason == "won" and outcome.candidate is not None
    assert len(search.attempts) == 3 and len(cases) == 4


def test_second_ctrl_c_drops_the_confirmation() -> None:
    def stop(candidate: Candidate) -> Evidence:
        raise KeyboardInterrupt

    outcome, _, _ = run(Judge(lambda c: seen(2.0), again=stop), [grid()])
    assert outcome.interrupted and outcome.candidate is None and outcome.reason == "interrupted"


def test_scripted_proposer_hands_out_its_list_once() -> None:
    mine = [made(f"mine {i}") for i in range(3)]
    judge = Judge(lambda c: seen(1.5))
    run(judge, proposer=ScriptedProposer(SETTINGS, [*mine, mine[0]]))
    assert [c.id for c in judge.judged] == [c.id for c in mine]


def test_past_points_of_the_same_task_come_first_and_of_similar_ones_are_rationed() -> None:
    past = [Past("rows", "cpp", {"tile": 8, "unroll": 3}, same=True)]
    past += [Past("rows", "cpp", {"tile": 2, "unroll": i}) for i in range(6)]
    past += [Past("rows", "cpp", {"tile": 999, "unroll": 3}), Past("gone", "cpp", {"tile": 2, "unroll": 3})]
    search = Search(TASK, {}, [grid()], past=past)
    batch = TemplateProposer(SETTINGS).propose(search, None, 8)
    points = [dict(c.provenance.point) for c in batch]
    assert points[0] == {"tile": 8, "unroll": 3} and points[1] == {"tile": 1, "unroll": 0}
    assert sum(point["tile"] == 2 for point in points[:6]) == 4
    assert all(point["tile"] != 999 for point in points)


def test_draft_shows_every_family_before_a_second_place_of_one() -> None:
    search = Search(TASK, {}, [grid("a"), grid("b"), grid("c")])
    batch = TemplateProposer(SETTINGS).propose(search, None, 3)
    assert [c.provenance.family for c in batch] == ["a", "b", "c"]


def test_a_renderer_that_raises_costs_its_place_only() -> None:
    def render(point: Point) -> Candidate:
        if point["tile"] == 1:
            raise ZeroDivisionError
        return made(str(dict(point)))

    search = Search(TASK, {}, [replace(grid(), render=render)])
    assert len(TemplateProposer(SETTINGS).propose(search, None, 4)) == 4


def test_refining_steps_are_mostly_single_ones() -> None:
    search = Search(TASK, {}, [grid()])
    proposer = TemplateProposer(SETTINGS)
    first = proposer.propose(search, None, 2)[1]
    parent = Attempt(first, seen(2.0))
    search.attempts.append(parent)
    children = proposer.propose(search, parent, 4)
    here = dict(first.provenance.point)
    distance = [sum(dict(c.provenance.point)[k] != here[k] for k in here) for c in children]
    assert distance.count(1) >= 2 and all(c.provenance.parent == first.id for c in children)


def test_catalogues_name_their_members() -> None:
    assert {"template", "scripted"} <= set(PROPOSERS) and "best_first" in set(SELECTIONS)
    assert PROPOSERS["template"](SETTINGS).name == "template"
