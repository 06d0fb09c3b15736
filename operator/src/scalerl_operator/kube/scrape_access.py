"""Who may read the operator's metrics: users that Kubernetes lets ``get`` the path ``/metrics``.

The token of a request is reviewed by the API server (TokenReview), and so is its user's right (SubjectAccessReview), as by
controller-runtime and kube-rbac-proxy.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
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
STALE_SECONDS: Final = 3600.0
"""How long an allowed token is served while the API server does not answer."""
REVIEWS_AT_ONCE: Final = 4
"""Of tokens that are not known as allowed, and as many of those that are, which do not wait for tokens that are tried at random."""
MAX_ANSWERS: Final = 64
"""Answers kept; a token that is tried at random drives out no allowed one."""
MAX_TOKEN_BYTES: Final = 16_384
REFUSALS: Final = {
    401: "no valid bearer token",
    403: "the token's user may not get the path /metrics: bind it to the chart's ClusterRole for metrics",
    500: "the operator may not create tokenreviews.authentication.k8s.io and subjectaccessreviews.authorization.k8s.io: bind its "
    "service account to a ClusterRole with both, as the chart does with rbac.create",
    503: "the API server does not say whose token this is; try again",
}
"""Answers to scrapes that are refused, by HTTP status."""

log = logging.getLogger(__name__)


class ScrapeAccess:
    """Decides on requests by their ``Authorization`` header.

    Args:
        wait_seconds: for a review, with the wait for others: less than Prometheus' default timeout of a scrape, 10 s.
    """

    def __init__(
        self, api: KubeApi, clock: Callable[[], float] = time.monotonic, *, wait_seconds: float = 8.0
    ) -> None:
        self._api, self._clock, self._wait_seconds = api, clock, wait_seconds
        self._answers: dict[bytes, tuple[float, int]] = {}
        self._reviews = {allowed: asyncio.Semaphore(REVIEWS_AT_ONCE) for allowed in (False, True)}
        self._may_review = True

    async def status(self, authorization: str) -> int:
        """The HTTP status of a request: 200; 401 without a valid token; 403 without the right; 500 if the operator itself may not
        ask; 503 while the API server does not answer, except to a token that it has allowed in the last hour."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip() or len(token) > MAX_TOKEN_BYTES:
            return 401
        key = hashlib.sha256(token.strip().encode()).digest()
        if (known := self._known(key)) is not None:
            return known
        at, last = self._answers.get(key, (0.0, 0))
        allowed = last == 200 and self._clock() - at < STALE_SECONDS
        try:
            async with asyncio.timeout(self._wait_seconds), self._reviews[allowed]:
                if (known := self._known(key)) is not None:
                    return known
                answer = await self._review(token.strip())
        except errors.Forbidden as error:
            if self._may_review:
                log.warning("scrapes of %s are refused: %s", PATH, error)
            self._may_review = False
            return 500
        except (errors.ApiError, TimeoutError):
            return 200 if allowed else 503
        self._may_review = True
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
