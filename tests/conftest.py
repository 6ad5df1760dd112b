"""Fixtures and tiers: a run by hand needs no GPU, no network, and never sees the state of whoever runs it."""

import atexit
import os
import shutil
import tempfile

import pytest

# Before torch is imported by any test: a home and an Inductor cache of this run's own, unless the caller named them.
# The workers of a run inherit both from the process that started them.
if not {"KEVOLVE_HOME", "TORCHINDUCTOR_CACHE_DIR"} <= set(os.environ):
    _state = tempfile.mkdtemp(prefix="kevolve-tests-")
    atexit.register(shutil.rmtree, _state, ignore_errors=True)
    os.environ.setdefault("KEVOLVE_HOME", os.path.join(_state, "home"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(_state, "inductor"))
os.environ.setdefault("KEVOLVE_PROGRESS", "off")


def pytest_runtest_setup(item):
    if item.get_closest_marker("net") and os.environ.get("KEVOLVE_TEST_NET") != "1":
        pytest.skip("needs a network: set KEVOLVE_TEST_NET=1")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
