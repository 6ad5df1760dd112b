"""Store: one contract for every member, and what a disk can do to us."""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap

import diskcache
import pytest

from samples import fingerprint, kernel
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.settings import Settings
from torch_kevolve.store import DiskStore, MemoryStore, TieredStore, open_store
from torch_kevolve.store.index import PlainDisk

FACTORIES = {
    "memory": lambda home: MemoryStore(),
    "disk": DiskStore,
    "tiered": lambda home: TieredStore(DiskStore(home), [DiskStore(home / "seeds")]),
}


@pytest.fixture(params=FACTORIES)
def store(request, tmp_path):
    return FACTORIES[request.param](tmp_path)


def test_returns_what_was_put(store):
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()
    assert [each.key for each in store.ls()] == [kernel().key]
    assert store.verify() == (1, [])


def test_another_task_or_device_is_a_miss(store):
    store.put(kernel())
    assert store.get("0" * 64, fingerprint()) is None
    assert store.get(kernel().task.key, fingerprint(name="another")) is None


def test_the_last_put_wins(store):
    store.put(kernel())
    store.put(kernel(source="// other"))
    store.put(kernel(source="// other", ratio=3.0))
    found = store.get(kernel().task.key, fingerprint())
    assert found.candidate.source == "// other" and found.evidence.ratio == 3.0
    assert store.verify()[0] == 1


def test_a_line_about_every_kernel(store):
    store.put(kernel())
    for _ in range(2):  # the second answer may come from an index
        (line,) = store.summaries()
        assert (line.key, line.task, line.ratio) == (kernel().key, kernel().task.key, 2.0)
        assert line.fingerprint == dict(fingerprint().hard) and line.operators == ["aten.exp.default"]
    store.put(kernel(ratio=3.0))
    assert [line.ratio for line in store.summaries()] == [3.0]


def test_a_removed_kernel_is_a_miss_until_put_again(store):
    assert store.remove(kernel().task.key, fingerprint(), "wrong") is False
    store.put(kernel())
    assert store.remove(kernel().task.key, fingerprint(), "wrong") is True
    assert store.get(kernel().task.key, fingerprint()) is None
    assert list(store.ls()) == [] and store.summaries() == [] and store.verify() == (0, [])
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()


def test_records_and_wishes(store):
    record = GraphRecord("a" * 64, fingerprint().key, (RegionVerdict("t", "left", "budget", "forward"),), {"x": 1.5})
    assert store.get_record(record.graph_key) is None
    store.put_record(record)
    assert store.get_record(record.graph_key) == record
    store.wish(kernel().task, {}, 0.2)
    store.wish(kernel().task, {}, 0.1)
    assert [wish["share"] for wish in store.wishes()] == [0.2]


def only_folder(home):
    place = next((home / "kernels").glob("*/*"))
    return place / (place / "current").read_text().strip()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "kernel.json").write_text("{"),
        lambda folder: (folder / "kernel.json").unlink(),
        lambda folder: (folder / "kernel.cpp").write_text("// changed"),
        lambda folder: (folder / "kernel.cpp").unlink(),
        lambda folder: (folder / "kernel.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "kernel.json").write_text("[" * 100_000),
        lambda folder: (folder / "kernel.json").write_text("[]"),
        lambda folder: change(folder, "schema", 99),
        lambda folder: change(folder, "hashes", []),
        lambda folder: change(folder, "task", {"form": 1}),
        lambda folder: change(folder, "source", "../../../../etc/passwd"),
        lambda folder: change(folder, "language", "triton"),
        lambda folder: change(folder, "task_key", "0" * 64),
        lambda folder: change(folder, "plan", {"inputs": [], "steps": [], "outputs": []}),
        lambda folder: change(folder, "evidence", {"reached": "DONE"}),
        lambda folder: change(folder, "fingerprint", {"name": "other"}),
    ],
)
def test_a_corrupt_entry_is_a_miss_and_set_aside(tmp_path, harm):
    store = DiskStore(tmp_path)
    store.put(kernel())
    harm(only_folder(tmp_path))
    assert len(store.verify()[1]) == 1
    assert store.get(kernel().task.key, fingerprint()) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()


def test_a_kernel_in_the_place_of_another_is_a_miss(tmp_path):
    store = DiskStore(tmp_path)
    store.put(kernel())
    place = only_folder(tmp_path).parent
    other = place.with_name(fingerprint(name="another").key[:16])
    place.rename(other)
    assert store.get(kernel().task.key, fingerprint(name="another")) is None


@pytest.mark.parametrize("text", ["", "..", "../../..", "/etc", "0" * 16 + "x\n", "\x00\n"])
def test_a_torn_pointer_is_a_miss_and_named(tmp_path, text):
    store = DiskStore(tmp_path)
    store.put(kernel())
    (only_folder(tmp_path).parent / "current").write_text(text)
    assert store.get(kernel().task.key, fingerprint()) is None
    assert [bad.path.endswith("current") for bad in store.verify()[1]] == [True]
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()


@pytest.mark.parametrize("record", ["{", "[]", '{"schema": 99}', '{"schema": 1, "graph_key": 1}', ""])
def test_a_corrupt_record_is_a_miss(tmp_path, record):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "abc.json").write_text(record)
    assert DiskStore(tmp_path).get_record("abc") is None
    assert not (tmp_path / "records" / "abc.json").exists()


def test_source_comes_back_to_the_byte(tmp_path):
    text = "// one\r\n// \u00fc two\n\n"
    store = DiskStore(tmp_path)
    store.put(kernel(source=text))
    assert store.get(kernel().task.key, fingerprint()).candidate.source == text
    folder = only_folder(tmp_path)
    named = json.loads((folder / "kernel.json").read_text())["hashes"]["source"]
    assert named == hashlib.sha256((folder / "kernel.cpp").read_bytes()).hexdigest()


def test_what_has_no_text_form_is_dropped_and_said(tmp_path, caplog):
    store = DiskStore(tmp_path)
    store.put(kernel(source="// \ud800"))
    assert store.get(kernel().task.key, fingerprint()) is None and "not kept" in caplog.text
    assert list(tmp_path.rglob(".new-*")) == []


def change(folder, field, value):
    data = json.loads((folder / "kernel.json").read_text())
    data[field] = value
    (folder / "kernel.json").write_text(json.dumps(data))


def test_unproven_evidence_is_never_served(tmp_path):
    store = DiskStore(tmp_path)
    store.put(kernel(ok=False))
    assert store.get(kernel().task.key, fingerprint()) is None


def test_kernel_json_has_the_public_fields(tmp_path):
    DiskStore(tmp_path).put(kernel())
    data = json.loads((only_folder(tmp_path) / "kernel.json").read_text())
    assert {"schema", "key", "task", "language", "fingerprint", "plan", "evidence", "provenance", "hashes"} <= set(data)
    assert "steps" in data["plan"] and {"reached", "ok", "note"} <= set(data["evidence"])
    assert str(tmp_path) not in json.dumps(data)


def test_user_tier_hides_a_seed(tmp_path):
    seeds = DiskStore(tmp_path / "seeds")
    seeds.put(kernel())
    store = TieredStore(DiskStore(tmp_path / "user"), [seeds])
    assert store.get(kernel().task.key, fingerprint()) == kernel()
    store.put(kernel(source="// mine"))
    assert store.get(kernel().task.key, fingerprint()).candidate.source == "// mine"
    assert len(list(store.ls())) == 1


def everything(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_seeds_are_never_written(tmp_path):
    DiskStore(tmp_path / "seeds").put(kernel())
    (only_folder(tmp_path / "seeds") / "kernel.cpp").write_text("// changed")
    before = everything(tmp_path / "seeds")
    store = TieredStore(DiskStore(tmp_path / "user"), [DiskStore(tmp_path / "seeds", frozen=True)])
    assert store.get(kernel().task.key, fingerprint()) is None
    assert len(store.verify()[1]) == 1 and store.summaries() == []
    assert everything(tmp_path / "seeds") == before
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()
    assert everything(tmp_path / "seeds") == before


def test_a_removed_seed_stays_away_while_the_process_lives(tmp_path):
    DiskStore(tmp_path / "seeds").put(kernel())
    store = TieredStore(DiskStore(tmp_path / "user"), [DiskStore(tmp_path / "seeds", frozen=True)])
    assert store.remove(kernel().task.key, fingerprint(), "wrong here") is True
    assert store.get(kernel().task.key, fingerprint()) is None
    store.put(kernel(source="// better"))
    assert store.get(kernel().task.key, fingerprint()).candidate.source == "// better"


def test_without_any_home_kernels_live_in_the_process(tmp_path, monkeypatch, caplog):
    """A user id without HOME and without an entry in the user database, as containers have it."""
    for name in ("HOME", "XDG_DATA_HOME", "KEVOLVE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        store = open_store(Settings.make())
        store.put(kernel())
        assert store.get(kernel().task.key, fingerprint()) == kernel()
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("Set KEVOLVE_HOME") <= 1


def test_the_index_is_disposable(tmp_path):
    store = DiskStore(tmp_path)
    store.put(kernel())
    lines = store.summaries()
    for harm in (b"no database", b""):
        store._index.close()
        for path in (tmp_path / "index").iterdir():
            path.write_bytes(harm)
        again = DiskStore(tmp_path)
        assert again.summaries() == lines
        again._index.close()


def test_the_index_never_hides_a_changed_file(tmp_path):
    store = DiskStore(tmp_path)
    store.put(kernel())
    assert len(store.summaries()) == 1
    (only_folder(tmp_path) / "kernel.cpp").write_text("// changed")
    assert store.summaries() == []


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (Bomb.path,))


@pytest.mark.parametrize("column", ["value", "key"])
def test_a_pickle_in_the_index_is_not_loaded(tmp_path, column):
    store = DiskStore(tmp_path)
    store.put(kernel())
    lines = store.summaries()
    store._index.close()
    Bomb.path = str(tmp_path / "bomb")
    bomb = pickle.dumps(Bomb())
    with contextlib.closing(sqlite3.connect(tmp_path / "index" / "cache.db")) as base:
        if column == "value":
            base.execute("UPDATE Cache SET mode = ?, value = ?", (diskcache.core.MODE_PICKLE, bomb))
        else:
            base.execute("UPDATE Cache SET raw = 0, key = ?", (bomb,))
        base.commit()
    # diskcache's own Disk would have run it:
    with contextlib.suppress(Exception), diskcache.Cache(str(tmp_path / "index")) as plain:
        for key in plain:
            plain.get(key)
    assert os.path.isdir(Bomb.path)
    os.rmdir(Bomb.path)
    again = DiskStore(tmp_path)
    assert again.summaries() == lines
    cache = again._index._open()
    for call in (
        lambda: [cache.get(key) for key in cache],
        lambda: cache.set("k", Bomb()),
        lambda: cache.set((1,), "v"),
    ):
        with contextlib.suppress(TypeError, ValueError):
            call()
    again._index.close()
    assert not os.path.exists(Bomb.path)


def test_the_index_refuses_all_but_text(tmp_path):
    disk = PlainDisk(str(tmp_path))
    for call in (
        lambda: disk.put(("a", 1)),
        lambda: disk.get(b"x", False),
        lambda: disk.store({"a": 1}, False),
        lambda: disk.fetch(diskcache.core.MODE_PICKLE, None, b"x", False),
        lambda: disk.fetch(diskcache.core.MODE_TEXT, "../../etc/passwd", None, False),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_a_home_that_cannot_be_made_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    settings = Settings.make({"home": str(tmp_path / "file" / "home")}, {})
    store = open_store(settings)
    store.put(kernel())
    assert store.get(kernel().task.key, fingerprint()) == kernel()
    assert "KEVOLVE_HOME" in caplog.text


def _put_many(home, number):
    store = DiskStore(home)
    for turn in range(20):
        store.put(kernel(source=f"// {number} {turn}"))


def test_eight_processes_put_at_once(tmp_path):
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "fork")
    writers = [context.Process(target=_put_many, args=(tmp_path, number)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = DiskStore(tmp_path).get(kernel().task.key, fingerprint())
    assert found is not None and found.candidate.source.endswith(" 19")


def test_kill_9_while_putting_leaves_whole_entries(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from samples import kernel
        from torch_kevolve.store import DiskStore
        store = DiskStore(Path(sys.argv[1]))
        for number in range(10**6):
            store.put(kernel(f"// {number % 7}", ratio=1.0 + number))
            print(number, flush=True)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        store = DiskStore(tmp_path)
        while int(child.stdout.readline()) < 60:
            assert store.get(kernel().task.key, fingerprint()) is not None
        child.send_signal(signal.SIGKILL)
        told = max([60, *map(int, child.stdout.read().split())])
    found = store.get(kernel().task.key, fingerprint())
    assert found is not None and found.evidence.ratio in (1.0 + told, 2.0 + told)
    assert store.verify() == (1, []) and caplog.text == ""
