"""Requests to actors: to all at once, each answer or its absence known by the deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import msgspec

from scalerl_api import wire
from scalerl_trainer.coordinator_client import decode_problem, wire_headers

CONNECT_SECONDS = 5.0
LATE_SECONDS = 30.0
"""A request is kept open this much past its deadline: its answer may still be waited for."""


@dataclass(frozen=True)
class Answer:
    """What came back from one member: the body of a yes, or what went wrong.

    ``cleared``: it answered with an error that another member may have caused.
    """

    body: bytes | None = None
    error: str = ""
    cleared: bool = False

    @property
    def ok(self) -> bool:
        return self.body is not None


@dataclass
class Calls:
    """Answers to one message sent to several members, as they come in."""

    asked: frozenset[str]
    deadline: float
    answers: dict[str, Answer] = field(default_factory=dict)
    _arriving: queue.SimpleQueue[tuple[str, Answer]] = field(default_factory=queue.SimpleQueue)

    def collect(self) -> None:
        """Take in what has arrived, without waiting."""
        while not self._arriving.empty():
            member_id, answer = self._arriving.get()
            self.answers.setdefault(member_id, answer)

    def first_failure(self) -> str | None:
        """In words, the first member that has answered anything but yes; None so far."""
        self.collect()
        return next((f"{m}: {a.error}" for m, a in self.answers.items() if not a.ok), None)

    def wait(self) -> dict[str, Answer]:
        """Everyone's answer; who has not answered by the deadline is counted as gone."""
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
    """Speaks to actors' weight control with the run's token.

    A request runs on a daemon thread that nobody waits for past the deadline: a peer that accepts a
    connection and then hangs holds up nothing but its thread.
    """

    def __init__(self, token: str) -> None:
        # No connection is kept: one that the actor's side has closed meanwhile would look like a dead actor.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(headers=wire_headers(token), trust_env=False, limits=limits)

    def close(self) -> None:
        """End the connections, also those that requests are stuck in."""
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
        try:
            timeout = httpx.Timeout(
                timeout_seconds + LATE_SECONDS, connect=min(CONNECT_SECONDS, timeout_seconds)
            )
            response = self._http.post(url, content=body, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: closed under us
            answer = Answer(error=f"POST {url}: {type(error).__name__}: {error}")
        else:
            if response.is_success:
                answer = Answer(body=response.content)
            else:
                problem = decode_problem(response)
                answer = Answer(
                    error=f"POST {url}: {response.status_code} {problem.error}: {problem.message}",
                    cleared=problem.error != "not-ready",  # that is its own server, gone
                )
        calls._arriving.put((member.member_id, answer))
