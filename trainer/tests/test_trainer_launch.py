"""The launcher with real child processes: exit codes, signals, output, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scalerl_trainer import launch

RANKS = {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "3", "SCALERL_NAME": "pod"}
SHORT = 1.0
"""``END_SECONDS`` where it passes; elsewhere it is as long as a slow machine may take."""
WAIT = 120.0
"""For what ends with its event. A rank that hangs does so for much longer."""
PRELUDE = f"""
import os, signal, sys, time
from pathlib import Path
local = int(os.environ["LOCAL_RANK"])
def started():
    Path(f"new-{{local}}").write_text(str(os.getpid()))
    Path(f"new-{{local}}").rename(f"started-{{local}}")
def hang(): started(); time.sleep({10 * WAIT})
def all_started():
    while not all(Path(f"started-{{i}}").exists() for i in range(3)): time.sleep(0.01)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_started(directory: Path) -> list[int]:
    """Process ids of the ranks, once all have marked that they run."""
    files = [directory / f"started-{local}" for local in range(3)]
    deadline = time.monotonic() + WAIT
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "not all ranks started"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + WAIT
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)


@contextmanager
def launched(
    directory: Path, code: str, end_seconds: float = WAIT, before: str = "", **environ: str
) -> Iterator[subprocess.Popen[str]]:
    start = f"{before}import sys; from scalerl_trainer import launch; launch.END_SECONDS = {end_seconds}; sys.exit(launch.main())"
    command = [sys.executable, "-c", start, sys.executable, "-c", PRELUDE + code]
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **RANKS, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        for file in directory.glob("started-*"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        process.communicate()


def outcome(directory: Path, code: str, end_seconds: float = WAIT, **environ: str) -> tuple[int, list[str]]:
    """Exit code and lines of a launcher that ends by itself."""
    with launched(directory, code, end_seconds, **environ) as process:
        _, text = process.communicate(timeout=WAIT)
        return process.returncode, text.splitlines()


def test_launch_gives_each_rank_its_number_name_and_threads(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "SCALERL_NAME", "WORLD_SIZE", "OMP_NUM_THREADS")
    code, lines = outcome(
        tmp_path, f"print(*(os.environ[n] for n in {names}))", WORLD_SIZE="6", OMP_NUM_THREADS="7"
    )
    assert code == 0
    assert sorted(lines) == [f"[rank {3 + i}] {3 + i} {i} trainer-{3 + i} 6 7" for i in range(3)]


def test_launch_divides_the_cores_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 7.5)
    environments = launch.rank_environments(RANKS)
    assert {each["OMP_NUM_THREADS"] for each in environments.values()} == {"2"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64.0),
        ({"cpu.max": "max 100000\n"}, 64.0),
        ({"cpu.max": "750000 100000\n"}, 7.5),
        ({"cpu.max": "9600000 100000\n"}, 64.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64.0),
        ({"cpu/cpu.cfs_quota_us": "750000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 7.5),
    ],
)
def test_usable_cores_honours_the_cpu_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert launch.usable_cores(tmp_path) == cores


def test_launch_waits_for_all_ranks_that_succeed(tmp_path: Path) -> None:
    """A rank that has finished does not end the others."""
    code, lines = outcome(tmp_path, "time.sleep(0.3 * local); print('done', flush=True)")
    assert (code, sorted(lines)) == (0, [f"[rank {rank}] done" for rank in (3, 4, 5)])


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("sys.exit(2)", 2, "rank 4 exited with code 2: model: no such file"),
        ("sys.exit(3)", 3, "rank 4 exited with code 3: model: no such file"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 4 was killed by SIGKILL after printing: model: no such file",
        ),
        (
            "os.kill(os.getpid(), signal.SIGRTMIN + 6)",
            128 + signal.SIGRTMIN + 6,
            f"rank 4 was killed by signal {signal.SIGRTMIN + 6} after printing: model: no such file",
        ),
        (
            "print('x' * 100_000, flush=True); sys.exit(1)",
            1,
            f"rank 4 exited with code 1: {'x' * launch.QUOTED_CHARACTERS}",
        ),
        (  # the end of a line that was passed on in pieces
            "print('x' * 100_000, end='', flush=True); time.sleep(1); print('end', flush=True); sys.exit(1)",
            1,
            f"rank 4 exited with code 1: {'x' * launch.QUOTED_CHARACTERS}",
        ),
    ],
)
def test_launch_exits_as_the_rank_that_failed_first(
    tmp_path: Path, failure: str, code: int, message: str
) -> None:
    """The others fail in turn with another code and print more; the last line is of the first."""
    body = f"""
def peer_lost(*_): print("peer lost", flush=True); sys.exit(1)
signal.signal(signal.SIGTERM, peer_lost)
started()
all_started()
if local == 1:
    print("2026-01-01 00:00:00,000 ERROR scalerl_trainer.main model: no such file", flush=True)
    {failure}
time.sleep({WAIT})
"""
    got, lines = outcome(tmp_path, body)
    assert got == code
    assert lines[-1].split(" ", 4)[2:] == ["ERROR", "scalerl_trainer.launch", message]
    assert len(lines[-1]) < 2048, "the kubelet keeps no more"
    assert {"[rank 3] peer lost", "[rank 5] peer lost"} <= set(lines)


def test_launch_kills_ranks_that_ignore_sigterm_after_a_failure(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if local == 1: started(); all_started(); sys.exit(3)
hang()
"""
    began = time.monotonic()
    code, lines = outcome(tmp_path, body, SHORT)
    assert (code, lines[-1].rpartition(" rank ")[2]) == (3, "4 exited with code 3: no output")
    assert time.monotonic() - began >= SHORT
    until_gone(until_started(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launch_passes_signals_on_and_waits_for_the_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Longer than the launcher waits after a failure: the grace period is the kubelet's."""
    body = f"""
def save(*_):
    time.sleep({SHORT + 1} if local == 2 else 0)
    Path(f"saved-{{local}}").touch()
    sys.exit(0)
signal.signal({int(number)}, save)
hang()
"""
    with launched(tmp_path, body, SHORT) as process:
        until_started(tmp_path)
        process.send_signal(number)
        assert process.wait(WAIT) == 0
    assert sorted(file.name for file in tmp_path.glob("saved-*")) == [f"saved-{i}" for i in range(3)]


def test_launch_lets_the_others_save_when_a_rank_fails_during_a_drain(tmp_path: Path) -> None:
    body = f"""
def save(*_):
    if local == 1: sys.exit(1)
    time.sleep({SHORT + 1})
    Path(f"saved-{{local}}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
hang()
"""
    with launched(tmp_path, body, SHORT) as process:
        until_started(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 1
    assert sorted(file.name for file in tmp_path.glob("saved-*")) == ["saved-0", "saved-2"]


def test_launch_leaves_no_rank_when_it_is_killed(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()"
    with launched(tmp_path, body) as process:
        pids = until_started(tmp_path)
        process.kill()
        process.wait()
        until_gone(pids)


def test_launch_does_not_wait_for_a_process_that_holds_the_pipe(tmp_path: Path) -> None:
    """A rank that succeeds leaves a process behind."""
    body = """
if local == 0 and os.fork() == 0: hang()
while not Path("started-0").exists(): time.sleep(0.01)
"""
    with launched(tmp_path, body, SHORT) as process:
        code = process.wait(WAIT)
        assert (code, alive(int((tmp_path / "started-0").read_text()))) == (0, True)


def test_launch_reads_the_output_although_its_log_is_full(tmp_path: Path) -> None:
    code = "import sys; from scalerl_trainer import launch; sys.exit(launch.main())"
    rank = "for _ in range(4_000): print(50 * 'x')"  # more than a pipe holds
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, sys.executable, "-c", rank],
            env={**os.environ, **RANKS},
            stderr=full,
            timeout=WAIT,
            check=False,
        )
    assert done.returncode == 0


def test_launch_reaps_what_a_rank_leaves_behind(tmp_path: Path) -> None:
    """The launcher is the process that adopts orphans, as process 1 of a container is."""
    body = """
if local == 1 and os.fork() == 0:
    while os.getppid() != int(os.environ["LAUNCHER"]): time.sleep(0.01)
    started(); os._exit(0)
if local == 1: os._exit(0)
hang()
"""
    adopt = "import ctypes, os; ctypes.CDLL(None).prctl(36, 1); os.environ['LAUNCHER'] = str(os.getpid()); "
    with launched(tmp_path, body, before=adopt):
        orphan = until_started(tmp_path)[1]
        deadline = time.monotonic() + WAIT
        while Path(f"/proc/{orphan}").exists():
            assert time.monotonic() < deadline, "the orphan is a zombie"
            time.sleep(0.01)


def test_launch_keeps_a_signal_that_comes_during_its_imports(tmp_path: Path) -> None:
    """The launcher ends as if by the signal, by itself: process 1 cannot be ended by a signal that it does not handle."""
    code = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "scalerl_api": os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
runpy.run_module("scalerl_trainer.launch", run_name="__main__", alter_sys=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-c", "open('rank', 'w')"],
        cwd=tmp_path,
        env={**os.environ, **RANKS},
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (run.returncode, (tmp_path / "rank").exists()) == (128 + signal.SIGTERM, False)
    assert "got SIGTERM before the ranks were started" in run.stderr


@pytest.mark.parametrize(
    ("environ", "argv", "message"),
    [
        ({"NODE_RANK": ""}, ["true"], "NODE_RANK and LOCAL_WORLD_SIZE must be set to integers"),
        ({"NODE_RANK": "-1"}, ["true"], "NODE_RANK -1 must be at least 0"),
        ({"LOCAL_WORLD_SIZE": "0"}, ["true"], "LOCAL_WORLD_SIZE 0 at least 1"),
        ({}, [], "no command: python -m scalerl_trainer.launch COMMAND..."),
    ],
)
def test_launch_refuses_a_pod_without_its_variables(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    argv: list[str],
    message: str,
) -> None:
    for name, value in {**RANKS, **environ}.items():
        monkeypatch.setenv(name, value)
    assert launch.main(argv) == 2
    assert message in caplog.text
