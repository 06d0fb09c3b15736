"""No orphan is ever left: whoever of parent, leash and child is killed, and however stubborn the family."""

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

from operator_tests.children import STUBBORN_FAMILY, eventually, left_of, script, wait_until
from scalerl_operator.runtime.census import kill_marked, tree_memory_bytes
from scalerl_operator.runtime.process import MARK, ChildProcess, Command, environment

PARENT = """
    import asyncio, sys
    from pathlib import Path
    from scalerl_operator.runtime.process import ChildProcess, Command, environment

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
    name = f"leash-test{tmp_path}"
    yield name
    kill_marked(MARK, name)


def command(tmp: Path, mark: str, *argv: str, **options: object) -> Command:
    return Command(argv, environment(), tmp / "child.log", mark, **options)  # type: ignore[arg-type]


async def exit_code(started: Command) -> int:
    return await asyncio.wait_for(ChildProcess.start(started).wait(), 10)


def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path, mark: str) -> None:
    family, up = script(tmp_path, "family", STUBBORN_FAMILY), tmp_path / "up"
    parent = subprocess.Popen(
        [sys.executable, script(tmp_path, "parent", PARENT), str(tmp_path / "log"), mark, family, str(up)]
    )
    wait_until(up.exists)
    wait_until(lambda: len(left_of(mark)) == 4)  # leash, child, two grandchildren
    parent.kill()
    parent.wait()
    wait_until(lambda: not left_of(mark), 5)


@pytest.mark.parametrize("victim", ["child", "leash"])
async def test_kill_9_of_child_or_leash_takes_the_grandchildren_along(
    tmp_path: Path, mark: str, victim: str
) -> None:
    up = tmp_path / "up"
    process = ChildProcess.start(
        command(tmp_path, mark, "python", "-S", script(tmp_path, "family", STUBBORN_FAMILY), str(up))
    )
    await eventually(lambda: up.exists() and process.pid is not None)
    pids = left_of(mark)
    assert process.pid in pids
    leash = next(p for p in pids if b"leash.py" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(process.pid if victim == "child" else leash, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGKILL
    assert left_of(mark) == []


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
async def test_the_leash_ends_as_its_child_did(tmp_path: Path, mark: str, code: str, expected: int) -> None:
    assert await exit_code(command(tmp_path, mark, "python", "-S", "-c", code)) == expected


async def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path: Path, mark: str) -> None:
    assert await exit_code(command(tmp_path, mark, "/no/such/command")) == 127
    assert "cannot start /no/such/command: No such file or directory" in (tmp_path / "child.log").read_text()


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
    assert await asyncio.wait_for(process.wait(), 5) == 0


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
