"""Requests of an attacker without the run's token to a role's HTTP server, generated from :mod:`scalerl_api.endpoints`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import aiohttp
import yarl

from scalerl_api import endpoints, forecast
from scalerl_api.wire import CONTENT_TYPE, WIRE_HEADER, WIRE_VERSION

PROBES: Final = (endpoints.HEALTH, endpoints.READY, endpoints.METRICS)
PATHS: Final = tuple(
    value
    for module in (endpoints, forecast)
    for name, value in sorted(vars(module).items())
    if name.isupper() and isinstance(value, str) and value.startswith("/")
)
"""Every endpoint of the project."""
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "ANY")


def credentials(token: str) -> Iterator[Mapping[str, str]]:
    """Headers that do not authorize."""
    yield {}
    for value in ("", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {token}x", f"Bearer {token[:-1]}", token):
        yield {"Authorization": value}
    yield {"Authorization": f"Basic {token}"}
    yield {"X-Authorization": f"Bearer {token}", "Proxy-Authorization": f"Bearer {token}"}
    yield {"Cookie": f"token={token}; Authorization=Bearer {token}"}


def spellings(path: str) -> Iterator[str]:
    """``path``, and others that a server may take for it."""
    yield path
    yield from (
        path + "/",
        "/" + path,
        "/." + path,
        path.upper(),
        f"/x/..{path}",
        path + "?token=x",
        path + ";x",
    )
    yield f"/%{ord(path[1]):02x}{path[2:]}"
    yield path.replace("/", "%2f").replace("%2f", "/", 1)


async def admitted(
    url: str, token: str, *, of_server: Collection[str], open_paths: Collection[str] = PROBES
) -> list[str]:
    """What a server lets in that it should refuse, and whether it serves what it should; empty if all is well.

    Args:
        of_server: the paths that need the token. With it, they answer something else than 401.
        open_paths: those that answer to everybody.
    """
    found: list[str] = []
    standard = {WIRE_HEADER: str(WIRE_VERSION), "Content-Type": CONTENT_TYPE}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def status(method: str, path: str, headers: Mapping[str, str]) -> int:
            target = yarl.URL(url + path, encoded=True)
            async with session.request(
                method, target, headers={**standard, **headers}, allow_redirects=False
            ) as answer:
                return answer.status

        for path in dict.fromkeys((*PATHS, *of_server)):
            for method in ("GET", "POST") if path in of_server else ("GET",):
                for headers in credentials(token):
                    code = await status(method, path, headers)
                    if path not in open_paths and not 400 <= code < 500:
                        found.append(f"{method} {path} with {headers}: {code}")
                    if path in of_server and code not in (401, 403, 405):
                        found.append(f"{method} {path} with {headers}: {code}, not 401 or 403")
            if path in open_paths:
                continue
            requests = [(method, path) for method in METHODS] + [("POST", one) for one in spellings(path)]
            codes = {request: await status(*request, {}) for request in requests}
            found += [f"{request}: {code}" for request, code in codes.items() if not _refused(code)]
        authorized = {"Authorization": f"Bearer {token}"}
        for path in of_server:
            answers = {await status(method, path, authorized) for method in ("GET", "POST")}
            if answers <= {401, 403, 404, 405}:
                found.append(f"{path} with the token: {answers}: is it served?")
        probes = {path: await status("GET", path, {}) for path in open_paths}
        return [*found, *(f"GET {path}: {code}" for path, code in probes.items() if code not in (200, 503))]


def _refused(code: int) -> bool:
    """A client's error, or a method that the server does not know."""
    return 400 <= code < 500 or code == 501
