"""The commands: one JSON document on stdout, words on stderr, and the exit status."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from samples import kernel
from torch_kevolve.cli import main
from torch_kevolve.settings import Settings
from torch_kevolve.store import open_store

ROOT = Path(__file__).resolve().parents[1]
MODEL = """
import torch
def make():
    return torch.nn.Softmax(-1).eval(), (torch.randn(32, 200),)
def several():
    return [make(), (lambda x: torch.logsumexp(x, -1), (torch.randn(16, 100),))]
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KEVOLVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KEVOLVE_STORE", "disk")
    monkeypatch.setenv("KEVOLVE_EFFORT", "none")
    torch._dynamo.reset()
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def call(*words):
    return CliRunner().invoke(main, list(words))


def document(*words, status=0):
    done = call(*words, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def test_config_shows_every_setting_and_what_the_environment_made_of_it(home, monkeypatch):
    rows = {row["name"]: row for row in document("config")["settings"]}
    assert set(rows) == {f"kevolve.{name}" for name in Settings.__dataclass_fields__}
    assert rows["kevolve.effort"]["value"] == "none" and rows["kevolve.effort"]["default"] == "quick"
    assert call("config").exit_code == 0


def test_cache_ls_path_and_verify(home):
    assert document("cache", "ls") == {"kernels": []}
    assert document("cache", "path") == {"path": str(home)}
    assert call("cache", "path").stdout.strip() == str(home)
    made = kernel()
    open_store(Settings.make()).put(made)
    (row,) = document("cache", "ls")["kernels"]
    assert (row["key"], row["task"], row["language"]) == (made.key, made.task.key, "cpp")
    assert row["fingerprint"] == made.fingerprint.key and row["ratio"] == 2.0
    assert document("cache", "verify") == {"ok": 1, "bad": []}
    assert made.key[:12] in call("cache", "ls").stdout


def test_cache_verify_says_no_to_a_bad_entry(home):
    open_store(Settings.make()).put(kernel())
    (entry,) = home.rglob("kernel.json")
    entry.write_text("{")
    said = document("cache", "verify", status=1)
    assert said["ok"] == 0 and len(said["bad"]) == 1


def test_explain_searches_nothing_and_names_each_region(home, model):
    said = document("explain", f"{model}:make")
    (row,) = said["regions"]
    assert row["status"] == "left" and row["reason"] == "not-searched" and row["kernel"] is None
    assert len(row["task"]) == 64 and row["ratio"] is None
    assert not list(home.rglob("kernel.json"))
    assert "not-searched" in call("explain", f"{model}:make").stdout


def test_explain_takes_a_list_of_cases(home, model):
    assert len(document("explain", f"{model}:several")["regions"]) == 2


@pytest.mark.parametrize(
    "words", [("explain", "nowhere.py:make"), ("explain", "nothing"), ("nonsense",), ("cache", "ls", "x")]
)
def test_misuse_ends_with_2_and_words_on_stderr(home, words):
    done = call(*words)
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.strip()


def test_a_bad_variable_ends_with_2_and_the_cure(home, model, monkeypatch):
    monkeypatch.setenv("KEVOLVE_EFFORT", "huge")
    for words in (("config",), ("explain", f"{model}:make")):
        done = call(*words)
        assert done.exit_code == 2 and "none or quick or full" in done.stderr and done.stdout == ""


def test_doctor_tests_the_private_hooks(home):
    said = document("doctor")
    languages = {row["name"]: row["status"] for row in said["languages"]}
    assert set(languages) >= {"aten", "cpp", "triton"}
    assert set(languages.values()) <= {"available", "compile-only", "missing"}
    checks = {row["name"]: row for row in said["checks"]}
    assert checks["inductor hooks"]["status"] == "ok", checks["inductor hooks"]
    assert all(row["status"] in ("ok", "missing") for row in checks.values())


def test_a_broken_hook_makes_doctor_say_no(home, monkeypatch):
    from torch_kevolve.lowering import graph_pass

    monkeypatch.setattr(graph_pass.RegionPass, "__call__", lambda self, graph: None)
    said = document("doctor", status=1)
    assert {row["name"] for row in said["checks"] if row["status"] == "broken"} == {"inductor hooks"}


def test_every_command_has_help_and_json():
    def leaves(command):
        found = getattr(command, "commands", None)
        return [command] if found is None else [leaf for each in found.values() for leaf in leaves(each)]

    for command in leaves(main):
        assert command.help and "--json" in {name for option in command.params for name in option.opts}, command.name


@pytest.mark.parametrize("name", ["settings", "cli"])
def test_pages_are_current(name):
    pages = runpy.run_path(str(ROOT / "scripts" / "pages.py"))
    assert (ROOT / "docs" / f"{name}.md").read_text() == pages[f"{name}_page"](), "run: python scripts/pages.py"
