"""A server of OpenEnv's protocol with the echo of openenv's own template; ``tests/local/test_local_openenv.py`` compares it with openenv.

Its frames are those of openenv 0.10: a session a WebSocket, one environment each, errors by code. ``python openenv_stand_in.py PORT``
serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

Observation = dict[str, Any]


class Echo:
    """The environment of ``openenv init``; with ``turns``, it ends with that reply."""

    turns = 0

    def __init__(self) -> None:
        self.steps = 0
        self.arguments: dict[str, Any] = {}

    def reset(self, arguments: dict[str, Any]) -> Observation:
        self.steps, self.arguments = 0, arguments
        return observed({"echoed_message": "ready", "message_length": 0}, 0.0)

    def step(self, action: dict[str, Any]) -> Observation:
        self.steps += 1
        text = action["message"]
        answer = {"echoed_message": text, "message_length": len(text)}
        return observed(answer, min(len(text) * 0.1, 1.0), self.steps == self.turns)


def observed(observation: dict[str, Any], reward: float | None = None, done: bool = False) -> Observation:
    """The data of an observation."""
    return {"observation": observation, "reward": reward, "done": done}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def schema() -> dict[str, Any]:
    text = {"title": "Message", "type": "string"}
    metadata = {"title": "Metadata", "type": "object"}
    return {
        "action": {"properties": {"metadata": metadata, "message": text}, "required": ["message"]},
        "observation": {
            "properties": {
                "done": {"type": "boolean"},
                "reward": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "metadata": metadata,
                "echoed_message": {"type": "string"},
                "message_length": {"type": "integer"},
            }
        },
        "state": {},
    }


class OpenEnvServer:
    """Everything about it may be replaced while it serves."""

    def __init__(self) -> None:
        self.environment: Callable[[], Any] = Echo
        self.capacity = 64
        self.schema = schema()
        self.token = ""
        self.on_step: Callable[[web.WebSocketResponse], Any] | None = None
        """Called in place of a step; what it returns is awaited."""
        self.refuses: web.Response | None = None
        """The answer to every request, in place of its own."""
        self.sessions: set[web.WebSocketResponse] = set()
        self.most_sessions = 0
        self.opened = self.resets = self.steps = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check])
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ws", self._session)
        return app

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuses is not None:
            return web.Response(
                status=self.refuses.status, text=self.refuses.text, content_type=self.refuses.content_type
            )
        health = request.path == "/health"  # probes have no token
        if self.token and not health and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response(self.schema)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=100 << 20)
        await socket.prepare(request)
        if len(self.sessions) >= self.capacity:
            sizes = {"active_sessions": len(self.sessions), "max_sessions": self.capacity}
            await socket.send_str(json.dumps(error("CAPACITY_REACHED", "full", **sizes)))
            await socket.close()
            return socket
        self.sessions.add(socket)
        self.opened += 1
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        environment = self.environment()
        try:
            async for got in socket:
                if got.type is not WSMsgType.TEXT:
                    break
                answer = await self._answer(socket, environment, json.loads(got.data))
                if answer is None:
                    break
                await socket.send_str(json.dumps(answer))
        except ConnectionError:
            pass
        finally:
            self.sessions.discard(socket)
        return socket

    async def _answer(self, socket: Any, environment: Any, message: dict[str, Any]) -> dict[str, Any] | None:
        kind, data = message.get("type", ""), message.get("data", {})
        if kind == "close":
            return None
        if kind not in ("reset", "step"):
            return error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        try:
            if kind == "reset":
                self.resets += 1
                return {"type": "observation", "data": environment.reset(data)}
            if self.on_step is not None and (found := self.on_step(socket)) is not None:
                await found
            if errors := _errors(data, self.schema):
                return error("VALIDATION_ERROR", "Invalid message", errors=errors)
            self.steps += 1
            return {"type": "observation", "data": environment.step(data)}
        except Exception as failure:
            return error("EXECUTION_ERROR", str(failure))

    async def close_sessions(self) -> None:
        """Cut every connection, as a process that is killed does."""
        for socket in list(self.sessions):
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)


def _errors(action: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """As pydantic reports them for fields that are texts."""
    fields, required = schema["action"]["properties"], schema["action"].get("required", ())
    return [
        *(
            {"type": "missing", "loc": [name], "msg": "Field required", "input": action}
            for name in required
            if name not in action
        ),
        *(
            {
                "type": "extra_forbidden",
                "loc": [name],
                "msg": "Extra inputs are not permitted",
                "input": value,
            }
            for name, value in action.items()
            if name not in fields
        ),
        *(
            {"type": "string_type", "loc": [name], "msg": "Input should be a valid string", "input": value}
            for name, value in action.items()
            if name in fields and fields[name].get("type") == "string" and not isinstance(value, str)
        ),
    ]


@asynccontextmanager
async def serving(
    server: OpenEnvServer | None = None, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[OpenEnvServer, str]]:
    """Serve on a loopback port; gives the server and its address."""
    server = server or OpenEnvServer()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield server, f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await server.close_sessions()
        await runner.cleanup()
        # What it accepted at that moment is left to the collector, whose warning would fail a later test of this process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


async def _serve(port: int) -> None:
    async with serving(port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1])))
