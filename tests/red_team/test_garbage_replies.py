"""Garbage: a worker that lies in every way costs its candidate the case, never the judge its head."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
from court import SETTINGS
from tasks import SOFTMAX, softmax
from test_evaluation_port import garbage

from torch_kevolve.evaluation import judge
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.port import DirectPort, reply_problem
from torch_kevolve.evidence import Evidence, Stage

ROUNDS = 400


class Liar(DirectPort):
    """Tells the truth about the set-up. Asked of a candidate, it puts garbage into a true reply, or says only garbage.

    What the process port's own check refuses arrives as a death, as it does there.
    """

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice, self.lies = dice, 0
        self.known: dict[str, dict[str, Any]] = {}

    def call(self, message: Any, seconds: float) -> dict[str, Any]:
        verb = message["do"]
        arms = message.get("arms", [])
        if verb in ("setup", "draws", "limit") or (verb == "time" and "candidate" not in arms):
            return super().call(message, seconds)
        if verb not in self.known:
            self.known[verb] = super().call(message, seconds)
        true = copy.deepcopy(self.known[verb])
        if verb != "time" and self.dice.random() < 0.8:
            return true  # so that the later stages are reached too
        lie = self._lie(true)
        self.lies += 1
        problem = reply_problem(lie)
        return {"died": problem} if problem else lie

    def _lie(self, reply: dict[str, Any]) -> dict[str, Any]:
        if self.dice.random() < 0.2:
            made = garbage(self.dice)
            return made if isinstance(made, dict) else {}
        place: Any = reply
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return reply
            key = self.dice.choice(keys)
            if not isinstance(place[key], dict | list) or self.dice.random() < 0.3:
                place[key] = garbage(self.dice)
                return reply
            place = place[key]


@pytest.mark.parametrize("seed", range(4))
def test_no_reply_breaks_the_judge_or_wins(seed, monkeypatch):
    dice = random.Random(seed)
    port = Liar(dice)
    made = judge.Judge(Job(SOFTMAX, {}, "cpu", time.monotonic() + 300), SETTINGS, port)
    made._compile_arms = lambda *args, **more: ""
    monkeypatch.setattr(judge, "LOOK_S", 0.01)
    monkeypatch.setattr(judge, "PATIENCE_S", {})
    stages = set()
    # Its true outputs are those of a kernel that writes nothing.
    candidate = softmax(before="return;")
    try:
        made.open()
        for _ in range(ROUNDS // 4):
            ((_, evidence),) = made.evaluate([candidate])
            assert not evidence.ok, evidence
            assert Evidence.from_json(evidence.to_json()).note == evidence.note and evidence.note.encode()
            stages.add(evidence.reached)
    finally:
        made.close()
    assert port.lies > 20 and {Stage.LAUNCH, Stage.VERIFY} <= stages


def test_lies_about_times_are_refused_or_carry_no_more_than_times(monkeypatch):
    """An honest kernel whose samples are replaced: the judge refuses them or takes them as positive numbers."""
    dice = random.Random(9)
    port = Liar(dice)
    made = judge.Judge(Job(SOFTMAX, {}, "cpu", time.monotonic() + 300), SETTINGS, port)
    made._compile_arms = lambda *args, **more: ""
    for name, seconds in (("LOOK_S", 0.01), ("GLANCE_S", 0.01), ("PATIENCE_S", {})):
        monkeypatch.setattr(judge, name, seconds)
    true_call = DirectPort.call

    def call(message: Any, seconds: float) -> dict[str, Any]:
        reply = true_call(port, message, seconds)
        if message["do"] == "time" and "candidate" in message["arms"]:
            reply = port._lie(reply)
            problem = reply_problem(reply)
            return {"died": problem} if problem else reply
        return reply

    port.call = call
    refused = 0
    try:
        made.open()
        candidate = softmax()
        for _ in range(40):
            ((_, evidence),) = made.evaluate([candidate])
            if evidence.ok:
                assert 0 < evidence.ratio < float("inf") and evidence.median_ms > 0
            else:
                assert evidence.reached is Stage.MEASURE, evidence.note
                refused += 1
    finally:
        made.close()
    assert refused > 20
