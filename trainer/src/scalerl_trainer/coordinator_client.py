"""Client of the coordinator: one blocking call per message, retried with back-off until a deadline.

The coordinator may restart from its journal at any moment, so refused connections, timeouts and 5xx responses are
retried; every trainer call is idempotent. While the coordinator answers that its volume is full, the deadline does not count. Permanent errors (another wire version, a wrong token, a newer trainer) are
raised at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx
import msgspec

from scalerl_api import endpoints, wire
from scalerl_api.attempts import AttemptSuperseded
from scalerl_api.exports import Exports
from scalerl_api.http_answers import MAX_ERROR_BYTES, BadAnswer, Body, decode_msgpack
from scalerl_api.http_client import Backoff, decode_problem, wire_headers

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 2**26
MAX_SNAPSHOT_BYTES = 2**29
"""Of the coordinator's state, as it accepts it in a hello."""
MAX_SHARD_BYTES = 2**33
"""A rank's part of a step: 8 bytes a token and the prompts."""

T = TypeVar("T")


class CoordinatorError(Exception):
    """The coordinator refused the call; retrying does not help."""


class CoordinatorUnreachable(CoordinatorError):
    """No usable response until the deadline; the coordinator may be restarting."""


class VolumeFull(CoordinatorUnreachable):
    """The coordinator answers, but cannot write its files at present: its volume is full or read-only. Nothing was changed."""


class NotReady(CoordinatorError):
    """The step is not closed yet, or was deleted."""


class Unresumable(CoordinatorError):
    """The coordinator's state and the checkpoint do not match; a restart does not help."""


_UNRESUMABLE = ("bad-snapshot", "identity", "no-state", "checkpoints-lost", "unknown-version")


class Coordinator:
    """The coordinator's API for one rank. Only :meth:`shard` and :meth:`publish_commit` may be called on another thread.

    Args:
        retry_seconds: deadline of one call with its retries, and of one answer, however slowly it arrives: the other ranks wait in
            a collective, whose timeout must be longer.
        interrupted: checked between attempts; True ends the retries, so that a drain does not wait for a dead coordinator.
    """

    def __init__(
        self,
        url: str,
        token: str,
        incarnation: str,
        retry_seconds: float = 300.0,
        interrupted: Callable[[], bool] = lambda: False,
        answer_seconds: float = 30.0,
    ) -> None:
        self._incarnation, self._answer_seconds = incarnation, answer_seconds
        self._retry_seconds = retry_seconds
        self._interrupted = interrupted
        self.while_full: Callable[[], object] = lambda: None
        """Called before each retry of a call for which the coordinator's volume is full, while the other ranks wait."""
        self._http = httpx.Client(base_url=url, headers=wire_headers(token), trust_env=False)

    def close(self) -> None:
        self._http.close()

    def hello(self, version: int, world_size: int, snapshot: bytes | None) -> wire.TrainerWelcome:
        """Register this trainer incarnation at ``version``.

        Raises:
            Unresumable: the coordinator has no state for ``version``, or would lose state.
        """
        message = wire.TrainerHello(
            incarnation=self._incarnation, version=version, world_size=world_size, snapshot=snapshot
        )
        return self._call(endpoints.TRAINER_HELLO, message, wire.TrainerWelcome)

    def next(self, version: int, wait_seconds: float, uploads: wire.Uploads | None = None) -> wire.Next:
        """Long-poll the next step, in one attempt: the caller synchronises the ranks between attempts.

        Raises:
            CoordinatorUnreachable: no response.
        """
        message = wire.NextRequest(
            incarnation=self._incarnation, version=version, wait_seconds=wait_seconds, uploads=uploads
        )
        return self._once(endpoints.TRAINER_NEXT, message, wire.Next, wait_seconds)

    def shard(self, step: int, rank: int, world_size: int, wait_seconds: float) -> wire.Shard:
        """Fetch a rank's shard of the step's batch, once it is closed.

        Raises:
            NotReady: it was not within ``wait_seconds``.
        """
        message = wire.ShardRequest(
            incarnation=self._incarnation,
            step=step,
            rank=rank,
            world_size=world_size,
            wait_seconds=wait_seconds,
        )
        return self._call(
            endpoints.TRAINER_SHARD, message, wire.Shard, MAX_SHARD_BYTES, wait_seconds, alone=False
        )

    def report(
        self,
        step: int,
        stats: dict[str, float],
        busy_seconds: float,
        trained_tokens: int,
        skipped: str = "",
        sequences: Sequence[wire.TrainedSequence] = (),
    ) -> bool:
        """Report a finished step; returns whether to publish its version now.

        ``skipped``: why the update was not applied; empty if it was.
        """
        message = wire.StepReport(
            incarnation=self._incarnation,
            step=step,
            stats=stats,
            busy_seconds=busy_seconds,
            trained_tokens=trained_tokens,
            skipped=skipped,
            sequences=list(sequences),
        )
        return self._call(endpoints.TRAINER_STEP, message, wire.StepReported).publish

    def supervised(self, steps: int, tokens: int, seconds: float, *, retry: bool) -> str:
        """Report the progress of mid-training; returns why the run is to end, or an empty string.

        ``retry``: retry; otherwise one attempt.
        """
        message = wire.SupervisedReport(
            incarnation=self._incarnation, steps=steps, tokens=tokens, seconds=seconds
        )
        answer = self._call(endpoints.TRAINER_SUPERVISED, message, wire.SupervisedReported, retry=retry)
        return answer.stop_reason

    def publish_begin(self, version: int, wait_seconds: float) -> wire.PublishPermit:
        """Long-poll the permission to publish, in one attempt, as :meth:`next`."""
        message = wire.PublishBegin(incarnation=self._incarnation, version=version, wait_seconds=wait_seconds)
        return self._once(endpoints.PUBLISH_BEGIN, message, wire.PublishPermit, wait_seconds)

    def publish_commit(
        self,
        version: int,
        updated: list[str],
        failed: list[str],
        stats: dict[str, float],
        refused: list[str],
        problem: str,
        kept: list[str],
    ) -> None:
        """Report a finished publish: :class:`scalerl_api.wire.PublishCommit` has the arguments."""
        message = wire.PublishCommit(
            incarnation=self._incarnation,
            version=version,
            updated=updated,
            failed=failed,
            stats=stats,
            refused=refused,
            problem=problem,
            kept=kept,
        )
        self._call(endpoints.PUBLISH_COMMIT, message, wire.Ack, alone=False)

    def checkpoint_begin(self, step: int, *, retry: bool = True) -> wire.CheckpointSnapshot:
        """Fetch the coordinator's state as of ``step``. ``retry``: retry; otherwise one attempt."""
        message = wire.CheckpointBegin(incarnation=self._incarnation, step=step)
        return self._call(
            endpoints.CHECKPOINT_BEGIN, message, wire.CheckpointSnapshot, MAX_SNAPSHOT_BYTES, retry=retry
        )

    def checkpoint_failed(self, step: int, reason: str, *, holding: bool) -> None:
        """Report a failed checkpoint, in one attempt. ``holding``: see :class:`wire.CheckpointFailed`."""
        message = wire.CheckpointFailed(
            incarnation=self._incarnation, step=step, reason=reason, holding=holding
        )
        self._once(endpoints.CHECKPOINT_FAILED, message, wire.Ack, 0.0)

    def checkpoint_commit(self, step: int, kept_steps: list[int], *, retry: bool) -> None:
        """Report a complete checkpoint. ``retry``: retry; otherwise one attempt."""
        message = wire.CheckpointCommit(incarnation=self._incarnation, step=step, kept_steps=kept_steps)
        self._call(endpoints.CHECKPOINT_COMMIT, message, wire.Ack, retry=retry)

    def exports(self, exports: Exports | None = None, *, retry: bool = True) -> Exports | None:
        """Report the exported models, or only ask for those that were reported last. ``retry``: retry; otherwise one attempt."""
        message = wire.ExportsReport(incarnation=self._incarnation, exports=exports)
        return self._call(endpoints.EXPORTS, message, wire.ExportsReported, alone=False, retry=retry).exports

    def points(self) -> list[wire.EvaluationPoint]:
        """Fetch the evaluation points so far, in one attempt.

        Raises:
            CoordinatorUnreachable: no response, or an invalid one.
        """
        timeout = httpx.Timeout(self._answer_seconds)
        try:
            code, content = request(self._http, "GET", endpoints.STATUS, b"", timeout, MAX_ANSWER_BYTES)
            if code != httpx.codes.OK:
                raise CoordinatorUnreachable(f"GET {endpoints.STATUS}: HTTP {code}")
            return decode_msgpack(content, wire.Status).points
        except (httpx.HTTPError, BadAnswer) as error:
            raise CoordinatorUnreachable(
                f"GET {endpoints.STATUS}: {failure_reason(error, timeout)}"
            ) from error

    def _call(
        self,
        path: str,
        message: wire.Struct,
        answer: type[T],
        limit: int = MAX_ANSWER_BYTES,
        wait_seconds: float = 0.0,
        *,
        alone: bool = True,
        retry: bool = True,
    ) -> T:
        """``alone``: the other ranks wait for a command, and this is not another thread; otherwise ``while_full`` must not send
        them one."""
        deadline = time.monotonic() + self._retry_seconds
        backoff = Backoff()
        while True:
            try:
                return self._once(path, message, answer, wait_seconds, limit, deadline)
            except CoordinatorUnreachable as error:
                full, pause = isinstance(error, VolumeFull), backoff.next_seconds()
                too_late = not full and time.monotonic() + pause >= deadline
                if not retry or too_late or self._interrupted():
                    raise
                log.warning("%s; next attempt in %.1f s", error, pause)
            time.sleep(pause)
            if full:  # it answers: the deadline is that of a coordinator that does not
                if alone:
                    self.while_full()
                deadline = time.monotonic() + self._retry_seconds

    def _once(
        self,
        path: str,
        message: wire.Struct,
        answer: type[T],
        wait_seconds: float,
        limit: int = MAX_ANSWER_BYTES,
        deadline: float | None = None,
    ) -> T:
        if deadline is None:
            deadline = time.monotonic() + wait_seconds + self._retry_seconds
        timeout = httpx.Timeout(self._answer_seconds + wait_seconds, connect=5.0)
        try:
            body = msgspec.msgpack.encode(message)
            code, content = request(self._http, "POST", path, body, timeout, limit, deadline)
        except (httpx.HTTPError, BadAnswer) as error:
            raise CoordinatorUnreachable(f"POST {path}: {failure_reason(error, timeout)}") from error
        if code == httpx.codes.OK:
            try:
                return decode_msgpack(content, answer)
            except BadAnswer as error:
                raise CoordinatorError(f"POST {path}: {error}") from error
        problem = decode_problem(content)
        reason = f"POST {path}: {code} {problem.error}: {problem.message}"
        if code == httpx.codes.INSUFFICIENT_STORAGE:
            raise VolumeFull(reason)
        if code >= 500:
            raise CoordinatorUnreachable(reason)
        if problem.error == "superseded":
            raise AttemptSuperseded(reason)
        if problem.error == "not-ready":
            raise NotReady(reason)
        raise Unresumable(reason) if problem.error in _UNRESUMABLE else CoordinatorError(reason)


def request(
    http: httpx.Client,
    method: str,
    url: str,
    body: bytes,
    timeout: httpx.Timeout,
    limit: int,
    latest: float = math.inf,
) -> tuple[int, bytearray]:
    """Status code and body of an answer of at most ``limit`` bytes. Redirects are not followed. The body is complete within
    ``timeout.read`` of its first byte, plus a second for each MiB of ``limit``, and at ``latest`` (monotonic).

    Raises:
        httpx.HTTPError
        BadAnswer: see :class:`scalerl_api.http_answers.Body`.
    """
    with http.stream(method, url, content=body, timeout=timeout, follow_redirects=False) as response:
        code = response.status_code
        limit = limit if httpx.codes.is_success(code) else MAX_ERROR_BYTES
        deadline = time.monotonic() + (timeout.read or 0.0) + limit / 2**20
        return code, Body(response.headers, limit, min(deadline, latest)).read(response.iter_raw())


def failure_reason(error: Exception, limits: httpx.Timeout) -> str:
    """Why a request failed; if a limit passed, which one, with its own seconds.

    >>> failure_reason(httpx.ConnectTimeout("timed out"), httpx.Timeout(600, connect=5))
    'no connection in 5 s'
    """
    match error:
        case httpx.ConnectTimeout():
            return f"no connection in {limits.connect:g} s"
        case httpx.PoolTimeout():
            return f"no free connection in {limits.pool:g} s"
        case httpx.WriteTimeout():
            return f"nothing could be sent for {limits.write:g} s"
        case httpx.ReadTimeout():
            return f"no answer in {limits.read:g} s"
        case BadAnswer():
            return str(error)
    return f"{type(error).__name__}: {error}"
