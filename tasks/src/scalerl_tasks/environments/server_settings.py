"""A server of OpenEnv: how it is used, where it is reached, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.built_in import DEFAULT_SESSIONS
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.verdict import SCORE_RANGE

TOKEN: Final = "ENVIRONMENT_TOKEN"
"""Environment variable with the token of the server."""
MAX_ANSWER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """A server, and how replies and observations are exchanged with it."""

    url: str
    timeout_seconds: float = 10.0
    """Time limit of a reset or a step."""
    action: str | None = None
    """The field of the action that is the reply; None: see :meth:`Schema.of`."""
    message: str | None = None
    """The field of the observation that the model reads; None: see :meth:`Schema.of`."""
    total: bool = False
    """Whether the reward of an episode is the sum of its steps' rewards; otherwise, it is that of the last step."""
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest reward of an episode."""
    sessions: int = DEFAULT_SESSIONS
    """Maximum concurrent sessions of a generator."""

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"the environment server {self.url}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server, or one of its replicas, is reached."""

    url: str
    host: str = ""
    """The server's own name and port, if ``url`` has a number in their place."""

    @property
    def headers(self) -> dict[str, str]:
        return {"host": self.host} if self.host else {}


class Down(Exception):
    """The server answered nothing of use; the message says what."""


class Full(Down):
    """All sessions of the server are taken; ``taken``: how many, 0 if it does not say."""

    taken = 0


class Lost(Down):
    """The server closed the session."""


class Raised(Down):
    """The environment raised an exception."""


class Failed(VerifierError):
    """The episode has no result, also when it is played again."""


class Unfit(VerifierError):
    """``environment.parameters`` do not fit the server."""


def advice(status: int) -> str:
    """What to do about a status of HTTP; empty if there is nothing to say."""
    return f"; its token is the variable {TOKEN}" if status in (401, 403) else ""
