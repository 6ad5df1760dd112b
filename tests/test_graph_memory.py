"""Graph memory: nothing recorded is lost."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from samples import candidate, evidence, fingerprint, task

from torch_kevolve.graph_memory import ExperienceGraph


def test_a_case_is_seen_by_the_next_process(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    first = graph.record_case(task(), candidate(), evidence(), fingerprint())
    graph.record_case(task(), candidate("// two"), evidence(3.0), fingerprint(), began_from=first.id)
    again = ExperienceGraph.open(tmp_path)
    assert [case.candidate for case in again.cases(task().key)] == [candidate().id, candidate("// two").id]
    assert again.best(task().key, fingerprint()).ratio == 3.0
    assert again.cases(task().key, fingerprint(name="another")) == []
    assert again.counts() == {"Task": 1, "Device": 1, "Case": 2, "Strategy": 1, "Lesson": 0}


def test_lineage_is_a_forest_in_the_view(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    first = graph.record_case(task(), candidate(), evidence(), fingerprint())
    second = graph.record_case(task(), candidate("// two"), evidence(), fingerprint(), began_from=first.id)
    view = graph.view()
    assert view.has_edge(second.id, first.id, key="began_from") and view.has_edge(first.id, task().key, key="solves")


def test_a_wrong_case_is_kept_and_never_best(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task(), candidate(), evidence(9.0, ok=False), fingerprint())
    assert len(graph.cases(task().key)) == 1 and graph.best(task().key, fingerprint()) is None


def test_like_finds_the_task_with_the_same_operators(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task("aten.exp.default"), candidate(), evidence(), fingerprint())
    graph.record_case(task("aten.neg.default"), candidate("// two"), evidence(5.0), fingerprint())
    other = task("aten.exp.default")
    other = type(other)(other.graph, numerics="fast")
    assert [case.candidate for case in graph.like(other, fingerprint())] == [candidate().id]


@pytest.mark.parametrize("torn", ['{"kind": "Case", "id"', "\x00\x00", "[1]", '{"kind": "Case"}', "null"])
def test_a_torn_line_costs_itself_only(tmp_path, torn):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task(), candidate(), evidence(), fingerprint())
    segment = next((tmp_path / "segments").glob("*.jsonl"))
    with segment.open("a") as file:
        file.write(torn)
    assert len(ExperienceGraph.open(tmp_path).cases(task().key)) == 1


def test_kill_9_loses_nothing_that_was_recorded(tmp_path):
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from samples import *
        from torch_kevolve.graph_memory import ExperienceGraph
        graph = ExperienceGraph.open(Path(sys.argv[1]))
        for number in range(10**6):
            graph.record_case(task(), candidate(f"// {number}"), evidence(), fingerprint())
            print(number, flush=True)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    for _ in range(50):
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    told = [*map(int, child.stdout.read().split()), last]
    child.wait()
    child.stdout.close()
    found = {case.candidate for case in ExperienceGraph.open(tmp_path).cases(task().key)}
    assert all(candidate(f"// {number}").id in found for number in range(max(told) + 1))


def test_the_journal_says_why(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task(), candidate(), evidence(2.0), fingerprint())
    graph.record_case(task(), candidate("// two"), evidence(2.0, ok=False), fingerprint())
    text = next((tmp_path / "journal").glob("*.md")).read_text()
    assert "right, 2.000x" in text and "refused at VERIFY" in text and "U=4" in text
