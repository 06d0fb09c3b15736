"""Who may read the operator's metrics: whoever Kubernetes lets ``get`` the path ``/metrics``.

The token of a request is reviewed by the API server (TokenReview), and so is its user's right (SubjectAccessReview), as by
controller-runtime and kube-rbac-proxy.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.types import Object

PATH: Final = "/metrics"
FRESH_SECONDS: Final = 60.0
"""How long an answer of the API server counts."""
MAX_ANSWERS: Final = 64
"""Answers kept; a token that is tried at random drives out no allowed one."""
MAX_TOKEN_BYTES: Final = 16_384


class ScrapeAccess:
    """Decides on requests by their ``Authorization`` header."""

    def __init__(self, api: KubeApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._answers: dict[bytes, tuple[float, int]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def status(self, authorization: str) -> int:
        """The HTTP status of a request: 200; 401 without a valid token; 403 without the right; 503 while the API server does not
        answer, except to a token that it has allowed before."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip() or len(token) > MAX_TOKEN_BYTES:
            return 401
        key = hashlib.sha256(token.strip().encode()).digest()
        if (known := self._known(key)) is not None:
            return known
        async with self._one_at_a_time:  # tokens that are tried at random cost one call at a time
            if (known := self._known(key)) is not None:
                return known
            try:
                answer = await self._review(token.strip())
            except errors.ApiError:
                return 200 if self._answers.get(key, (0.0, 0))[1] == 200 else 503
            self._keep(key, answer)
            return answer

    def _known(self, key: bytes) -> int | None:
        at, answer = self._answers.get(key, (0.0, 0))
        return answer if answer and self._clock() - at < FRESH_SECONDS else None

    def _keep(self, key: bytes, answer: int) -> None:
        self._answers.pop(key, None)
        if len(self._answers) >= MAX_ANSWERS:
            refused = (old for old, (_, status) in self._answers.items() if status != 200)
            del self._answers[next(refused, next(iter(self._answers)))]
        self._answers[key] = (self._clock(), answer)

    async def _review(self, token: str) -> int:
        reviewed = await self._ask("TokenReview", {"token": token})
        if not reviewed.get("authenticated"):
            return 401
        user: Any = reviewed.get("user") or {}
        request = {
            "user": user.get("username", ""),
            "uid": user.get("uid", ""),
            "groups": user.get("groups") or [],
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": PATH, "verb": "get"},
        }
        return 200 if (await self._ask("SubjectAccessReview", request)).get("allowed") else 403

    async def _ask(self, kind: str, spec: Object) -> Object:
        body = {"kind": kind, "apiVersion": kind_of(kind).api_version, "metadata": {"name": ""}, "spec": spec}
        answer: Object = (await self._api.create(body)).get("status") or {}
        return answer
