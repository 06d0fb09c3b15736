"""``scalerl run`` as a user's shell sees it: exit codes, signals, what is printed, what is left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_tests import small_roles
from scalerl_processes.process_table import kill_marked, marked

RUN: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "small"},
    "spec": {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "trainer": {"replicas": 1},
        "budget": {"maxSteps": 60},
    },
}


class Shell:
    """One ``scalerl run`` in a child process."""

    def __init__(
        self,
        tmp: Path,
        *arguments: str,
        spec: dict[str, Any],
        terminal: int | None = None,
        output: int | None = None,
        ignored: tuple[signal.Signals, ...] = (),
        **environment: str,
    ) -> None:
        """``terminal``: its controlling terminal, and where it writes; ``output``: where else than to a file."""
        self.directory = tmp / "run"
        self.output = tmp / "output.txt"
        file = tmp / "run.yaml"
        file.write_text(yaml.safe_dump(RUN | {"spec": RUN["spec"] | spec}))

        def before_start() -> None:
            # Whatever started the tests: these are as a shell in front of a person has them.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            if terminal is not None:
                os.setsid()
                fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        with self.output.open("a") as file_sink:
            sink = next((fd for fd in (terminal, output) if fd is not None), file_sink.fileno())
            self.process = subprocess.Popen(
                [sys.executable, small_roles.__file__, "run", str(file), *arguments],
                stdout=sink,
                stderr=file_sink if output is not None else subprocess.STDOUT,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                cwd=tmp,
                env={**os.environ, "COLUMNS": "200", **environment},
                preexec_fn=before_start,
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None or condition(), (
                f"ended with {self.process.returncode}:\n{self.text()}"
            )
            assert time.monotonic() < end, f"not in time:\n{self.text()}"
            time.sleep(0.01)

    def step(self) -> int:
        path = self.directory / "step"
        return int(path.read_text()) if path.exists() else 0

    def finish(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)

    def forget_end(self) -> None:
        """Before a resume: the small roles leave these files, and the stop, which is the command's to take back."""
        for name in ("finished", "trainer-up"):
            (self.directory / name).unlink()

    def interrupt(self) -> None:
        """As soon as the trainer trains: one that finds a stop when it starts waits half a minute for it to be taken back."""
        self.until((self.directory / "trainer-up").exists)
        self.process.send_signal(signal.SIGINT)
        assert self.finish(120) == 130, self.text()

    def left(self) -> list[int]:
        return marked("SCALERL_DIR", str(self.directory))

    def running(self, part: bytes) -> list[int]:
        """Pids of the run's own whose command line has ``part``, and of none of those that wait for another to end."""
        found = []
        for pid in self.left():
            with suppress(OSError):  # it has ended since
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if part in command and b"subreaper" not in command:
                    found.append(pid)
        return found

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())


@contextmanager
def shell(tmp: Path, *arguments: str, spec: dict[str, Any] | None = None, **options: Any) -> Iterator[Shell]:
    started = Shell(tmp, *(arguments or ("--dir", str(tmp / "run"))), spec=spec or {}, **options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        kill_marked("SCALERL_DIR", str(started.directory))


def test_run_to_its_budget_exits_0(tmp_path: Path) -> None:
    with shell(tmp_path, SMALL_COORDINATOR="curve") as run:
        assert run.finish() == 0, run.text()
        assert run.left() == []
    summary = run.summary()
    assert summary["stop_reason"] == "maxSteps"
    assert summary["steps"] == 60
    assert summary["first_reward"] == 0.3
    assert summary["last_reward"] == pytest.approx(0.42)
    assert summary["counts"]["acknowledged"] == 240
    assert summary["startup"]["first_lease_seconds"] > 0
    assert "prepare" in summary["startup"]["ready_seconds"]
    text = run.text()
    assert (run.directory / "curve.png").exists(), text
    assert (run.directory / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert summary["peak_memory_bytes"] > 10 << 20
    assert "small in run\n" in text
    assert "ended by" in text
    assert "maxSteps" in text
    assert "0.420 ± 0.039" in text
    assert "evaluation: reward 0.300 ± 0.039 at v0" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_drains_and_run_resumes(tmp_path: Path, number: signal.Signals) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}) as run:
        run.until(lambda: run.step() > 5)
        run.process.send_signal(number)
        assert run.finish() == 130, run.text()
        assert run.left() == []
    assert run.summary()["stop_reason"] == "interrupted"
    assert (run.directory / "checkpoints" / "last").read_text() == "whole"
    assert "--resume" in run.text()
    run.forget_end()
    before = run.step()
    arguments = ("--resume", "--dir", str(run.directory))
    with shell(tmp_path, *arguments, spec={"budget": {"maxSteps": before + 20}}) as again:
        assert again.finish() == 0, again.text()
    assert again.summary()["steps"] == before + 20
    assert again.summary()["stop_reason"] == "maxSteps"
    assert "run: resumed after: interrupted" in again.text()
    assert f"edited: spec.budget.maxSteps: 100000 → {before + 20}" in again.text()


def test_second_interrupt_ends_everything_now(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}, SMALL_TRAINER="stubborn") as run:
        run.until(lambda: run.step() > 2)
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "SIGINT" in run.text())
        time.sleep(0.3)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130
        assert run.left() == []


def test_interrupt_before_the_first_lease_ends_at_once(tmp_path: Path) -> None:
    with shell(tmp_path, SMALL_PREPARE="slow") as run:
        run.until(lambda: run.left())
        time.sleep(0.3)
        run.process.send_signal(signal.SIGINT)
        assert run.finish(120) == 130
        assert run.left() == []


@pytest.mark.parametrize("generators", ["", "holds-weights"])
def test_interrupt_in_mid_training_ends_it_once(tmp_path: Path, generators: str) -> None:
    """The trainer saves its state and exits with 0, without the end of the run; it is not restarted."""
    roles = {"SMALL_TRAINER": "mid-training", "SMALL_COORDINATOR": generators}
    with shell(tmp_path, **roles) as run:
        run.until((run.directory / "mid-training").exists)
        reports = (
            run.directory / "unseen.csv"
        )  # written for each report: the second is asked for after the first is read
        run.until(reports.exists)
        first = reports.stat().st_mtime_ns
        run.until(lambda: reports.stat().st_mtime_ns != first)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.text()
        assert run.left() == []
    assert (run.directory / "saved").read_text() == "saved\n"
    summary = run.summary()
    assert summary["restarts"] == {}
    assert (summary["startup"]["first_lease_seconds"] is None) is not bool(generators)


def test_lost_terminal_drains_the_run(tmp_path: Path) -> None:
    """An ssh connection that breaks: SIGHUP, and every write to the terminal fails from then on."""
    ours, theirs = os.openpty()
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}, terminal=theirs) as run:
        os.close(theirs)
        reader = os.dup(ours)
        flags = fcntl.fcntl(reader, fcntl.F_GETFL)
        fcntl.fcntl(reader, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        shown = b""

        def is_at_work() -> bool:
            nonlocal shown
            with suppress(BlockingIOError):
                shown += os.read(reader, 65536)
            return run.step() > 5 and b"roles" in shown

        run.until(is_at_work)
        os.close(reader)
        os.close(ours)
        assert run.finish() == 130
        assert run.left() == []
    assert run.summary()["stop_reason"] == "interrupted"
    assert (run.directory / "checkpoints" / "last").read_text() == "whole"


def test_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    """``scalerl run FILE | head``"""
    ours, theirs = os.pipe()
    with shell(tmp_path, spec={"budget": {"maxSteps": 100}}, output=theirs) as run:
        os.close(theirs)
        assert os.read(ours, 5) == b"small"
        os.close(ours)
        assert run.finish() == 0, run.text()
    assert run.text() == ""
    assert run.summary()["steps"] == 100
    assert (run.directory / "checkpoints" / "last").read_text() == "whole"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signal_ignored_at_the_start_stays_ignored(tmp_path: Path, number: signal.Signals) -> None:
    """``nohup scalerl run FILE &`` and a logout."""
    with shell(tmp_path, spec={"budget": {"maxSteps": 100}}, ignored=(number,)) as run:
        run.until(lambda: run.step() > 5)
        run.process.send_signal(number)
        assert run.finish() == 0, run.text()
    assert run.summary()["stop_reason"] == "maxSteps"


def test_kill_9_of_command_leaves_no_process_and_resume_continues(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}) as run:
        run.until(lambda: run.step() > 5)
        run.process.kill()
        run.process.wait()
        # At once: resume itself waits until the old run's processes have left.
        arguments = ("--resume", "--dir", str(run.directory))
        with shell(tmp_path, *arguments, spec={"budget": {"maxSteps": run.step() + 20}}) as again:
            assert again.finish() == 0, again.text()
    assert again.left() == []


def test_bad_input_found_by_prepare_exits_2_and_leaves_nothing(tmp_path: Path) -> None:
    with shell(tmp_path, SMALL_PREPARE="bad-input") as run:
        assert run.finish() == 2
    assert "spec.model.hub.name: no such model; check the name" in run.text()
    assert not run.directory.exists()
    assert run.text().count("| first line") == 30  # all of a log that is removed
    assert "whole log" not in run.text()


def test_edit_with_which_the_run_does_not_start_is_named(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 5}}) as run:
        assert run.finish() == 0, run.text()
    resumed = ("--resume", "--dir", str(run.directory))
    with shell(tmp_path, *resumed, spec={"budget": {"maxSteps": 9}}, SMALL_PREPARE="bad-input") as edited:
        assert edited.finish() == 2
    assert "no such model; check the name; revert or fix the edit of spec.budget.maxSteps\n" in edited.text()
    assert (run.directory / "checkpoints/last").exists()


def test_failed_role_exits_1_with_its_last_lines(tmp_path: Path) -> None:
    policy = "scalerl_lifecycle.restarts"
    quick = f"import {policy} as f; f.RestartPolicy.__init__.__defaults__ = (.01, .02, 600., 2, 20, .02)"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif 'run' in sys.argv[1:2]:\n    {quick}\n")
    with shell(tmp_path, SMALL_PREPARE="crash", PYTHONPATH=str(tmp_path)) as run:
        assert run.finish() == 1, run.text()
    text = run.text()
    assert (
        "prepare failed: prepare exited with code 1 before it was ready; it failed 3 times in a row" in text
    )
    assert "  | line 49" in text
    assert "  | line 29\n" not in text
    assert "logs/prepare.log" in text


def test_non_fatal_problems_are_reported(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 60}}, SMALL_TRAINER="full-disk") as run:
        assert run.finish() == 0, run.text()
    text, summary = run.text(), run.summary()
    assert (summary["checkpoint_failures"], summary["grading_errors"]) == (3, 60)
    assert "! run: a checkpoint could not be written (" in text
    assert 1 <= text.count("! run: a checkpoint could not be written") <= 3
    assert 1 <= text.count("! run: the verifier failed on a completion") <= 6  # not for each of 60
    assert "checkpoints not written" in text


def test_run_that_learns_nothing_says_so_when_that_begins(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 39}}, SMALL_TRAINER="flat") as run:
        assert run.finish() == 0, run.text()
    assert run.text().count("! run: nothing is learned\n") == 1


UTF8_OFF = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_run_in_a_directory_with_any_name_in_any_locale(tmp_path: Path) -> None:
    """The names of files are UTF-8 whatever the locale; the roles inherit that."""
    folder = tmp_path / "läufe 試"
    folder.mkdir()
    (folder / "dätei.jsonl").write_text(
        '{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?", "answer": "3"}\n'
    )
    task = {"jsonl": {"path": "dätei.jsonl"}, "verifier": {"name": "exact"}, "heldOut": {"size": 1}}
    with shell(folder, spec={"task": task, "budget": {"maxSteps": 5}}, **UTF8_OFF) as run:
        assert run.finish() == 0, run.text()
    assert "Traceback" not in run.text()
    assert run.summary()["steps"] == 5


@pytest.mark.parametrize("locale", [UTF8_OFF, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}])
def test_paths_with_any_name_are_validated_in_any_locale(tmp_path: Path, locale: dict[str, str]) -> None:
    folder = tmp_path / "dür"
    folder.mkdir()
    (folder / "dätei.jsonl").write_text(
        '{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?", "answer": " "}\n'
    )
    task = {"jsonl": {"path": "dätei.jsonl"}, "verifier": {"name": "exact"}, "heldOut": {"size": 1}}
    manifest = RUN | {"spec": RUN["spec"] | {"task": task}}
    (folder / "rün.yaml").write_text(yaml.safe_dump(manifest, allow_unicode=True))
    command = [sys.executable, "-m", "scalerl_cli.main", "validate", "--any-machine", "dür/rün.yaml"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    done = subprocess.run(command, cwd=tmp_path, env=environment | locale, capture_output=True, timeout=120)
    text = done.stderr.decode()
    assert done.returncode == 2
    assert (
        f"dür/rün.yaml: spec.task.jsonl.path: {folder}/dätei.jsonl, line 2, field 'answer': is empty" in text
    )
    assert "Traceback" not in text


def test_budget_of_seconds_stops_the_run(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSeconds": 1}}) as run:
        assert run.finish() == 0, run.text()
    assert run.summary()["stop_reason"] == "maxSeconds"


def test_killed_coordinator_comes_back_on_its_port(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}) as run:
        run.until(lambda: run.step() > 5)
        (pid,) = run.running(b".py\0coordinator\0")
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: "coordinator-0 was killed" in run.text())
        before = run.step()
        run.until(lambda: run.step() > before + 5)
        run.interrupt()
    assert (run.directory / "checkpoints" / "last").read_text() == "whole"
    assert run.summary()["restarts"] == {"coordinator-0": 1}
    assert "coordinator-0 was killed by SIGKILL" in run.text()


def test_used_or_nonempty_directory_is_refused(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}) as run:
        run.until(lambda: run.step() > 1)
        with shell(tmp_path, "--resume", "--dir", str(run.directory)) as second:
            assert second.finish() == 2
        assert f"in use by process {run.process.pid}" in second.text()
        with shell(tmp_path) as third:
            assert third.finish() == 2
        assert "not empty; add --resume" in third.text()


def test_run_whose_directory_is_moved_ends_and_continues_where_it_is(tmp_path: Path) -> None:
    """Its processes know the directory by its path, where another run may begin."""
    with shell(tmp_path, spec={"budget": {"maxSteps": 100_000}}) as run:
        run.until(lambda: run.step() > 5)
        run.directory.rename(tmp_path / "moved")
        assert run.finish() == 1
        assert "run: moved, replaced or removed while the run used it" in run.text()
        assert "Traceback" not in run.text()
        assert not run.left()
    assert not run.directory.exists()
    step = int((tmp_path / "moved/step").read_text())
    with shell(
        tmp_path, "--resume", "--dir", str(tmp_path / "moved"), spec={"budget": {"maxSteps": step + 5}}
    ) as again:
        assert again.finish() == 0, again.text()


def test_summary_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    with shell(tmp_path, spec={"budget": {"maxSteps": 30}}) as run:
        run.until(lambda: run.step() > 1)
        (run.directory / "summary.json").mkdir()
        assert run.finish() == 0, run.text()
    assert "run/summary.json: Is a directory" in run.text()
    assert "ended by                   maxSteps" in run.text()
    assert "Traceback" not in run.text()


def test_default_directories_are_numbered_and_resume_takes_the_newest(tmp_path: Path) -> None:
    for n in (1, 2):
        with shell(tmp_path, "--pin", "trainer=0", spec={"budget": {"maxSteps": 5}}) as run:
            assert run.finish() == 0, run.text()
        assert f"small in runs/small-{n}\n" in run.text()
    with shell(tmp_path, "--resume", spec={"budget": {"maxSteps": 5}, "seed": 1}) as again:
        assert again.finish() == 2
    assert "runs/small-2: cannot resume with a changed spec:\n  spec.seed: 0 → 1" in again.text()


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("trainer", "write ROLE=CPUS like trainer=0,1; roles: prepare, forecaster, coordinator"),
        ("nobody=1", "write ROLE=CPUS"),
        ("trainer=x", "write ROLE=CPUS"),
        ("trainer=-1", "no CPU -1 for this command; there are "),
        ("trainer=0,99999", "no CPU 99999 for this command; there are "),
    ],
)
def test_bad_pin_is_refused(tmp_path: Path, pin: str, words: str) -> None:
    with shell(tmp_path, "--pin", pin) as run:
        assert run.finish() == 2
    assert f"--pin {pin}: {words}" in run.text()
    assert not run.directory.exists()
