"""The server of the page: on loopback, for the browser that has the token, read only.

An address with a token admits one browser, once: it gets a cookie and goes on to an address without the token. Requests are served
for hosts of this machine only, so that a name that an attacker lets point here reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from scalerl_analysis.problem import AnalysisProblem
from scalerl_cli.page.runs import NotARun, Query, Run
from scalerl_cli.rollouts import finite

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
ASSETS: Final = {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
_ENTER: Final = '<!doctype html><meta charset="utf-8"><link rel="icon" href="/icon.svg"><meta http-equiv="refresh" content="0;url=/"><title>ScaleRL</title>'
"""A page that goes on by itself: a browser sends a strict cookie with its request, and not after a redirect from elsewhere."""
_SEARCHES: Final = 2
"""Searches of rollouts at a time: each uses all cores."""


class Server:
    """Serves the page of some runs.

    Attributes:
        token: admits one browser; replaced afterwards.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.token = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._searches = asyncio.Semaphore(_SEARCHES)
        package = files("scalerl_cli.page")
        self._assets = {name: (package / name).read_bytes() for name in (*ASSETS, "index.html")}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        for name in ASSETS:
            app.router.add_get(f"/{name}", self._asset)
        app.router.add_get("/api/state", self._state)
        for name, part in {
            "metrics": lambda run, of: run.metrics(of["names"].split(",") if of.get("names") else None),
            "curve": lambda run, of: run.curve(),
            "timeline": lambda run, of: run.timeline(_number(of, "last"), _number(of, "count") or 12),
            "decisions": lambda run, of: run.decisions(),
            "rollouts": Run.rollouts,
            "prompt": Run.prompt,
        }.items():
            app.router.add_get(f"/api/{name}", self._part(part, search=name in ("rollouts", "prompt")))
        app.router.add_get("/perfetto.json", self._part(lambda run, query: run.perfetto(), attached=True))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await self._admitted(request, handler)
        except web.HTTPException as error:  # no such path, no such method
            response = web.Response(text=f"{error.status} {error.reason}\n", status=error.status)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    async def _admitted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if _host_and_port(request)[0] not in HOSTS:
            return _refused("this server answers to localhost and 127.0.0.1 only")
        given = request.query.get("token")
        if given is not None and request.path == "/":
            return self._enter(given, request)
        if not self._has_cookie(request):
            return _refused(
                "open the address with the token that scalerl view printed; it admits one browser"
            )
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return _refused("requests of other pages are not served")
        return await handler(request)

    def _has_cookie(self, request: web.Request) -> bool:
        return _equal(request.cookies.get(_cookie(request), ""), self._session)

    def _enter(self, given: str, request: web.Request) -> web.Response:
        if not self._has_cookie(request):
            if not _equal(given, self.token):
                how = "it admits one browser; start scalerl view again"
                return _refused(f"this token is not valid, or was used: {how}")
            self.token = secrets.token_urlsafe(32)
        response = web.Response(text=_ENTER, content_type="text/html")
        response.set_cookie(_cookie(request), self._session, httponly=True, samesite="Strict", path="/")
        return response

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(body=self._assets["index.html"], content_type="text/html", charset="utf-8")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.path[1:]
        return web.Response(body=self._assets[name], content_type=ASSETS[name], charset="utf-8")

    async def _state(self, request: web.Request) -> web.Response:
        return _json({"runs": [await asyncio.to_thread(_state_of, run) for run in self._runs]})

    def _part(
        self, part: Callable[[Run, Any], dict[str, Any]], *, search: bool = False, attached: bool = False
    ) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            run = self._runs[0]
            try:
                if (number := _number(request.query, "run") or 0) >= len(self._runs):
                    raise Query("run: there is no such run")
                run = self._runs[number]
                async with self._searches if search else contextlib.nullcontext():
                    content = await asyncio.to_thread(part, run, request.query)
            except Query as problem:
                return _json({"problem": str(problem)}, 400)
            except (AnalysisProblem, NotARun) as problem:
                return _json({"problem": str(problem)})
            except OSError as error:  # the directory was deleted, or its volume fails
                return _json({"problem": f"{run.directory}: {error.strerror}"})
            response = _json(content)
            if attached:
                response.headers["Content-Disposition"] = f'attachment; filename="{_plain(run.name)}.json"'
            return response

        return answer


def _host_and_port(request: web.Request) -> tuple[str, str]:
    """Of the address as the browser has it: with a tunnel, its port is another than the server's."""
    host, _, port = request.host.lower().rpartition(":")
    return (host, port) if port.isdecimal() else (request.host.lower(), "")


def _cookie(request: web.Request) -> str:
    """Name of the cookie: browsers send those of one port to the others, and keep one of each name."""
    return f"scalerl-view-{_host_and_port(request)[1]}"


def _state_of(run: Run) -> dict[str, Any]:
    try:
        return run.state()
    except OSError as error:  # its volume fails, or it may not be read
        return {"name": run.name, "directory": str(run.directory), "problem": error.strerror, "revisions": {}}


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)


def _number(query: Any, name: str) -> int | None:
    """A number of the request, at least 0; None without it. Raises :class:`Query`."""
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise Query(f"{name}: {text[:40]!r} is not a number")
    return int(text)


def _json(content: Any, status: int = 200) -> web.Response:
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(content), separators=(",", ":"))
    return web.Response(text=text, status=status, content_type="application/json")


def _refused(why: str) -> web.Response:
    return web.Response(text=f"{why}\n", status=403)


def bound(port: int | None, first: int, tries: int = 50) -> socket.socket:
    """A socket on loopback: at ``port``, or at the first free one from ``first`` on. Raises OSError."""
    for at in [port] if port is not None else range(first, first + tries):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", at))
            bound.listen()
        except OSError as error:
            bound.close()
            failed = error
        else:
            return bound
    raise failed
