"""Store: one contract for every member, and what a disk can do to us."""

import json
import multiprocessing
import os

import pytest
from samples import fingerprint, kernel

from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.settings import Settings
from torch_kevolve.store import DiskStore, MemoryStore, TieredStore, open_store

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
        lambda folder: change(folder, "schema", 99),
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
