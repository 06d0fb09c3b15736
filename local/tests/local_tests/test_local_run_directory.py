from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from minimal_run import run_spec
from small_processes import is_running, script, wait_until

from scalerl_api.load import load_run
from scalerl_local.run_directory import (
    DirectoryProblem,
    RunDirectory,
    latest_directory,
    next_directory,
)
from scalerl_local.status_file import StatusFile
from scalerl_processes.process_table import kill_marked, marked


def test_create_writes_the_files_of_the_roles(tmp_path: Path) -> None:
    run = run_spec()
    directory = RunDirectory.create(tmp_path / "deep" / "run", run)
    assert load_run(directory.paths.run_file) == run
    assert "promptsPerStep: 48" in directory.paths.run_file.read_text()  # defaults written out
    assert stat.S_IMODE(directory.paths.token.stat().st_mode) == 0o600
    assert len(directory.token) >= 32
    assert directory.paths.logs.is_dir()
    assert directory.paths.root.is_absolute()
    directory.release()


def test_create_refuses_a_directory_with_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DirectoryProblem, match=r"not empty; add --resume .* or give another --dir"):
        RunDirectory.create(tmp_path, run_spec())
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_create_on_a_full_volume_leaves_nothing(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
    try:
        with pytest.raises(DirectoryProblem, match="give a --dir that can be written"):
            RunDirectory.create(tmp_path / "run", run_spec())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (tmp_path / "run").exists()
    RunDirectory.create(tmp_path / "run", run_spec()).release()


def test_create_names_a_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryProblem, match="file"):
        RunDirectory.create(tmp_path / "file", run_spec())


def test_resume_refuses_a_locked_directory(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run", run_spec())
    with pytest.raises(DirectoryProblem, match=f"in use by process {os.getpid()}"):
        RunDirectory.resume(tmp_path / "run", run_spec())
    first.release()
    second = RunDirectory.resume(tmp_path / "run", run_spec())
    assert second.token
    second.release()


def test_resume_keeps_the_token_and_applies_a_new_budget(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run", run_spec())
    token = first.token
    first.release()
    again = RunDirectory.resume(tmp_path / "run", run_spec(budget={"maxSteps": 99}))
    assert again.token == token
    assert load_run(again.paths.run_file).spec.budget.max_steps == 99
    again.release()


def test_resume_refuses_a_changed_spec_and_names_the_fields(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", run_spec()).release()
    before = (tmp_path / "run" / "run.yaml").read_text()
    with pytest.raises(DirectoryProblem) as problem:
        RunDirectory.resume(tmp_path / "run", run_spec(seed=5, budget={"maxSteps": 9}))
    assert "spec.seed: 0 → 5" in str(problem.value)
    assert "maxSteps" not in str(problem.value)
    assert "the seed cannot change" in str(problem.value)
    assert "undo the change, or start a new run with another --dir" in str(problem.value)
    assert (tmp_path / "run" / "run.yaml").read_text() == before


def test_resume_ignores_fields_that_are_no_more(tmp_path: Path) -> None:
    """Also of a section that a started run cannot change: an earlier release wrote all defaults into the file."""
    RunDirectory.create(tmp_path / "run", run_spec()).release()
    file = tmp_path / "run" / "run.yaml"
    manifest = yaml.safe_load(file.read_text())
    manifest["spec"]["task"]["heldOut"]["seed"] = 0
    manifest["spec"]["generator"]["leaseSeconds"] = 1800
    file.write_text(yaml.safe_dump(manifest))
    RunDirectory.resume(tmp_path / "run", run_spec()).release()
    assert "seed" not in load_run(file).to_manifest()["spec"]["task"]["heldOut"]
    file.write_text("spec: 3\n")
    with pytest.raises(DirectoryProblem, match="start a new run with another --dir"):
        RunDirectory.resume(tmp_path / "run", run_spec())


def test_resume_refuses_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DirectoryProblem, match="no run to resume there"):
        RunDirectory.resume(tmp_path / "run", run_spec())


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"phase": "Running", "trainer": {"attempt": 3, "nextAttemptTime": "soon"}}']
)
def test_status_that_cannot_be_read_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(DirectoryProblem, match=r"status\.json: .*remove it, and the run continues"):
        StatusFile(tmp_path / "status.json", run_spec())


def test_next_and_latest_directory_number_the_runs(tmp_path: Path) -> None:
    with pytest.raises(DirectoryProblem, match="no run to resume"):
        latest_directory(tmp_path, "a")
    for name in ("a-1", "a-10", "a-x", "b-77", "a-2"):
        (tmp_path / name).mkdir()
    assert next_directory(tmp_path, "a").name == "a-11"
    assert latest_directory(tmp_path, "a").name == "a-10"


HOLDER = """
    import asyncio, sys
    from pathlib import Path
    from minimal_run import run_spec
    from scalerl_local.run_directory import RunDirectory
    from scalerl_processes.child import ChildProcess, Command, environment

    async def main():
        directory = RunDirectory.create(Path(sys.argv[1]), run_spec())
        env = environment() | {"SCALERL_DIR": str(directory.paths.root)}
        child = ChildProcess.start(Command(
            ["python", "-S", "-c", sys.argv[2]], env, directory.paths.logs / "x.log", "lock-test",
            orphan_grace_seconds=float(sys.argv[3]), pass_fds=(directory.lock_fd,)))
        await child.wait()

    asyncio.run(main())
"""


CHILD = """
import os, signal, subprocess, sys, time
def leave(*_):
    time.sleep(.5); open(os.environ["SCALERL_DIR"] + "/left-in-order", "w"); sys.exit(0)
signal.signal(15, {on_term})
{before}
open(os.environ["SCALERL_DIR"] + "/up", "w")
time.sleep(600)
"""
HIDDEN = """
hidden = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={})
open(os.environ["SCALERL_DIR"] + "/pid", "w").write(str(hidden.pid))
"""
STUBBORN = CHILD.format(on_term="signal.SIG_IGN", before="")
ORDERLY = CHILD.format(on_term="leave", before="")
HIDING = CHILD.format(on_term="signal.SIG_IGN", before=HIDDEN)


@contextmanager
def killed_run(tmp: Path, child: str, grace: float) -> Iterator[tuple[Path, list[int]]]:
    """The directory of a run whose runtime was just killed with SIGKILL, and its processes: subreaper and child."""
    root = tmp / "run"
    holder = subprocess.Popen(
        [sys.executable, script(tmp, "holder", HOLDER), str(root), child, str(grace)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_until((root / "up").exists)
        left = marked("SCALERL_DIR", str(root))
        assert len(left) == 2
        holder.kill()
        holder.wait()
        yield root, left
    finally:
        holder.kill()
        kill_marked("SCALERL_DIR", str(root))


@pytest.mark.parametrize("also_subreaper", [False, True])
def test_resume_after_kill_9_waits_for_the_old_processes(tmp_path: Path, also_subreaper: bool) -> None:
    with killed_run(tmp_path, STUBBORN, 600.0 if also_subreaper else 1.0) as (root, left):
        if also_subreaper:
            subreaper = next(p for p in left if b"subreaper.py" in Path(f"/proc/{p}/cmdline").read_bytes())
            os.kill(subreaper, signal.SIGKILL)
        directory = RunDirectory.resume(root, run_spec())
        assert marked("SCALERL_DIR", str(root)) == []
        directory.release()


def test_resume_kills_a_process_that_hides_its_environment(tmp_path: Path) -> None:
    """Runtime and subreapers killed -9; what is left is an engine that shows no environment."""
    with killed_run(tmp_path, HIDING, 600.0) as (root, left):
        hidden = int((root / "pid").read_text())
        for pid in left:
            with suppress(ProcessLookupError):  # a child ends with its subreaper
                os.kill(pid, signal.SIGKILL)
        assert is_running(hidden)
        RunDirectory.resume(root, run_spec()).release()
        assert not is_running(hidden)


def test_resume_lets_the_old_run_end_in_order(tmp_path: Path) -> None:
    with killed_run(tmp_path, ORDERLY, 600.0) as (root, _):
        directory = RunDirectory.resume(root, run_spec())
        assert (root / "left-in-order").exists()
        directory.release()


def test_resume_names_a_removed_field_that_chose_other_data(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", run_spec()).release()
    file = tmp_path / "run" / "run.yaml"
    manifest = yaml.safe_load(file.read_text())
    for seed, refused in ((7, True), (0, False)):
        manifest["spec"]["task"]["heldOut"]["seed"] = seed
        file.write_text(yaml.safe_dump(manifest))
        if refused:
            with pytest.raises(
                DirectoryProblem, match=r"spec\.task\.heldOut\.seed: is 7, .*finish it with the release"
            ):
                RunDirectory.resume(tmp_path / "run", run_spec())
        else:
            RunDirectory.resume(tmp_path / "run", run_spec()).release()
