"""Every endpoint of the vLLM server but ``/health`` and ``/metrics`` requires the run's token."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from scalerl_api.process import TOKEN_FILE
from scalerl_generator.server.server_options import ServerProblem

TOKEN_VARIABLE = "SCALERL_VLLM_TOKEN"
"""Environment variable with the bearer token of all requests but liveness and metrics; if unset, the token is read from
``SCALERL_TOKEN_FILE``."""

OPEN_PATHS = ("/health", "/metrics")


class RequireToken:
    """ASGI middleware: 401 for any request without the run's token, except to :data:`OPEN_PATHS`.

    A websocket without the token is closed before it is accepted, which the client sees as a 403.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None = None) -> None:
        self._app = app
        self._expected = b"Bearer " + (token or os.environ[TOKEN_VARIABLE]).encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connection request, which always comes first
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error":{"message":"unauthorized: the run\'s token is missing or wrong","code":401}}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _admits(self, scope: MutableMapping[str, Any]) -> bool:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)


def token_from_file(environ: Mapping[str, str]) -> str:
    """The token in the file that ``SCALERL_TOKEN_FILE`` names.

    Raises:
        ServerProblem: there is none.
    """
    file = environ.get(TOKEN_FILE)
    if not file:
        raise ServerProblem(
            f"neither {TOKEN_VARIABLE} nor {TOKEN_FILE} is set: one gives the token that clients send"
        )
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise ServerProblem(f"{TOKEN_FILE}={file}: {error.strerror}") from error
    if not token:
        raise ServerProblem(f"{TOKEN_FILE}={file}: empty")
    return token
