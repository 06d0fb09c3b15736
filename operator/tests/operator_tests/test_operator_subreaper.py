"""No orphan is ever left: whoever of parent, subreaper and child is killed, and however stubborn the family."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from operator_tests.children import (
    HIDDEN_GRANDCHILD,
    STUBBORN_FAMILY,
    eventually,
    is_running,
    left_of,
    script,
    wait_until,
)
from scalerl_operator.local.process import MARK, MAX_LOG_BYTES, ChildProcess, Command, environment
from scalerl_operator.local.procfs import kill_marked, tree_memory_bytes, writing_to

PARENT = """
    import asyncio, sys
    from pathlib import Path
    from scalerl_operator.local.process import ChildProcess, Command, environment

    async def main():
        process = ChildProcess.start(Command(
            ["python", "-S", *sys.argv[3:]], environment(), Path(sys.argv[1]), sys.argv[2],
            orphan_grace_seconds=0.3))
        await process.wait()

    asyncio.run(main())
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark of this test alone; whatever fails, nothing of it is left running."""
    name = f"subreaper-test{tmp_path}"
    yield name
    kill_marked(MARK, name)


def command(tmp: Path, mark: str, *argv: str, **options: object) -> Command:
    return Command(argv, environment(), tmp / "child.log", mark, **options)  # type: ignore[arg-type]


async def exit_code(started: Command) -> int:
    return await asyncio.wait_for(ChildProcess.start(started).wait(), 120)


def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path, mark: str) -> None:
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
async def test_kill_9_of_child_or_subreaper_takes_the_grandchildren_along(
    tmp_path: Path, mark: str, victim: str
) -> None:
    up = tmp_path / "up"
    process = ChildProcess.start(
        command(tmp_path, mark, "python", "-S", script(tmp_path, "family", STUBBORN_FAMILY), str(up))
    )
    await eventually(lambda: up.exists() and process.pid is not None)
    pids = left_of(mark)
    assert process.pid in pids
    subreaper = next(p for p in pids if b"subreaper.py" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(process.pid if victim == "child" else subreaper, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert left_of(mark) == []


async def test_a_grandchild_without_an_environment_does_not_outlive_its_subreaper(
    tmp_path: Path, mark: str
) -> None:
    note = tmp_path / "pid"
    hidden = script(tmp_path, "hidden", HIDDEN_GRANDCHILD)
    process = ChildProcess.start(command(tmp_path, mark, "python", "-S", hidden, str(note)))
    await eventually(lambda: note.exists() and note.read_text())
    grandchild = int(note.read_text())
    pids = left_of(mark)
    assert grandchild not in pids
    subreaper = next(p for p in pids if b"subreaper.py" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(subreaper, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert not is_running(grandchild)


def test_who_writes_to_a_log_is_found_but_not_who_started_us(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from scalerl_operator.local.procfs import writing_to;"
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


async def test_a_stop_that_is_ignored_becomes_a_kill_after_the_grace(tmp_path: Path, mark: str) -> None:
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
    process.stop()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.2)
    assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGKILL
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
async def test_the_subreaper_ends_as_its_child_did(
    tmp_path: Path, mark: str, code: str, expected: int
) -> None:
    assert await exit_code(command(tmp_path, mark, "python", "-S", "-c", code)) == expected


async def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path: Path, mark: str) -> None:
    assert await exit_code(command(tmp_path, mark, "/no/such/command")) == 127
    assert "cannot start /no/such/command: No such file or directory" in (tmp_path / "child.log").read_text()


async def test_a_log_does_not_grow_over_restarts(tmp_path: Path, mark: str) -> None:
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


async def test_signals_are_forwarded_and_an_orderly_end_is_exit_0(tmp_path: Path, mark: str) -> None:
    body = """
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("up", flush=True)
        while True: time.sleep(0.05)
    """
    process = ChildProcess.start(command(tmp_path, mark, "python", "-S", script(tmp_path, "s", body)))
    log = tmp_path / "child.log"
    for number, word in ((None, "up\n"), (signal.SIGUSR1, "usr1\n")):
        if number is not None:
            process.send(number)
        await eventually(lambda word=word: word in log.read_text())
    process.stop()
    assert await asyncio.wait_for(process.wait(), 120) == 0


async def test_the_child_sees_neither_lifeline_nor_lock_and_keeps_its_pins(tmp_path: Path, mark: str) -> None:
    held = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.sched_getaffinity(0))"
        started = command(tmp_path, mark, "python", "-S", "-c", code, held=(held,), cpus=(0,))
        assert await exit_code(started) == 0
    finally:
        os.close(held)
    lines = (tmp_path / "child.log").read_text().splitlines()
    assert lines[0].startswith("--- 20")
    assert mark in lines[0]
    assert lines[1] == "[0, 1, 2] {0}"


def test_children_do_not_inherit_what_names_another_process_of_a_run() -> None:
    assert environment({"PATH": "/bin", "SCALERL_DIR": "/x", MARK: "y"}) == {"PATH": "/bin"}


def test_memory_of_a_tree_is_counted() -> None:
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
