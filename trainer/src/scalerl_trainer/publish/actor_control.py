"""Concurrent requests to actors' weight control, with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import msgspec

from scalerl_api import wire
from scalerl_api.http_answers import BadAnswer
from scalerl_api.http_client import decode_problem, wire_headers
from scalerl_trainer.coordinator_client import MAX_ANSWER_BYTES, failure_reason, request


@dataclass(frozen=True)
class Answer:
    """One member's answer."""

    body: bytes | None = None
    """Body of a 2xx response; None after an error."""
    error: str = ""
    """Error message without a ``body``."""
    problem: str = ""
    """Its :attr:`.wire.Problem.error`, if the member has answered."""
    cleared: bool = False
    """Whether the member answered with an error that another member may have caused."""

    @property
    def ok(self) -> bool:
        return self.body is not None


@dataclass
class Calls:
    """Requests in progress to several members. ``deadline`` is in the time of ``time.monotonic()``."""

    asked: frozenset[str]
    deadline: float
    answers: dict[str, Answer] = field(default_factory=dict)
    _arriving: queue.SimpleQueue[tuple[str, Answer]] = field(default_factory=queue.SimpleQueue)

    def collect(self) -> None:
        """Collect the answers received so far, without waiting."""
        while not self._arriving.empty():
            member_id, answer = self._arriving.get()
            self.answers.setdefault(member_id, answer)

    def first_failure(self) -> str | None:
        """The message of the first error received so far; None without one."""
        self.collect()
        return next((f"{m}: {a.error}" for m, a in self.answers.items() if not a.ok), None)

    def wait(self) -> dict[str, Answer]:
        """Wait for all answers. A member that has not answered by the deadline gets an error."""
        self.collect()
        while len(self.answers) < len(self.asked):
            try:
                member_id, answer = self._arriving.get(timeout=max(0.0, self.deadline - time.monotonic()))
            except queue.Empty:
                break
            self.answers.setdefault(member_id, answer)
        for member_id in self.asked - self.answers.keys():
            self.answers[member_id] = Answer(error="no answer in time")
        return self.answers


class ActorControl:
    """Client of actors' weight control, with the run's token.

    Each request runs on a daemon thread, which is abandoned at the deadline, so that a peer that accepts a connection and then
    hangs blocks only its thread.

    Args:
        connect_seconds: timeout of a connection.
        late_answer_seconds: a request stays open for this time after its deadline, because :func:`.group_publisher._after_failure` may
            extend the deadline.
        max_answer_bytes: limit of an answer.
    """

    def __init__(
        self,
        token: str,
        *,
        connect_seconds: float = 5.0,
        late_answer_seconds: float = 30.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._connect_seconds, self._late_answer_seconds = connect_seconds, late_answer_seconds
        self._max_answer_bytes = max_answer_bytes
        # No keep-alive: a pooled connection that the actor has closed would look like a dead actor.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(headers=wire_headers(token), trust_env=False, limits=limits)

    def close(self) -> None:
        """Close all connections, also those of stuck requests."""
        self._http.close()

    def start(
        self,
        members: list[wire.Member],
        path: str,
        messages: Mapping[str, wire.Struct],
        timeout_seconds: float,
    ) -> Calls:
        """POST ``messages[member_id]`` to each member's ``path``; returns at once."""
        calls = Calls(frozenset(m.member_id for m in members), time.monotonic() + timeout_seconds)
        for member in members:
            body = msgspec.msgpack.encode(messages[member.member_id])
            threading.Thread(
                target=self._post,
                args=(calls, member, path, body, timeout_seconds),
                name=f"{path.rsplit('/', 1)[-1]}-{member.name}",
                daemon=True,
            ).start()
        return calls

    def _post(
        self, calls: Calls, member: wire.Member, path: str, body: bytes, timeout_seconds: float
    ) -> None:
        url = member.control_url.rstrip("/") + path
        timeout = httpx.Timeout(
            timeout_seconds + self._late_answer_seconds, connect=min(self._connect_seconds, timeout_seconds)
        )
        try:
            code, content = request(self._http, "POST", url, body, timeout, self._max_answer_bytes)
        # RuntimeError: closed under us
        except (httpx.HTTPError, httpx.InvalidURL, BadAnswer, RuntimeError) as error:
            answer = Answer(error=f"POST {url}: {failure_reason(error, timeout)}")
        else:
            if httpx.codes.is_success(code):
                answer = Answer(body=bytes(content))
            else:
                problem = decode_problem(content)
                answer = Answer(
                    error=f"POST {url}: {code} {problem.error}: {problem.message}",
                    problem=problem.error,
                    cleared=problem.error != "not-ready",  # not-ready: the member's own server is gone
                )
        calls._arriving.put((member.member_id, answer))
