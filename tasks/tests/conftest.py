"""No test reads or writes the tables of data sets that its user has, and none of grading depends on the speed of the machine."""

import pytest

from scalerl_tasks import GradingPool


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch):
    """The limits of pools where a test gives none: those of users would be exceeded while the machine does something else."""
    for name in ("timeout_seconds", "start_timeout_seconds"):
        monkeypatch.setitem(GradingPool.__init__.__kwdefaults__, name, 300.0)
