"""Port: a worker that talks nonsense, too much, too early or not at all costs itself only."""

import pytest

from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation import port as module
from torch_kevolve.evaluation.port import ProcessPort, environment
from torch_kevolve.evaluation.statistics import checked

CHILD = """
import json, os, sys, time
ask, answer = os.fdopen(int(sys.argv[1]), "r"), os.fdopen(int(sys.argv[2]), "w")
say = lambda text: (answer.write(text), answer.flush())
say('{"ready": true}\\n')
for line in ask:
    message = json.loads(line)
    id = message["id"]
    %s
"""
TALK = {
    "no JSON": ('say("hello\\n")', "no JSON"),
    "no object": ('say("[1]\\n")', "no object"),
    "deep": ('say("[" * 100000 + "\\n")', "no JSON"),
    "another id": ('say(json.dumps({"id": id + 1}) + "\\n")', "out of turn"),
    "no id": ('say("{}\\n")', "out of turn"),
    "two replies": ('say((json.dumps({"id": id}) + "\\n") * 2)', "out of turn"),
    "silence": ("time.sleep(60)", "ran past"),
    "half a line": ('say("{"); time.sleep(60)', "ran past"),
    "end": ("os._exit(3)", "status 3"),
    "crash": ("os.kill(os.getpid(), 11)", "SIGSEGV"),
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A port to a child with a body of one's choice. It needs no torch, so it starts at once."""
    ports = []

    def make(body):
        (tmp_path / "talker.py").write_text(CHILD % body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        ports.append(ProcessPort("talker"))
        return ports[-1]

    yield make
    for each in ports:
        each.close()


@pytest.mark.parametrize("name", TALK)
def test_a_bad_reply_is_a_death(start, name):
    body, word = TALK[name]
    port = start(body)
    port.fresh = False
    reply = port.call({"do": "run"}, 3.0)
    assert list(reply) == ["died"] and word in reply["died"]
    assert port.fresh


def test_it_speaks_again_after_a_death(start):
    port = start('say(json.dumps({"id": id, "pid": os.getpid()}) + "\\n") if message["do"] == "good" else os._exit(1)')
    first = port.call({"do": "good"}, 5)["pid"]
    assert port.call({"do": "good"}, 5)["pid"] == first
    assert "died" in port.call({"do": "bad"}, 5)
    assert port.call({"do": "good"}, 5)["pid"] != first


def test_a_spare_takes_the_place_of_a_dead_one(start):
    port = start('say(json.dumps({"id": id, "pid": os.getpid()}) + "\\n")')
    port.spare()
    port.settle(20)
    waiting = port._spare.process.pid
    port.restart()
    assert port.call({"do": "good"}, 5)["pid"] == waiting


def test_too_long_a_reply_is_cut_off(start, monkeypatch):
    monkeypatch.setattr(module, "MOST_REPLY", 1 << 16)
    port = start('say("x" * (1 << 22))')
    assert "died" in port.call({"do": "run"}, 10.0)


def test_a_worker_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("SOME_TOKEN", "x")
    seen = environment()
    assert "PATH" in seen and not {"OPENAI_API_KEY", "SOME_TOKEN"} & set(seen)


GOOD = {"a": [1.0, 2.0, 3.0], "candidate": [1.0, 1.0, 1.0]}
BAD = [
    None,
    [],
    {"a": [1.0, 2.0, 3.0]},
    {**GOOD, "more": [1.0, 1.0, 1.0]},
    {**GOOD, "a": "123"},
    {**GOOD, "a": [1.0, 2.0]},
    {**GOOD, "a": [1.0, 2.0, 0.0]},
    {**GOOD, "a": [1.0, 2.0, -1.0]},
    {**GOOD, "a": [1.0, 2.0, float("nan")]},
    {**GOOD, "a": [1.0, 2.0, float("inf")]},
    {**GOOD, "a": [1.0, 2.0, 10**400]},
    {**GOOD, "a": [1.0, 2.0, True]},
    {**GOOD, "a": [1.0, 2.0, "3"]},
    {**GOOD, "a": [1.0] * 10_001},
]


def test_good_samples_pass():
    assert checked(GOOD, ["a", "candidate"]) == GOOD


@pytest.mark.parametrize("samples", BAD, ids=range(len(BAD)))
def test_samples_are_checked_field_by_field(samples):
    with pytest.raises(EvaluationError):
        checked(samples, ["a", "candidate"])
