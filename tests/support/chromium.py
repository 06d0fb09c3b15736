"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
_START_SECONDS = _WAIT_SECONDS = 120.0


class Tab:
    """A tab. Errors of its scripts, and requests that its policy or the server refused, are in ``problems``."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            content = message.json()
            if (future := self._waiting.pop(content.get("id", -1), None)) is not None:
                future.set_result(content)
            elif content.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(content["params"]["exceptionDetails"]))
            elif content.get("method") == "Log.entryAdded":
                entry = content["params"]["entry"]
                self.problems.append(f"{entry.get('url', '')}: {entry['text']}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, _WAIT_SECONDS)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_WAIT_SECONDS):
            while not await self.run(f"Boolean({script})"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)

    async def text(self, selector: str = "body") -> str:
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))

    async def screenshot(self, width: int, height: int, *, dark: bool = False) -> bytes:
        """A picture (PNG) of the part of the page that the size shows."""
        await self.size(width, height)
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        await asyncio.sleep(0.3)  # until charts are drawn for the width
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def end(self) -> None:
        self._reading.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, with a new profile."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BINARY,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(_START_SECONDS):
                while not port_file.exists() or "\n" not in port_file.read_text():
                    assert process.returncode is None, "the browser does not start"
                    await asyncio.sleep(0.05)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                pages = await (await session.get(f"http://127.0.0.1:{port}/json")).json()
                address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
                opened = Tab(await session.ws_connect(address, max_msg_size=0))
                for domain in ("Page", "Runtime", "Log"):
                    await opened.call(f"{domain}.enable")
                yield opened
                await opened.end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
