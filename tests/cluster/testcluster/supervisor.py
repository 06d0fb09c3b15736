"""Brings a cluster up from its plan, keeps it, and ends it: the parent of all of its programs.

``python -m testcluster.supervisor ROOT [FD]``: ROOT holds the plan; FD is a socket that listens outside of the
cluster's network. In a process namespace this is process 1: what loses its parent becomes its child, and with it
every process of the cluster ends. Elsewhere the kernel signals its programs to end with it.

Words on the socket ``control.sock``, a line of JSON each way: ``{"do": "kill" | "start", "name": ...}`` for one
program (tests take the API server away), ``{"do": "programs"}``, ``{"do": "down"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from testcluster.layout import Layout
from testcluster.processes import Children, Program

_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0


class StepError(RuntimeError):
    """A step of the plan failed."""


class Supervisor:
    """One cluster's programs. Made inside the event loop."""

    def __init__(self, layout: Layout, relay: socket.socket | None) -> None:
        self.layout = layout
        self.plan: dict[str, Any] = json.loads(layout.plan.read_text())
        self.relay = relay
        self.children = Children()
        self.argv: dict[str, list[str]] = {}
        self.programs: dict[str, Program] = {}
        self.over = asyncio.Event()
        self.tls = ssl.create_default_context(cafile=self.plan["ca"])

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.over.set)
        listeners = [await asyncio.start_unix_server(self._serve, str(self.layout.control))]
        if self.relay is not None:
            listeners.append(await asyncio.start_server(self._relay, sock=self.relay))
        up = asyncio.create_task(self._up())
        over = asyncio.create_task(self.over.wait())
        try:
            await asyncio.wait({up, over}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                up.result()
                self._say("ready")
                await over
        except StepError as error:
            self._say("failed", str(error))
        finally:
            up.cancel()
            over.cancel()
            for listener in listeners:
                listener.close()
            await self._down()

    async def _up(self) -> None:
        self._say("starting")
        if self.plan["own_folders"]:
            await self._own()
        for step in self.plan["steps"]:
            match step["do"]:
                case "run":
                    await self._run(step["argv"], step["seconds"])
                case "start":
                    self.argv[step["name"]] = step["argv"]
                    self._start(step["name"])
                case "wait":
                    await self._wait(step)

    async def _down(self) -> None:
        asked = [p for name, p in self.programs.items() if name in self.plan["asked"]]
        await asyncio.gather(*(p.kill() for p in self.programs.values() if p not in asked))
        for step in self.plan["last"] if asked else ():
            with contextlib.suppress(StepError):  # what is not done here, the end of the namespace does
                await self._run(step["argv"], step["seconds"])
        await asyncio.gather(*(p.stop(_STOP_SECONDS) for p in asked))

    async def _own(self) -> None:
        """In a mount namespace: what is written there stays there."""
        for folder in self.plan["own_folders"]:
            written, work = (self.layout.root / "written" / kind / folder[1:] for kind in ("files", "work"))
            written.mkdir(parents=True)
            work.mkdir(parents=True)
            layers = f"lowerdir={folder},upperdir={written},workdir={work}"
            await self._run(["mount", "-t", "overlay", "-o", layers, "overlay", folder], 120)
        for setting in map(Path, self.plan["own_settings"]):
            copy = self.layout.config(setting.name)
            copy.write_text(setting.read_text())
            await self._run(["mount", "--bind", str(copy), str(setting)], 120)
        # The kubelet wants mounts that pods may share; they are shared with nothing outside.
        await self._run(["mount", "--make-rshared", "/"], 120)

    # Programs.

    def _start(self, name: str) -> None:
        self.programs[name] = self.children.start(self.argv[name], self._log(name), self.layout.root)

    async def _run(self, argv: list[str], seconds: float) -> None:
        code, output = await self._try(argv, seconds)
        if code != 0:
            raise StepError(f"`{' '.join(argv)}` exited {code}: {output[-2000:]}")

    async def _try(self, argv: list[str], seconds: float) -> tuple[int | None, str]:
        """Exit code (negative when it took too long and was ended) and output."""
        log = self._log("steps")
        start = log.stat().st_size if log.exists() else 0
        program = self.children.start(argv, log, self.layout.root)
        if not await program.ended(seconds):
            await program.stop(_STOP_SECONDS)
        return program.code, log.read_bytes()[start:].decode(errors="replace").strip()

    async def _wait(self, step: dict[str, Any]) -> None:
        until = time.monotonic() + step["seconds"]
        why = "no answer"
        while (left := until - time.monotonic()) > 0:
            if (code := self.programs[step["on"]].code) is not None:
                raise StepError(f"{step['on']} exited {code}:\n{self._last_lines(step['on'])}")
            if step["argv"]:
                code, why = await self._try(step["argv"], max(1.0, left))
                if code == 0:
                    return
            else:
                why = await asyncio.to_thread(self._reconcile_run, step)
                if not why:
                    return
            await asyncio.sleep(_POLL_SECONDS)
        waited = " ".join(step["argv"]) or step["url"] or step["path"]
        raise StepError(
            f"waited {step['seconds']:.0f} s for `{waited}`: {why}\n"
            f"last lines of {self._log(step['on'])}:\n{self._last_lines(step['on'])}"
        )

    def _reconcile_run(self, step: dict[str, Any]) -> str:
        """Empty when the path is there or the URL answers 200, else why not."""
        if step["path"]:
            return "" if Path(step["path"]).exists() else "it is not there"
        try:
            with urllib.request.urlopen(step["url"], timeout=2, context=self.tls) as answer:
                return "" if answer.status == 200 else f"status {answer.status}"
        except OSError as error:
            return str(error)

    def _log(self, name: str) -> Path:
        return self.layout.logs / f"{name}.log"

    def _last_lines(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])

    # What others see.

    def _say(self, phase: str, error: str = "") -> None:
        aside = self.layout.status.with_suffix(".new")
        aside.write_text(json.dumps({"phase": phase, "error": error}))
        aside.rename(self.layout.status)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            word = json.loads(await asyncio.wait_for(reader.readline(), 120))
            writer.write(json.dumps(await self._obey(word)).encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()

    async def _obey(self, word: dict[str, str]) -> dict[str, Any]:
        name = word.get("name", "")
        match word["do"]:
            case "down":
                self.over.set()
            case "programs":
                return {"running": {n: p.pid for n, p in self.programs.items() if p.code is None}}
            case "kill" if name in self.programs:
                await self.programs[name].kill()
            case "start" if name in self.programs:
                if self.programs[name].code is not None:
                    self._start(name)
            case _:
                return {"error": f"no such word or program: {word}; programs: {', '.join(self.programs)}"}
        return {}

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From the port outside to the one inside, both ways, until one side ends."""
        host, port = self.plan["relay"]
        try:
            inside_reader, inside_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, inside_writer), _pump(inside_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the other side went away, which is how connections end
    finally:
        writer.close()


async def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    relay = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    await Supervisor(layout, relay).main()


if __name__ == "__main__":
    asyncio.run(main())
