"""Session: store first, then a search within the budget, then the wishlist; with a scripted judge."""

import dataclasses
import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import samples
from torch_kevolve import hunt as hunt_module
from torch_kevolve import session as session_module
from torch_kevolve.devices import current
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evidence import Stage
from torch_kevolve.graph_memory import ExperienceGraph
from torch_kevolve.kernel import Kernel
from torch_kevolve.lowering.hooks import Wanted
from torch_kevolve.only_here import only_here
from torch_kevolve.purse import Purse
from torch_kevolve.session import Session
from torch_kevolve.settings import Settings
from torch_kevolve.store.memory import MemoryStore
from torch_kevolve.tally import TALLY
from torch_kevolve.templates.base import Space

HERE = current("cpu").fingerprint()


class Judge:
    """An evaluator and its trial in one. `of(candidate)` is the evidence; `opened` lists the tasks that were judged."""

    def __init__(self):
        self.opened, self.judged, self.confirmed = [], [], []
        self.of = lambda candidate: samples.evidence(2.0)
        self.again = lambda candidate: self.of(candidate)
        self.broken = None
        self.baselines, self.notes = {}, {}

    def open(self, job, settings):
        self.opened.append(job.task.key)
        if self.broken is not None:
            raise self.broken
        return self

    def evaluate(self, candidates):
        for candidate in candidates:
            self.judged.append(candidate)
            yield candidate, self.of(candidate)

    def confirm(self, candidate):
        self.confirmed.append(candidate)
        return self.again(candidate)

    def close(self):
        pass


def space(task, facts, languages):
    """A family of three places that claims everything but `neg`."""
    if "aten.neg.default" in task.graph.targets:
        return []
    return [Space("sample", "cpp", {"U": (1, 2, 4)}, lambda point: samples.candidate(f"// {point['U']}"), ({"U": 1},))]


@pytest.fixture
def judge(monkeypatch):
    made = Judge()
    monkeypatch.setattr(hunt_module, "shared_evaluator", lambda name: made)
    monkeypatch.setattr(hunt_module, "spaces", space)
    TALLY.clear()
    return made


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def session(judge, store, tmp_path):
    def make(**options):
        settings = Settings.make({"home": str(tmp_path), "progress": "off", **options}, env={})
        return Session.of(settings, store, ExperienceGraph.open(tmp_path / "memory"), ("cpp", "aten"))

    return make


def want(op="exp", share=0.5, phase="inference"):
    return Wanted(samples.task(f"aten.{op}.default"), {}, share, 1, phase, "cpu")


def stored(task, **device):
    made = samples.evidence(2.0)
    soft = {**current("cpu").soft(), **device}
    return Kernel(task, HERE, samples.candidate(), dataclasses.replace(made, device={"hard": {}, "soft": soft}))


def choice(session, wanted, purse=None):
    return session.choose([wanted], purse or Purse(60.0))[wanted.task.key]


def test_claims_ask_the_families_then_the_store(session, store):
    made = session()
    assert made.claims(samples.task(), {}, "cpu")
    assert not made.claims(samples.task("aten.neg.default"), {}, "cpu")
    store.put(stored(samples.task("aten.neg.default")))
    assert session().claims(samples.task("aten.neg.default"), {}, "cpu")


def test_a_task_with_a_twin_is_asked_for_anew(session, monkeypatch):
    monkeypatch.setattr(hunt_module, "spaces", lambda task, facts, languages: [1] if task.twin is not None else [])
    made, task = session(), samples.task()
    assert not made.claims(task, {}, "cpu")
    assert made.claims(dataclasses.replace(task, twin=task.graph), {}, "cpu")


def test_a_stored_kernel_is_taken_and_nobody_is_judged(session, store, judge):
    store.put(stored(samples.task()))
    found = choice(session(), want())
    assert found.kernel is not None and found.reason == "hit" and found.ratio == 2.0
    assert not judge.opened and TALLY.read()["hits"] == 1


def test_effort_none_searches_nothing_and_wishes(session, store, judge):
    found = choice(session(effort="none"), want(share=0.25))
    assert found.kernel is None and found.reason == "not-searched" and found.undecided
    assert not judge.opened
    assert [(wish["task"], wish["share"]) for wish in store.wishes()] == [(samples.task().to_json(), 0.25)]


def test_a_winner_is_stored_and_taken_next_time(session, store, judge):
    found = choice(session(), want())
    assert found.reason == "won" and store.get(samples.task().key, HERE) == found.kernel
    assert choice(session(), want()).reason == "hit" and len(judge.opened) == 1
    counts = TALLY.read()
    assert (counts["searches"], counts["hits"], counts["misses"]) == (1, 1, 1)
    assert counts["candidates"] == len(judge.judged) + len(judge.confirmed)


@pytest.mark.parametrize(
    "again",
    [
        samples.evidence(0.7),
        samples.evidence(5.0, ok=False),
        dataclasses.replace(samples.evidence(1.5), ratio_lo=0.99),
        dataclasses.replace(samples.evidence(5.0), reached=Stage.MEASURE),
    ],
    ids=["slower", "wrong", "interval-holds-one", "not-done"],
)
def test_nothing_else_is_ever_stored(session, store, judge, again):
    judge.again = lambda candidate: again
    found = choice(session(), want())
    assert found.kernel is None and found.reason in ("not-faster", "not-right")
    assert list(store.ls()) == []


def test_a_finished_search_is_remembered_until_a_harder_one(session, judge):
    judge.of = lambda candidate: samples.evidence(0.5)
    first = choice(session(), want())
    assert first.reason == "not-faster" and not first.undecided
    second = choice(session(), want())
    assert second.reason == "not-faster" and not second.undecided and len(judge.opened) == 1
    choice(session(effort="full"), want())
    assert len(judge.opened) == 2
    choice(session(effort="full"), want())
    choice(session(), want())
    assert len(judge.opened) == 2


def test_every_case_is_remembered_with_its_parent(session, tmp_path, judge):
    judge.of = lambda candidate: samples.evidence(1.5)
    choice(session(), want())
    cases = ExperienceGraph.open(tmp_path / "memory").cases(samples.task().key, HERE)
    assert {case.candidate for case in cases} == {candidate.id for candidate in judge.judged}


def test_hottest_first(session, judge):
    wanted = [want("exp", 0.1), want("tanh", 0.6), want("sin", 0.3)]
    session().choose(wanted, Purse(600.0))
    assert judge.opened == [want(op).task.key for op in ("tanh", "sin", "exp")]


def test_the_purse_is_shared_by_graphs_and_the_rest_is_wished_for(session, store, judge):
    purse, made = Purse(60.0), session()
    assert choice(made, want("exp"), purse).reason == "won"
    purse._spent = {"inference": 58.0}
    found = choice(made, want("tanh"), purse)
    assert found.reason == "budget" and found.undecided and len(judge.opened) == 1
    assert [wish["task"] for wish in store.wishes()] == [want("tanh").task.to_json()]


def test_a_forward_graph_leaves_half_to_its_backward():
    purse = Purse(60.0)
    assert purse.allowance([1.0], "forward") == 30.0
    assert purse.allowance([1.0], "backward") == purse.allowance([1.0], "inference") == 60.0
    purse._spent = {"forward": 57.0}
    assert purse.allowance([1.0], "backward") == 30.0 and purse.allowance([1.0], "inference") == 3.0
    purse._spent["backward"] = 28.0
    assert purse.allowance([1.0], "backward") == 0.0
    purse._spent["backward"], purse.closed = 0.0, True
    assert purse.allowance([1.0], "backward") == 0.0


def test_a_search_gets_what_it_needs_to_come_to_anything_and_the_hottest_not_all():
    purse = Purse(60.0)
    assert purse.allowance([0.3, 0.7], "inference") == 18.0
    assert purse.allowance([0.9, 0.1], "inference") == 24.0
    assert purse.allowance([0.001, 0.999], "inference") == 15.0
    assert Purse(10.0).allowance([0.5, 0.5], "inference") == 10.0
    assert Purse(2.0).allowance([1.0], "inference") == 0.0


def test_ctrl_c_keeps_what_is_done_and_ends_all_searching(session, store, judge):
    def of(candidate):
        if len(judge.judged) == 2:
            raise KeyboardInterrupt
        return samples.evidence(2.0)

    judge.of = of
    judge.again = lambda candidate: samples.evidence(2.0)
    purse = Purse(600.0)
    found = session().choose([want("exp", 0.9), want("tanh", 0.1)], purse)
    assert found[want("exp").task.key].reason == "won" and purse.closed
    assert found[want("tanh").task.key].reason == "interrupted" and found[want("tanh").task.key].undecided
    assert len(judge.opened) == 1 and [wish["task"] for wish in store.wishes()] == [want("tanh").task.to_json()]


def test_ctrl_c_while_the_judge_starts_ends_the_search_not_the_compile(session, judge):
    judge.broken = KeyboardInterrupt()
    purse = Purse(60.0)
    assert choice(session(), want(), purse).reason == "interrupted" and purse.closed


def test_a_broken_judge_falls_back_or_raises(session, judge):
    judge.broken = EvaluationError(detail="no worker")
    found = choice(session(), want())
    assert found.kernel is None and found.reason == "evaluation" and found.undecided and "no worker" in found.detail
    with pytest.raises(EvaluationError):
        choice(session(on_error="raise"), want())


def test_a_judge_that_breaks_is_tried_twice_then_left_until_the_software_changes(session, judge, monkeypatch):
    judge.broken = EvaluationError(detail="no worker")
    for opened in (1, 2, 2, 2):
        found = choice(session(), want())
        assert found.reason == "evaluation" and "no worker" in found.detail and len(judge.opened) == opened
    task = want().task.key
    assert session().given_up(task, "cpu") and not session().given_up(want("tanh").task.key, "cpu")

    class Other(type(current("cpu"))):
        def soft(self):
            return {**super().soft(), "torch": "9.9"}

    monkeypatch.setattr(session_module, "current", lambda device: Other())
    assert not session().given_up(task, "cpu")
    judge.broken = None
    assert choice(session(), want()).reason == "won"


def test_a_kernel_that_cannot_be_proven_here_is_tried_twice(session, store, judge):
    store.put(stored(samples.task(), torch="1.0"))
    judge.broken = EvaluationError(detail="no worker")
    for opened in (1, 2, 2):
        assert choice(session(), want()).reason == "not-verified-here" and len(judge.opened) == opened


def test_a_fault_of_our_own_costs_its_task_only_and_is_tried_twice(session, judge):
    inner, faults = judge.open, []

    def opened(job, settings):
        inner(job, settings)
        if job.task.key == want("exp").task.key:
            raise RuntimeError("our own fault")
        return judge

    judge.open = opened
    for tried in (1, 2, 2):
        wanted = [want("exp", 0.9), want("tanh", 0.1)]
        found = session().choose(wanted, Purse(60.0), lambda *fault: faults.append(fault))
        exp, tanh = (found[each.task.key] for each in wanted)
        assert (exp.reason, exp.undecided) == ("session", True) and "our own fault" in exp.detail
        assert tanh.kernel is not None
        assert judge.opened.count(wanted[0].task.key) == len(faults) == tried
    assert session().given_up(want("exp").task.key, "cpu") and not session().given_up(want("tanh").task.key, "cpu")


def test_a_fault_is_raised_to_whoever_gives_no_hook_for_it(session, judge):
    judge.broken = RuntimeError("our own fault")
    with pytest.raises(RuntimeError, match="our own fault"):
        choice(session(), want())


def test_a_store_that_breaks_is_a_fault_too(session, store, judge, monkeypatch):
    def broken(*_):
        raise OSError("no space left")

    faults = []
    monkeypatch.setattr(store, "get", broken)
    monkeypatch.setattr(store, "put_record", broken)
    found = session().choose([want()], Purse(60.0), lambda *fault: faults.append(fault))
    assert found[want().task.key].reason == "session" and len(faults) == 1


def _hold(folder, name, held, done):
    with only_here(folder, name) as mine:
        assert mine
        held.set()
        done.wait(60)


def test_one_searcher_over_processes(session, judge, tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    name = f"{samples.task().key[:32]}-{HERE.key[:16]}"
    other = context.Process(target=_hold, args=(tmp_path / "locks", name, held, done))
    other.start()
    try:
        assert held.wait(60)
        found = choice(session(), want())
        assert found.reason == "searching-elsewhere" and found.undecided and not judge.opened
    finally:
        done.set()
        other.join()
    assert choice(session(), want()).reason == "won"


def test_only_local_rank_0_searches(session, judge, monkeypatch):
    monkeypatch.setattr(session_module, "_local_rank", lambda: 1)
    found = choice(session(), want())
    assert found.reason == "another-rank-searches" and found.undecided and not judge.opened


def test_many_threads_search_a_task_once(session, judge):
    made, purse = session(), Purse(600.0)
    barrier = threading.Barrier(32)

    def ask(_):
        barrier.wait()
        return choice(made, want(), purse)

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(ask, range(32)))
    assert len(judge.opened) == 1
    assert sorted({each.reason for each in found}) == ["hit", "won"]
    assert len({each.kernel.key for each in found}) == 1


def test_another_torch_asks_for_a_proof_once(session, store, judge):
    store.put(stored(samples.task(), torch="1.0"))
    soft = current("cpu").soft()
    judge.again = lambda candidate: dataclasses.replace(samples.evidence(1.4), device={"hard": {}, "soft": soft})
    found = choice(session(), want())
    assert found.reason == "hit" and found.ratio == 1.4 and len(judge.confirmed) == 1 and not judge.judged
    assert choice(session(), want()).reason == "hit" and len(judge.confirmed) == 1


def test_a_kernel_that_does_not_hold_here_is_searched_anew(session, store, judge):
    store.put(stored(samples.task(), torch="1.0"))
    judge.again = lambda candidate: samples.evidence(5.0, ok=False)
    judge.of = lambda candidate: samples.evidence(0.5)
    found = choice(session(), want())
    assert found.kernel is None and found.reason == "not-faster" and judge.judged
    assert store.get(samples.task().key, HERE) is None


def test_a_read_only_kernel_that_does_not_hold_here_is_tried_once(session, store, judge, monkeypatch):
    store.put(stored(samples.task(), torch="1.0"))
    monkeypatch.setattr(store, "remove", lambda *_: False)
    judge.of = lambda candidate: samples.evidence(0.5)
    for _ in range(2):
        assert choice(session(), want()).kernel is None
    assert len(judge.confirmed) == 1 and len(judge.opened) == 2


def test_a_broken_judge_lets_no_unproven_kernel_pass(session, store, judge):
    store.put(stored(samples.task(), torch="1.0"))
    judge.broken = EvaluationError(detail="no worker")
    found = choice(session(), want())
    assert found.kernel is None and found.reason == "not-verified-here" and found.undecided
    assert store.get(samples.task().key, HERE) is not None


def test_effort_none_uses_no_kernel_that_was_not_proven_here(session, store, judge):
    store.put(stored(samples.task(), torch="1.0"))
    found = choice(session(effort="none"), want())
    assert found.kernel is None and found.reason == "not-verified-here" and "torch" in found.detail and not judge.opened


def test_nothing_of_the_search_is_loaded_before_it_is_needed():
    names = "[m for m in sys.modules if m.startswith(('torch_kevolve.agent', 'torch_kevolve.templates.'))]"
    text = f"import sys, torch_kevolve.backend; print({names})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_equal_wishes_of_one_call_are_one(session, judge):
    found = session().choose([want("exp", 0.5), want("exp", 0.4)], Purse(600.0))
    assert len(found) == 1 and len(judge.opened) == 1
