"""What takes minutes says that it continues, how far it is, and how it ended."""

from __future__ import annotations

import pytest
from testcluster import ClusterError, progress


def test_long_progress_step_reports_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.1)
    with progress.step("building it") as step:
        script = "echo STEP 1; echo STEP 2 >&2; sleep 2; exit 3"
        code, said = progress.followed(step, ["sh", "-c", script], seconds=30)
    assert (code, said) == (3, "STEP 1\nSTEP 2\n")
    first, *between, last = (line.split("] ")[1] for line in capsys.readouterr().err.splitlines())
    assert first == "building it ..."
    assert last.startswith("building it: done, ")
    assert between
    assert between[-1].endswith("STEP 2")


def test_command_that_hangs_is_killed() -> None:
    code, _ = progress.followed(progress.Step("it"), ["sleep", "60"], seconds=0.2)
    assert code == -9


def test_failed_progress_step_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError), progress.step("building it"):
        raise ClusterError("no")
    assert "done" not in capsys.readouterr().err
