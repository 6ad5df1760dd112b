"""Modules: torch.compile with kernels forced in equals eager, dynamic shapes, inference and training."""

import pytest
from small_modules import CASES, REPLACED, check, replaced


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home of its own: the kernels in it were never measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEVOLVE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("KEVOLVE_STORE", "disk")
        yield


@pytest.mark.parametrize("name", CASES)
def test_dynamic(name):
    check(name, dynamic=True)


def test_most_of_them_held_kernels():
    if len({name for name, _, _ in REPLACED}) < len(CASES):
        pytest.skip("only some of the modules were checked")
    assert len(replaced(dynamic=True)) >= 25, replaced(dynamic=True)
