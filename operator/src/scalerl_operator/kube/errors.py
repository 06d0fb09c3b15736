"""Errors of calls to the API server, by the reaction that they require.

::

    ApiError                 a call without a result
    ├── NotFound             404: the object, its namespace or its kind does not exist
    ├── Conflict             409: another writer was first (precondition on version or uid)
    ├── AlreadyExists        409 on create
    ├── Invalid              400/413/415/422: the server will never accept the object; ``causes`` name the fields
    ├── Forbidden            403: RBAC, admission
    │   └── QuotaExceeded    a ResourceQuota of the namespace has no room
    ├── Expired              410: a list's continue token or a watch's version is too old
    ├── TooLong              the response has more bytes than the caller reads
    ├── Unreachable          timeout, connection refused, 408, 429, 5xx: retry, after ``retry_after``
    └── Fenced               not sent: this process may not write now (it is not the leader)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

_UNTYPED: Final = ("failed to create typed patch object", "failed to convert new object")
"""First words of the message when an applied object does not fit its schema. The API server reports that as a 500."""
_UNTYPED_FIELD: Final = re.compile(r"(?:\): |^\s*)(\.[^\s:]+): ([^\n]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of a Status's ``details.causes``: the path of a field, and its error."""

    field: str
    message: str


class ApiError(Exception):
    """A call to the API server without a result.

    Args:
        code: the HTTP status; 0 without a response.
        reason: the Status's reason.
        what: verb, kind, namespace and name of the call.
        retry_after: seconds to wait at least, as the server requested; None: it requested none.
        longest_wait: a ceiling of the back-off after this error, in seconds; None: the caller's own.
    """

    longest_wait: float | None = None

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        what: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{what}: {message}" if what else message)
        self.message = message
        self.code = code
        self.reason = reason
        self.what = what
        self.causes = causes
        self.retry_after = retry_after


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409, except on create."""


class AlreadyExists(ApiError):
    """409 on create."""


class Invalid(ApiError):
    """The server will never accept this object."""

    @property
    def field(self) -> str:
        """The path of the first invalid field; empty without one."""
        return next((cause.field for cause in self.causes if cause.field), "")


class Forbidden(ApiError):
    """403."""


class QuotaExceeded(Forbidden):
    """403 by a ResourceQuota."""


class Expired(ApiError):
    """410."""


class TooLong(ApiError):
    """The response was not read to its end."""


class Unreachable(ApiError):
    """No response, or one that asks to retry."""

    longest_wait = 15.0


class Fenced(ApiError):
    """The call was not sent."""


def decode(data: bytes) -> dict[str, Any]:
    """The object in a response. Any other content (a proxy's page, a truncated body) becomes a Status with its text."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {"message": data[:200].decode(errors="replace").strip()}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}


def from_status(code: int, status: Mapping[str, Any], *, what: str, retry_after: float | None) -> ApiError:
    """The error of a response with ``code`` >= 400 and this body (a ``Status``, unless a proxy responded)."""
    details = status.get("details") or {}
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or f"HTTP {code}")
    causes = tuple(
        Cause(str(c.get("field") or ""), str(c.get("message") or "")) for c in details.get("causes") or ()
    )
    if not causes and message.startswith(_UNTYPED):
        causes = tuple(Cause(at.lstrip("."), text) for at, text in _UNTYPED_FIELD.findall(message))
    if retry_after is None and details.get("retryAfterSeconds"):
        retry_after = float(details["retryAfterSeconds"])
    kind = _kind_of_error(code, reason, message)
    return kind(message, code=code, reason=reason, what=what, causes=causes, retry_after=retry_after)


def _kind_of_error(code: int, reason: str, message: str) -> type[ApiError]:
    if code == 403:
        # An exceeded quota is an ordinary 403; only the text distinguishes it.
        return QuotaExceeded if "exceeded quota" in message or "failed quota" in message else Forbidden
    if code == 409:
        return AlreadyExists if reason == "AlreadyExists" else Conflict
    if message.startswith(_UNTYPED):
        return Invalid
    by_code: dict[int, type[ApiError]] = {
        400: Invalid, 404: NotFound, 408: Unreachable, 410: Expired, 413: Invalid,
        415: Invalid, 422: Invalid, 429: Unreachable,
    }  # fmt: skip
    return by_code.get(code, Unreachable if code >= 500 else ApiError)
