"""Subreapers: no process is left, whichever of parent, subreaper and child is killed, even if all ignore SIGTERM."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_processes import (
    HIDDEN_GRANDCHILD,
    STUBBORN_FAMILY,
    eventually,
    is_running,
    left_of,
    script,
    wait_until,
)

from scalerl_processes import subreaper
from scalerl_processes.child import MARK, MAX_LOG_BYTES, ChildProcess, Command, environment
from scalerl_processes.process_table import kill_all, kill_marked, tree_memory_bytes, writing_to

PARENT = """
    import asyncio, sys
    from pathlib import Path
    from scalerl_processes.child import ChildProcess, Command, environment

    async def main():
        process = ChildProcess.start(Command(
            ["python", "-S", *sys.argv[3:]], environment(), Path(sys.argv[1]), sys.argv[2],
            orphan_grace_seconds=0.3))
        await process.wait()

    asyncio.run(main())
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark of this test alone; its processes are killed at the end."""
    name = f"subreaper-test{tmp_path}"
    yield name
    kill_marked(MARK, name)


def command(tmp: Path, mark: str, *argv: str, **options: object) -> Command:
    return Command(argv, environment(), tmp / "child.log", mark, **options)  # type: ignore[arg-type]


def process_of(mark: str, script: str) -> int:
    """Pid of the marked process that runs this script."""
    return next(p for p in left_of(mark) if script_of(p) == script)


def script_of(pid: int) -> str:
    """Name of the first Python file in the command line; a subreaper's has its child's too."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((Path(word).name for word in words if word.endswith(".py")), "")


async def exit_code(started: Command) -> int:
    return await asyncio.wait_for(ChildProcess.start(started).wait(), 120)


def test_subreaper_kills_the_tree_after_kill_9_of_the_parent(tmp_path: Path, mark: str) -> None:
    family, up = script(tmp_path, "family", STUBBORN_FAMILY), tmp_path / "up"
    parent = subprocess.Popen(
        [sys.executable, script(tmp_path, "parent", PARENT), str(tmp_path / "log"), mark, family, str(up)]
    )
    wait_until(up.exists)
    wait_until(lambda: len(left_of(mark)) == 4)  # subreaper, child, two grandchildren
    parent.kill()
    parent.wait()
    wait_until(lambda: not left_of(mark), 120)


@pytest.mark.parametrize("victim", ["child", "subreaper"])
async def test_kill_9_of_child_or_subreaper_kills_the_grandchildren(
    tmp_path: Path, mark: str, victim: str
) -> None:
    up = tmp_path / "up"
    process = ChildProcess.start(
        command(tmp_path, mark, "python", "-S", script(tmp_path, "family", STUBBORN_FAMILY), str(up))
    )
    await eventually(up.exists)
    os.kill(process_of(mark, "subreaper.py" if victim == "subreaper" else "family.py"), signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert left_of(mark) == []


async def test_subreaper_kill_9_kills_a_grandchild_without_environment(tmp_path: Path, mark: str) -> None:
    note = tmp_path / "pid"
    hidden = script(tmp_path, "hidden", HIDDEN_GRANDCHILD)
    process = ChildProcess.start(command(tmp_path, mark, "python", "-S", hidden, str(note)))
    await eventually(lambda: note.exists() and note.read_text())
    grandchild = int(note.read_text())
    assert grandchild not in left_of(mark)
    os.kill(process_of(mark, "subreaper.py"), signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert not is_running(grandchild)


def test_writing_to_finds_writers_except_ancestors(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from scalerl_processes.process_table import writing_to;"
        "folder = Path(sys.argv[1]); print(os.getppid() in writing_to(folder), file=sys.stderr)"
    )
    shell = ["sh", "-c", '"$@" 2>"$0"; sleep 600', str(tmp_path / "answer"), sys.executable, "-c", code]
    with log.open("w") as sink, subprocess.Popen([*shell, str(log.parent)], stdout=sink) as writer:
        try:
            wait_until(lambda: (tmp_path / "answer").exists() and (tmp_path / "answer").read_text())
            for where in (log, log.parent):
                assert writer.pid in writing_to(where)
            assert writing_to(tmp_path / "other") == []
            # Once the one that answered, into a file of this folder, is gone.
            wait_until(lambda: writing_to(tmp_path) == [])
        finally:
            for pid in writing_to(log):
                os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "answer").read_text() == "False\n"


async def test_stop_kills_after_the_grace(tmp_path: Path, mark: str) -> None:
    up = tmp_path / "up"
    process = ChildProcess.start(
        command(
            tmp_path,
            mark,
            "python",
            "-S",
            script(tmp_path, "family", STUBBORN_FAMILY),
            str(up),
            grace_seconds=0.5,
        )
    )
    await eventually(lambda: up.exists())
    began = time.monotonic()
    process.stop()
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.5
    assert left_of(mark) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(2)", 2),
        ("raise SystemExit(77)", 77),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
async def test_subreaper_ends_as_its_child(tmp_path: Path, mark: str, code: str, expected: int) -> None:
    assert await exit_code(command(tmp_path, mark, "python", "-S", "-c", code)) == expected


async def test_subreaper_logs_a_missing_command(tmp_path: Path, mark: str) -> None:
    assert await exit_code(command(tmp_path, mark, "/no/such/command")) == 127
    assert "cannot start /no/such/command: No such file or directory" in (tmp_path / "child.log").read_text()


def test_subreaper_keeps_the_exit_code_when_its_log_is_full(tmp_path: Path) -> None:
    lifeline, _ = pipe = os.pipe()
    started = [sys.executable, "-I", "-S", subreaper.__file__, str(lifeline), "1", "1", "-", "--"]
    try:
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*started, "/no/such/command"], stderr=full, pass_fds=[lifeline], timeout=120, check=False
            )
    finally:
        for end in pipe:
            os.close(end)
    assert done.returncode == 127


MISSED = """
    # A sweep whose first listing of /proc misses a grandchild that has just become a child.
    import os, sys, time
    from scalerl_processes import subreaper
    from scalerl_processes.kernel import adopt_orphans, has_children

    adopt_orphans()
    listed = subreaper.descendants
    answers = iter([[]])
    subreaper.descendants = lambda root: next(answers, None) or listed(root)
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is None:
        pass
    print(subreaper._kill_tree(child), has_children())
"""


def test_sweep_finds_what_one_listing_misses(tmp_path: Path) -> None:
    missed = subprocess.run(
        [sys.executable, script(tmp_path, "missed", MISSED)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert missed.stdout == "7 False\n"


def test_standstill_of_the_machine_is_no_limit_of_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, killed = itertools.count(0.0, 1000.0), list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert kill_all(lambda: [] if killed else [2], 10.0) == []


def test_kill_all_goes_on_after_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        killed.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    assert kill_all(lambda: [1, 2] if not killed else [1], 0.05) == [1]
    assert killed == [2]


async def test_start_renames_a_long_log(tmp_path: Path, mark: str) -> None:
    log, aside = tmp_path / "child.log", tmp_path / "child.log.1"
    aside.write_text("older")
    log.write_text("old")
    started = command(tmp_path, mark, "python", "-S", "-c", "print('new')")
    assert await exit_code(started) == 0
    assert log.read_text().startswith("old--- ")
    assert aside.read_text() == "older"
    os.truncate(log, MAX_LOG_BYTES + 1)  # sparse
    assert await exit_code(started) == 0
    assert log.read_text().splitlines()[1:] == ["new"]
    assert aside.stat().st_size == MAX_LOG_BYTES + 1


async def test_stop_ends_the_child_in_order(tmp_path: Path, mark: str) -> None:
    body = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("up", flush=True)
        while True: time.sleep(0.05)
    """
    process = ChildProcess.start(command(tmp_path, mark, "python", "-S", script(tmp_path, "s", body)))
    await eventually(lambda: "up\n" in (tmp_path / "child.log").read_text())
    process.stop()
    assert await asyncio.wait_for(process.wait(), 120) == 0


async def test_kill_during_the_start_is_not_lost(tmp_path: Path, mark: str) -> None:
    """Also where this process was started with SIGQUIT ignored, as by `nohup ... &` in a script."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        for _ in range(3):
            process = ChildProcess.start(
                command(tmp_path, mark, "python", "-S", "-c", "import time; time.sleep(600)")
            )
            process.kill()
            assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGQUIT, before)


async def test_subreaper_passes_no_descriptors_and_sets_the_cpus(tmp_path: Path, mark: str) -> None:
    held = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.sched_getaffinity(0))"
        started = command(tmp_path, mark, "python", "-S", "-c", code, pass_fds=(held,), cpus=(0,))
        assert await exit_code(started) == 0
    finally:
        os.close(held)
    lines = (tmp_path / "child.log").read_text().splitlines()
    assert lines[0].startswith("--- 20")
    assert mark in lines[0]
    assert lines[1] == "[0, 1, 2] {0}"


def test_environment_leaves_out_variables_of_another_run() -> None:
    assert environment({"PATH": "/bin", "SCALERL_DIR": "/x", MARK: "y"}) == {"PATH": "/bin"}


def test_tree_memory_counts_descendants() -> None:
    own = tree_memory_bytes(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "b = bytearray(64 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = tree_memory_bytes(os.getpid()) - own
        child.kill()
    assert 60 << 20 < grown < 100 << 20
