"""Devices: one name for one machine, one measurement at a time, ceilings that can be trusted."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from torch_kevolve.devices import DEVICES, current
from torch_kevolve.devices.base import Ceilings
from torch_kevolve.devices.ceilings import TRIES, best, kept, measure_cpu
from torch_kevolve.devices.lock import device_lock, device_share
from torch_kevolve.devices.quiet import wait_for_quiet
from torch_kevolve.errors import UnknownName

FIGURES = Ceilings(1e10, 2e10, 3e10, 4e10, 2**20)


@pytest.fixture
def cpu():
    return current("cpu")


def python(code, **env):
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def test_a_device_has_one_object_and_a_wrong_name_names_the_known(cpu):
    assert current(torch.device("cpu")) is cpu and DEVICES.names()[:2] == ["cpu", "cuda"]
    with pytest.raises(UnknownName, match="cpu, cuda"):
        current("meta")


def test_fingerprint_is_plain_text_without_paths(cpu):
    hard = dict(cpu.fingerprint().hard)
    assert set(hard) == {"vendor", "arch", "name", "units", "memory", "isa"}
    assert hard["units"] == str(torch.get_num_threads()) and hard["vendor"].endswith("CPU")
    assert "/" not in json.dumps(hard) and os.uname().nodename not in hard.values()
    assert cpu.fingerprint().device_type == "cpu"


def test_soft_part_names_what_may_change_under_a_kernel(cpu):
    soft = cpu.soft()
    assert soft["torch"] == torch.__version__ and re.search(r"\d|none", soft["compiler"])
    assert json.loads(json.dumps(soft)) == soft


def test_fingerprint_is_the_same_in_another_process_and_folder(cpu, tmp_path):
    code = (
        f"import os, torch; os.chdir({str(tmp_path)!r}); torch.set_num_threads({torch.get_num_threads()})\n"
        "from torch_kevolve.devices import current; print(current('cpu').fingerprint().key)"
    )
    with python(code, KEVOLVE_HOME=str(tmp_path), HOME=str(tmp_path)) as child:
        assert child.stdout.read().strip() == cpu.fingerprint().key


def test_facts_are_those_of_a_real_processor(cpu):
    facts = cpu.facts()
    assert 0 < facts.l1_bytes <= facts.l2_bytes and facts.vector_bytes in (16, 32, 64) and facts.units >= 1


def test_ceilings_are_measured_as_positive_numbers_within_seconds():
    figures = measure_cpu(2**20)
    assert all(math.isfinite(v) and v > 0 for v in vars(figures).values())
    assert figures.cache_bytes_s >= figures.copy_bytes_s and figures.cache_bytes == 2**20


def test_best_is_the_least_of_several_calls():
    turns = iter([0.0, 0.02, 0.0, 0.02])
    assert best(lambda: time.sleep(next(turns)), 0.0) < 0.02


class Quiet:
    """The CPU with a load and ceilings of our choosing."""

    def __init__(self, cpu, load=0.0):
        self._cpu, self._load = cpu, load

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def load(self):
        return self._load


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KEVOLVE_HOME", str(tmp_path))
    return tmp_path


def never():
    raise AssertionError("it was measured again")


class Leaving(Quiet):
    """Others leave after a few looks."""

    def __init__(self, cpu, looks):
        super().__init__(cpu, load=1.0)
        self.looks = looks

    def load(self):
        self.looks -= 1
        return 1.0 if self.looks > 0 else 0.02


def test_a_measurement_waits_for_others_but_not_for_ever(cpu):
    busy = Leaving(cpu, 3)
    assert wait_for_quiet(busy, 60.0) == 0.02 and busy.looks == 0
    assert wait_for_quiet(Quiet(cpu, load=0.7), 0.0) == 0.7


def test_a_quiet_measurement_is_made_once(cpu, home):
    assert kept(Quiet(cpu), lambda: FIGURES) == FIGURES
    assert kept(Quiet(cpu), never) == FIGURES


def test_disturbed_measurements_are_merged_upwards(cpu, home):
    low = replace(FIGURES, copy_bytes_s=1.0)
    assert kept(Quiet(cpu, load=1.0), lambda: low).copy_bytes_s == 1.0
    high = replace(FIGURES, fp32_flops=1.0)
    merged = kept(Quiet(cpu, load=1.0), lambda: high)
    assert merged == FIGURES
    for _ in range(TRIES - 2):
        kept(Quiet(cpu, load=1.0), lambda: low)
    assert kept(Quiet(cpu, load=1.0), never) == FIGURES


def test_measured_again_the_higher_counts(cpu, home):
    kept(Quiet(cpu), lambda: replace(FIGURES, copy_bytes_s=1.0))
    assert kept(Quiet(cpu), lambda: replace(FIGURES, fp32_flops=1.0), again=True) == FIGURES
    assert kept(Quiet(cpu), never) == FIGURES


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"ceilings": {}}', '{"ceilings": {"copy_bytes_s": "x"}, "tries": 9}', "null", "0" * 9],
)
def test_a_damaged_file_is_measured_again(cpu, home, text):
    kept(Quiet(cpu), lambda: FIGURES)
    (path,) = (home / "devices").iterdir()
    path.write_text(text)
    assert kept(Quiet(cpu), lambda: FIGURES) == FIGURES
    path.write_text(path.read_text().replace("10000000000.0", "-1.0"))
    assert kept(Quiet(cpu), lambda: FIGURES) == FIGURES


def test_ceilings_work_where_nothing_can_be_written(cpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEVOLVE_HOME", str(tmp_path / "file" / "home"))
    assert kept(Quiet(cpu), lambda: FIGURES) == FIGURES


def test_ceilings_are_of_real_tensors_also_during_a_compilation(cpu, home):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def measure():
        assert not isinstance(torch.ones(2), FakeTensor)
        return FIGURES

    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        assert kept(Quiet(cpu), measure) == FIGURES


HOLD = """
from torch_kevolve.devices.lock import device_lock
with device_lock("test"):
    print(1, flush=True)
"""


@pytest.fixture
def locks(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def waits(name="test"):
    """A thread that has asked for the lock, and the event of having got it."""
    got = threading.Event()

    def take():
        with device_lock(name):
            got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, got


def test_lock_waits_for_another_process_until_it_dies(locks):
    with python(HOLD + "    import time; time.sleep(60)", TMPDIR=str(locks)) as child:
        assert child.stdout.readline() == "1\n"
        thread, got = waits()
        assert not got.wait(0.3)
        child.kill()
    thread.join(20)
    assert got.is_set()


def test_lock_keeps_another_process_out(locks):
    with device_lock("test"), device_lock("test"):  # nested: the same thread does not wait for itself
        with device_lock("test"):
            pass
        child = python(HOLD + "    pass", TMPDIR=str(locks))
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(8)
    assert child.wait(30) == 0 and child.stdout.read() == "1\n"
    child.stdout.close()


def test_lock_keeps_another_thread_out_and_other_devices_go_on(locks):
    with device_lock("test"):
        thread, got = waits()
        other, free = waits("other")
        assert free.wait(20) and not got.wait(0.2)
    thread.join(20)
    other.join(20)
    assert got.is_set()


def test_shared_work_waits_for_a_measurement_and_not_for_its_like(locks):
    with device_share("test"):
        with device_share("test"):
            pass
        thread, got = waits()
        assert not got.wait(0.3)
    thread.join(20)
    assert got.is_set()
    with python(HOLD + "    import time; time.sleep(60)", TMPDIR=str(locks)) as child:
        assert child.stdout.readline() == "1\n"
        got = threading.Event()

        def work():
            with device_share("test"):
                got.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert not got.wait(0.3)
        child.kill()
    thread.join(20)
    assert got.is_set()


def test_shared_work_within_a_measurement_waits_for_nothing(locks):
    with device_lock("test"), device_share("test"):
        pass


def test_a_child_forked_under_the_lock_does_not_keep_it(locks):
    with device_lock("test"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        thread, got = waits()
        assert got.wait(10)
        thread.join(10)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_lock_file_that_cannot_be_made_is_said_once_and_no_error(locks, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(locks / "nowhere"))
    with device_lock("test"):
        pass
    assert "not waited for" in caplog.text


@pytest.mark.gpu
def test_a_gpu_has_figures():
    gpu = current("cuda")
    facts, figures = gpu.facts(), gpu.ceilings()
    assert facts.units > 0 and facts.shared_bytes >= 48 * 1024 and facts.l2_bytes > 0
    assert figures.copy_bytes_s > 1e10 and figures.bf16_flops > figures.fp32_flops > 1e11
    assert gpu.fingerprint().device_type == "cuda"
    gpu.flush()
    gpu.synchronize()
