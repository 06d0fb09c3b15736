"""For every tier: in what order tests run and which of them share a worker, and what a skipped test means in CI."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# On a loaded machine an example may take any time.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

# These share the cluster with a node: there is one of it on a machine.
NODE = (
    "test_cluster_edits.py",
    "test_cluster_fetch.py",
    "test_cluster_node.py",
    "test_cluster_images.py",
    "test_cluster_invalid.py",
    "test_cluster_trainer.py",
    "test_runs.py",
)
LONG = ("test_interrupted.py",)
"""One test of five minutes: begun last, it would run alone."""
SLOW = ("slow", "vllm", "local")
MAY_SKIP_IN_CI = ("needs a GPU", "needs Chromium", "needs peft")


def scope(nodeid: str) -> str:
    """Tests of one scope run in one worker: those of a file, so that what they share is made once."""
    file = nodeid.split("::", 1)[0]
    return "node" if file.endswith(NODE) else file


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest scopes first, so that all workers end at about the same time."""
    slow = Counter(scope(i.nodeid) for i in items if any(i.get_closest_marker(m) for m in SLOW))
    items.sort(
        key=lambda i: (scope(i.nodeid) != "node", not scope(i.nodeid).endswith(LONG), -slow[scope(i.nodeid)])
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true" or exitstatus != pytest.ExitCode.OK:
        return
    unexpected = [
        r
        for r in reporter.stats.get("skipped", [])
        if not any(reason in str(r.longrepr) for reason in MAY_SKIP_IN_CI)
    ]
    if unexpected:
        reporter.write_line(f"{len(unexpected)} skipped test(s) that CI must run:", red=True)
        for report in unexpected:
            reporter.write_line(f"  {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
