"""Waits that end with the first of several events, and the end of a process that does not end by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from small_processes import is_running, wait_until

from scalerl_processes.child import SOCKET, start_with_socket, wait_or_kill
from scalerl_processes.waiting import cancel, first, pause

FAMILY = """
import os, socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
child = os.fork()
if child:
    end.send(str(child).encode())
end.recv(1)  # b"" once the parent has closed
if sys.argv[2] == "stay":
    import time
    time.sleep(600)
"""


async def test_first_gives_the_earlier_of_two_and_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def never() -> str:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    async def at_once(text: str) -> str:
        return text

    assert await first(never(), at_once("a"), at_once("b")) == "a"
    assert cancelled.is_set()


async def test_first_raises_the_error_that_ended_it() -> None:
    async def fails() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await first(asyncio.Event().wait(), fails())


async def test_pause_ends_with_its_event() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await pause(600, until=event)
    event.clear()
    await pause(0.01, until=event)


async def test_cancel_waits_and_drops_errors() -> None:
    async def fails_on_cancel() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise ValueError

    task = asyncio.create_task(fails_on_cancel())
    await asyncio.sleep(0)
    await cancel(task)
    assert task.done()


@pytest.mark.parametrize("what", ["leave", "stay"])
def test_wait_or_kill_leaves_no_process_of_the_session(what: str) -> None:
    command = [sys.executable, "-S", "-c", FAMILY, SOCKET, what]
    process, control = start_with_socket(command, stdout=subprocess.DEVNULL)
    with control:
        child = int(control.recv(16))
    began = time.monotonic()
    wait_or_kill(process, 0.5 if what == "stay" else 120)
    assert process.returncode == (-9 if what == "stay" else 0)
    assert what == "stay" or time.monotonic() - began < 100
    wait_until(lambda: not is_running(child))


def test_start_with_socket_closes_its_end_when_nothing_starts() -> None:
    with pytest.raises(FileNotFoundError):  # an open socket would be a ResourceWarning, which is an error
        start_with_socket(["/no/such/program"])
