"""Port: a worker that talks nonsense, too much, too early or not at all costs itself only."""

import os
import random
import string
import subprocess
import time

import pytest
from processes import ends

from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation import local
from torch_kevolve.evaluation import port as module
from torch_kevolve.evaluation.port import ProcessPort, environment, reply_problem
from torch_kevolve.evaluation.sandbox import LOCKED
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
    monkeypatch.setenv("CUDA_API_KEY", "x")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "x")
    seen = environment()
    assert "PATH" in seen and not [name for name in seen if "KEY" in name or "TOKEN" in name]


def test_a_worker_writes_into_a_folder_of_its_own(start):
    port = start('import tempfile; say(json.dumps({"id": id, "where": tempfile.gettempdir()}) + "\\n")')
    where = port.call({"do": "run"}, 5)["where"]
    assert os.path.isdir(where) and os.stat(where).st_mode & 0o077 == 0
    port.close()
    assert not os.path.exists(where)


def test_the_group_of_a_worker_dies_with_it(start):
    port = start(
        "import subprocess; child = subprocess.Popen(['sleep', '60']);"
        'say(json.dumps({"id": id, "pid": child.pid}) + "\\n")'
    )
    pid = port.call({"do": "run"}, 5)["pid"]
    port.close()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{pid}")


def test_a_worker_that_takes_too_much_memory_is_killed(start):
    port = start(
        'say(json.dumps({"id": id}) + "\\n") if message["do"] == "limit" else (globals().update(x=bytearray(1 << 28)),'
        "time.sleep(30))"
    )
    assert port.call({"do": "limit", "bytes": 1 << 26, "watch": True}, 5) == {}
    assert "memory" in port.call({"do": "run"}, 20)["died"]


def test_a_worker_that_has_loaded_code_compiles_no_more(start):
    """It says what it was told: the second one was told all that the first was, and loads the candidate last."""
    port = start(
        'globals().setdefault("told", []).append(message["do"]);'
        'locked = "load" in told and message["do"] == "compile";'
        f'more = {{"problem": {LOCKED!r}}} if locked else {{}};'
        'say(json.dumps({"id": id, "pid": os.getpid(), "told": told, **more}) + "\\n")'
    )
    for verb in ("setup", "limit", "compile", "draws"):
        first = port.call({"do": verb, "bytes": 1}, 5)
        port.fresh = False
    assert port.call({"do": "load"}, 5)["pid"] == first["pid"]
    other = port.call({"do": "compile"}, 5)
    assert other["pid"] != first["pid"] and not port.fresh
    after = port.call({"do": "run"}, 5)
    assert after["pid"] == other["pid"]
    assert after["told"] == ["setup", "limit", "compile", "draws", "compile", "load", "run"]
    assert port.call({"do": "setup"}, 5)["pid"] == other["pid"]


REPLIES = {
    "problem": (["x", ""], [None, 3, ["x"], {"a": 1}]),
    "damaged": (["x", ""], [None, 3, True]),
    "outs": ([[], [{"dtype": "float32"}]], [None, "x", {}, [1], [[]]]),
    "samples": ([{}, {"a": [1.0]}], [None, [], "x", 1.0]),
    "launches": ([0, 5], [-1, 1.0, True, "1", 2**40, None]),
    "seconds": ([0.0, 2.5], [-1.0, 1, float("nan"), float("inf"), "1", None]),
    "sandbox": ([], [1, "x", None]),
}


@pytest.mark.parametrize("name", REPLIES)
def test_every_field_of_a_reply_is_checked(name):
    good, bad = REPLIES[name]
    assert all(reply_problem({name: value}) == "" for value in good)
    assert all(reply_problem({name: value}) for value in bad)


def test_text_that_no_file_can_hold_is_mended():
    reply = {"problem": "\ud800" + "x" * 10_000}
    assert reply_problem(reply) == ""
    assert len(reply["problem"].encode()) <= 4000 and reply["problem"].startswith("?x")


def garbage(dice, depth=0):
    """Any JSON value."""
    kinds = ("none", "bool", "int", "float", "text", "list", "object")
    kind = dice.choice(kinds if depth < 3 else kinds[:5])
    if kind == "int":
        return dice.choice([0, 1, -1, 2**31, -(2**63), 10**30, dice.randrange(1000)])
    if kind == "float":
        return dice.choice([0.0, -0.0, 1e308, float("inf"), float("nan"), dice.random()])
    if kind == "text":
        return "".join(dice.choices(string.printable + "\ud800\u2028é", k=dice.randrange(30)))
    if kind == "list":
        return [garbage(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == "object":
        names = [*REPLIES, "died", "id", "x", "dtype", "shape"]
        return {dice.choice(names): garbage(dice, depth + 1) for _ in range(dice.randrange(5))}
    return None if kind == "none" else dice.random() < 0.5


def test_no_object_breaks_the_check_of_replies():
    dice = random.Random(5)
    accepted = 0
    for _ in range(20_000):
        reply = garbage(dice)
        if isinstance(reply, dict):
            fine = reply_problem(reply) == ""
            accepted += fine
            assert not fine or all(reply[name].encode() is not None for name in module.TEXT_FIELDS if name in reply)
    assert 0 < accepted < 5_000


def test_lines_of_garbage_cost_only_who_sent_them(start):
    """Bytes, cut and joined at random; one worker in four says something useful."""
    port = start(
        "import random; dice = random.Random(message['seed']);"
        "good = json.dumps({'id': id}).encode() + b'\\n';"
        "noise = bytes(dice.randrange(256) for _ in range(99));"
        "out = (good, noise + b'\\n', good[:-3] + b'\\n', good + good)[message['seed'] % 4];"
        "os.write(answer.fileno(), out)"
    )
    for seed in range(24):
        reply = port.call({"do": "run", "seed": seed}, 10.0)
        assert reply == {} if seed % 4 == 0 else set(reply) == {"died"}, (seed, reply)


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


def test_the_users_malloc_is_the_workers_and_not_the_judges(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    judge = local._environment()
    assert not [name for name in judge if name.startswith("MALLOC_")]
    monkeypatch.delenv("MALLOC_MMAP_MAX_")
    monkeypatch.setenv(module.WORKERS_MALLOC, judge[module.WORKERS_MALLOC])
    assert environment()["MALLOC_MMAP_MAX_"] == "0"


def test_a_judge_that_is_dropped_takes_its_compilers_along():
    evaluator = local.LocalEvaluator()
    evaluator._owner, (evaluator._answer, evaluator._ask) = os.getpid(), os.pipe()
    command = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    judge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with judge:
        compiler = int(judge.stdout.readline())
        evaluator._process = judge
        evaluator.drop()
        assert evaluator._process is None and ends(compiler)
