"""For every tier: a test that did not run is a failure in CI, unless it says that it may be missing there."""

from __future__ import annotations

import os

import pytest

MAY_SKIP_IN_CI = ("needs a GPU",)


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
