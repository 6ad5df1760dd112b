"""Graph memory: nothing recorded is lost."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

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


def test_a_row_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    writer = ExperienceGraph.open(tmp_path / "writer")
    writer.record_case(task(), candidate(), evidence(), fingerprint())
    text = next((tmp_path / "writer" / "segments").glob("*.jsonl")).read_text()
    segments = tmp_path / "reader" / "segments"
    segments.mkdir(parents=True)
    reader = ExperienceGraph.open(tmp_path / "reader")
    for end in (1, len(text) // 2, len(text) - 1):
        (segments / "a.jsonl").write_text(text[:end])
        reader.refresh()
        assert reader.cases(task().key) == []
    (segments / "a.jsonl").write_text(text)
    reader.refresh()
    assert len(reader.cases(task().key)) == 1


def test_refresh_reads_what_others_wrote_meanwhile_and_nothing_twice(tmp_path):
    mine, other = ExperienceGraph.open(tmp_path), ExperienceGraph.open(tmp_path)
    for number in range(3):
        other.record_case(task(), candidate(f"// {number}"), evidence(), fingerprint())
        mine.refresh()
        assert len(mine.cases(task().key)) == number + 1
    assert list(mine._segments.rows()) == []


def test_a_full_disk_costs_one_row(tmp_path, monkeypatch):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task(), candidate("// 0"), evidence(), fingerprint())
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
    graph.record_case(task(), candidate("// 1"), evidence(), fingerprint())
    monkeypatch.setattr(os, "write", write)
    graph.record_case(task(), candidate("// 2"), evidence(), fingerprint())
    assert len(graph.cases(task().key)) == 3  # this process has seen all of them
    found = [case.candidate for case in ExperienceGraph.open(tmp_path).cases(task().key)]
    assert found == [candidate("// 0").id, candidate("// 2").id]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    graph = ExperienceGraph.open(tmp_path / "file" / "graph")
    for number in range(3):
        graph.record_case(task(), candidate(f"// {number}"), evidence(), fingerprint())
    assert len(graph.cases(task().key)) == 3 and caplog.text.count("not kept") == 1


def test_evidence_that_is_not_plain_is_kept_as_text(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    odd = replace(evidence(ok=False), note="\ud800", profile={"where": tmp_path}, ratio=float("nan"))
    graph.record_case(task(), candidate(), odd, fingerprint())
    (case,) = ExperienceGraph.open(tmp_path).cases(task().key)
    assert case.evidence["profile"]["where"] == str(tmp_path) and case.evidence["note"] == "\ud800"


def _record_many(folder, number):
    graph = ExperienceGraph.open(folder)
    for turn in range(20):
        graph.record_case(task(), candidate(f"// {number} {turn}"), evidence(), fingerprint())


def test_eight_processes_record_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_record_many, args=(tmp_path, number)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    graph = ExperienceGraph.open(tmp_path)
    assert graph.counts()["Case"] == 160 and graph.counts()["Task"] == 1
    lines = next((tmp_path / "journal").glob("*.md")).read_text().splitlines()
    assert sum(line.startswith("- `") for line in lines) == 160


def test_a_forked_child_writes_a_segment_of_its_own(tmp_path):
    graph = ExperienceGraph.open(tmp_path)
    graph.record_case(task(), candidate("// parent"), evidence(), fingerprint())
    child = multiprocessing.get_context("fork").Process(
        target=graph.record_case, args=(task(), candidate("// child"), evidence(), fingerprint())
    )
    child.start()
    child.join()
    assert len(list((tmp_path / "segments").glob("*.jsonl"))) == 2
    assert len(ExperienceGraph.open(tmp_path).cases(task().key)) == 2


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
