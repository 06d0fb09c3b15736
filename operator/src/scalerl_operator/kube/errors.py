"""What can go wrong between the operator and the API server, by what is to be done about it.

::

    ApiError                 anything the API server or the way to it answers instead of a result
    ├── NotFound             404: the object, its namespace or its kind is not there
    ├── Conflict             409: another writer was first
    ├── AlreadyExists        409 on create
    ├── Invalid              400/413/422: the server will never take this; the message names the fields
    ├── Forbidden            403: RBAC, admission
    │   └── QuotaExceeded    a ResourceQuota of the namespace has no room
    ├── Expired              410: a list's continue token or a watch's version is too old
    ├── Unreachable          time-out, refused, 5xx, 429: worth another try, after ``retry_after``
    └── Fenced               not sent at all: this process may not write now (it is not the leader)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_UNTYPED: Final = ("failed to create typed patch object", "failed to convert new object")
"""How the API server begins when an applied object does not fit its schema. It calls that a 500, and is wrong."""
_UNTYPED_FIELD: Final = re.compile(r"(?:\): |^\s*)(\.[^\s:]+): ([^\n]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of a Status's ``details.causes``: the field path and what is wrong with it."""

    field: str
    message: str


class ApiError(Exception):
    """A call to the API server that gave no result.

    ``code``: the HTTP status, 0 where none came. ``reason``: the Status's reason. ``what``: verb, kind,
    namespace and name of the call. ``retry_after``: seconds before which another try is pointless, None
    where nothing was said. ``longest_wait``: a ceiling in seconds for a back-off that follows this error,
    None for the caller's own.
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
    """The object, its namespace or its kind is not there."""


class Conflict(ApiError):
    """Another writer was first (version or uid precondition)."""


class AlreadyExists(ApiError):
    """``create`` of a name that is taken."""


class Invalid(ApiError):
    """The server will never accept this object; ``causes`` name the fields."""

    @property
    def field(self) -> str:
        """The path of the first field at fault, or empty."""
        return next((cause.field for cause in self.causes if cause.field), "")


class Forbidden(ApiError):
    """RBAC or an admission controller says no."""


class QuotaExceeded(Forbidden):
    """A ResourceQuota of the namespace has no room for this object."""


class Expired(ApiError):
    """A continue token or resource version is older than what the server keeps."""


class Unreachable(ApiError):
    """No answer, or one that says "later": worth another try."""

    longest_wait = 15.0


class Fenced(ApiError):
    """The call was not sent: this process may not write now."""


def from_status(code: int, status: Mapping[str, Any], *, what: str, retry_after: float | None) -> ApiError:
    """The typed error of a response of ``code`` (>= 400) whose body is a ``Status`` (or whatever came)."""
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
        # Quota comes as a plain Forbidden; only the text distinguishes it.
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
