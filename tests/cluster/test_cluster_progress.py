"""What takes minutes says that it continues, how far it is, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testcluster import ClusterError, MissingError, progress, tools

CLUSTER = Path(__file__).with_name("cluster.py")
GO = """#!/bin/sh
case $1 in
env) echo go1.26.1 ;;
list) printf 'go: downloading k8s.io/a v1.0.0\\nk8s.io/a\\nk8s.io/b\\nk8s.io/c\\n' ;;
build) printf 'k8s.io/a\\nk8s.io/b\\n' >&2; {then} ;;
esac
"""


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone, or waits for its parent alone."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


OFTEN = progress.Pace(every_seconds=0.1)
LIMITS = (1.0, 5.0, 25.0, 125.0)
"""Of silence, in seconds: a slow machine needs a longer one to print at all."""


def silenced(work: Callable[[float], object], printed: str) -> ClusterError:
    """The error of a work that prints this and is silent then, with the least limit that lets it print."""
    for seconds in LIMITS:
        with pytest.raises(
            ClusterError, match=f"printed nothing for {seconds:.0f} s and was ended:"
        ) as raised:
            work(seconds)
        if printed in str(raised.value):
            return raised.value
    raise AssertionError(f"{printed!r} is not printed")


@pytest.fixture
def waits_for_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A shell's command that waits until a progress line with that end has been printed."""

    def command(end: str) -> str:
        printed, say = tmp_path / "printed", progress._say

        def noting(text: str) -> None:
            say(text)
            if text.endswith(end):
                printed.touch()

        monkeypatch.setattr(progress, "_say", noting)
        return f"until [ -e {printed} ]; do sleep 0.1; done"

    return command


def sh(what: str, script: str) -> Callable[[], object]:
    return lambda: progress.followed(progress.Step(what), ["sh", "-c", script])


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A compiler that lists three packages, prints two, and then does what it is given."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SCALERL_TEST_CACHE", str(tmp_path / "cache"))

    def write(then: str) -> None:
        (tmp_path / "go").write_text(GO.format(then=then))
        (tmp_path / "go").chmod(0o755)

    return write


def test_long_progress_step_reports_progress(
    capsys: pytest.CaptureFixture[str], waits_for_line: Callable[[str], str]
) -> None:
    script = f"echo STEP 1; echo STEP 2 >&2; {waits_for_line('STEP 2')}"
    with progress.step("building it", OFTEN) as step:
        assert progress.followed(step, ["sh", "-c", script]) == "STEP 1\nSTEP 2\n"
    first, *between, last = lines(capsys)
    assert first == "building it ..."
    assert last.startswith("building it: done, ")
    assert between[-1].endswith("STEP 2")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no; exit 3", "it: `sh -c echo no; exit 3` exited 3:\nno\n"),
        (
            "kill -9 $$",
            "was ended by signal 9, which is how a machine that is out of memory ends programs:\n",
        ),
        ("kill -15 $$", "was ended by signal 15:\n"),
    ],
)
def test_command_that_fails_says_how(script: str, message: str) -> None:
    with pytest.raises(ClusterError) as raised:
        sh("it", script)()
    assert message in str(raised.value)


def test_silent_command_is_killed_with_its_children(tmp_path: Path) -> None:
    argv = ["sh", "-c", f"sleep 300 & echo $! > {tmp_path / 'pid'}; echo begun; wait"]
    silenced(lambda limit: progress.followed(progress.Step("it"), argv, silent_seconds=limit), "\nbegun\n")
    assert ends(int((tmp_path / "pid").read_text()))


def test_command_that_prints_has_no_limit_of_time() -> None:
    for limit in LIMITS:
        argv = ["sh", "-c", f"for i in 1 2 3 4 5 6; do echo $i; sleep {limit / 4}; done"]
        try:
            assert progress.followed(progress.Step("it"), argv, silent_seconds=limit).endswith("6\n")
            return
        except ClusterError:
            if limit == LIMITS[-1]:
                raise


def test_failure_ends_what_is_done_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    def two() -> None:
        sh("programs", "sleep 300")()
        raise AssertionError("it was not ended")

    with pytest.raises(ClusterError, match=r"images: .* exited 7:\nno mirror\n") as raised:
        progress.together(two, sh("images", "sleep 1; echo no mirror; exit 7"))
    assert getattr(raised.value, "__notes__", []) == []
    assert lines(capsys) == ["failed: images: `sh -c sleep 1; echo no mirror; exit 7` exited 7:"]
    sh("another", "true")()  # later commands start


def test_both_failures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        try:
            sh("programs", "sleep 300")()
        except ClusterError:
            raise ValueError("and this") from None

    with pytest.raises(ClusterError, match="images: ") as raised:
        progress.together(fails, sh("images", "exit 7"))
    assert raised.value.__notes__ == ["and this"]


def test_what_is_missing_ends_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def missing() -> None:
        raise MissingError("no buildah")

    progress.together(missing, sh("programs", f"sleep 1; touch {tmp_path / 'made'}"))
    assert (tmp_path / "made").exists()
    assert lines(capsys) == ["not prepared, and what needs it is skipped: no buildah"]


def test_build_reports_how_many_packages_are_left(
    go: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    waits_for_line: Callable[[str], str],
) -> None:
    go(f"{waits_for_line(', 2 of 3 packages compiled')}; touch $7")
    assert tools.tool("helm", OFTEN).is_file()
    said = lines(capsys)
    assert any(
        line.startswith("building helm, once: ") and line.endswith(", 2 of 3 packages compiled")
        for line in said
    )


@pytest.mark.parametrize(("then", "how"), [("exit 1", "exited 1"), ("kill -9 $$", "signal 9")])
def test_failed_build_asks_to_be_called_again(go: Callable[[str], None], then: str, how: str) -> None:
    go(then)
    with pytest.raises(ClusterError, match=rf"(?s)building helm, once: .* {how}.*k8s.io/b") as raised:
        tools.tool("helm", OFTEN)
    (note,) = raised.value.__notes__
    assert note.endswith("is not built; call it again: what is compiled is kept")


def test_silent_build_asks_to_be_called_again(go: Callable[[str], None]) -> None:
    go("sleep 300")
    error = silenced(lambda limit: tools.tool("helm", progress.Pace(0.1, silent_seconds=limit)), "k8s.io/b\n")
    assert str(error).startswith("building helm, once: ")
    (note,) = error.__notes__
    assert note.endswith("is not built; call it again: what is compiled is kept")


def test_preparation_that_is_ended_ends_its_compiler(go: Callable[[str], None], tmp_path: Path) -> None:
    go(f"echo $$ > {tmp_path / 'pid'}; exec sleep 300")
    process = subprocess.Popen([sys.executable, CLUSTER, "tool", "helm"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert ends(int((tmp_path / "pid").read_text()))


def test_failed_progress_step_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError), progress.step("building it"):
        raise ClusterError("no")
    assert "done" not in capsys.readouterr().err
