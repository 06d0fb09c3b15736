"""For every tier: in what order tests run and which of them share a worker, and what a skipped test means in CI."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# On a loaded machine an example may take any time.
settings.register_profile(
    "untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

# These share the cluster with a node: there is one of it on a machine.
NODE = (
    "test_cluster_edits.py",
    "test_cluster_fetch.py",
    "test_cluster_node.py",
    "test_cluster_images.py",
    "test_cluster_invalid.py",
    "test_cluster_trainer.py",
    "test_environment_on_nodes.py",
    "test_runs.py",
)
LONG = ("test_interrupted.py",)
"""One test of five minutes: begun last, it would run alone."""
SLOW_SECONDS = {"local": 60.0, "vllm": 10.0, "slow": 5.0, "cluster": 4.0}
"""What a test counts by the first of these marks that it has, where no run has measured its file."""
SECONDS = "scalerl/seconds"
"""Where pytest's cache keeps the seconds of each scope."""
LISTED = 20
MAX_REPEATED = 3
"""How many tests may fail at first in one run of ``make test`` (``--reruns 1``). Whole runs and clusters on a loaded machine meet moments
that no deadline of a test foresaw; the summary has each with its error."""
MAY_SKIP_IN_CI = ("needs a GPU", "needs Chromium", "needs peft")


def scope(nodeid: str) -> str:
    """Tests of one scope run in one worker: those of a file, so that what they share is made once."""
    file = nodeid.split("::", 1)[0]
    return "node" if file.endswith(NODE) else file


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A quarter of the time of collecting would go to the collector of garbage, which visits all modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()  # nor are they visited while tests run
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster with a node ends after the tests of its scope: idle, it takes 3 % of a processor. Only workers run them in a row."""
    if not hasattr(item.config, "workerinput") or nextitem is None:
        return
    if scope(item.nodeid) == "node" != scope(nextitem.nodeid) and "cluster" in getattr(item, "funcargs", {}):
        item.funcargs["cluster"].down()  # type: ignore[attr-defined]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def measured(config: pytest.Config) -> dict[str, float]:
    """The seconds of each scope, as runs have measured them; none without pytest's cache."""
    cache = getattr(config, "cache", None)
    return {} if cache is None else cache.get(SECONDS, {})


def pytest_configure_node(node: WorkerController) -> None:
    """All workers order tests by the same figures."""
    node.workerinput["seconds"] = measured(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest scopes first, as the last run measured them, so that all workers end at about the same time."""
    if not hasattr(config, "workerinput"):
        return
    seconds: dict[str, float] = config.workerinput["seconds"]
    slow: dict[str, float] = {}
    for item in items:
        counts = next((s for mark, s in SLOW_SECONDS.items() if item.get_closest_marker(mark)), 0.0)
        slow[scope(item.nodeid)] = slow.get(scope(item.nodeid), 0.0) + counts

    def order(item: pytest.Item) -> tuple[bool, bool, float]:
        of = scope(item.nodeid)
        return of != "node", not of.endswith(LONG), -seconds.get(of, slow[of])

    items.sort(key=order)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Prints how long each scope took, where several workers ran, and keeps it if all of their tests ran and passed."""
    config = terminalreporter.config
    if config.getoption("dist") != "loadfile":
        return
    reports = [r for rs in terminalreporter.stats.values() for r in rs if isinstance(r, pytest.TestReport)]
    took: dict[str, float] = {}
    for report in reports:
        of = scope(report.nodeid)
        took[of] = took.get(of, 0.0) + report.duration
    if exitstatus == pytest.ExitCode.OK and hasattr(config, "cache"):
        config.cache.set(SECONDS, measured(config) | {of: round(s, 1) for of, s in took.items()})
    terminalreporter.section(f"longest {LISTED} files")
    for of in sorted(took, key=took.__getitem__, reverse=True)[:LISTED]:
        terminalreporter.write_line(f"{took[of]:7.1f}s {of}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    repeated = reporter.stats.get("rerun", [])
    if repeated:
        reporter.section(f"failed at first: {len(repeated)} (at most {MAX_REPEATED})", yellow=True)
        for report in repeated:
            reporter.write_line(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")
    if len(repeated) > MAX_REPEATED and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED
    if os.environ.get("CI") != "true" or exitstatus != pytest.ExitCode.OK:
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
