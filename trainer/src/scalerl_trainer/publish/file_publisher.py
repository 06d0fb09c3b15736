"""Publishes versions through files (:mod:`.weight_writer`): no process group, and no member waits for another one.

The weights may change once the version is written, before members have read it. A version that is sent again, to a member that
joins, is not written again. A member that cannot read a version has not failed: it generates with the one it has until that is too old,
and the next version that is sent, also if it is the same one, is written as a base, which no damage to the files before it concerns. A
member that cannot read more than :data:`MAX_UNREAD` versions in a row has failed: it is left out until it registers again, and no base is
written for it. So is one whose volume hangs, or whose object store does not answer it or refuses its credentials, without bases; and not one
that is slow: it reads on.

If the files cannot be written, nothing is sent and no member has failed, either. The next version, or the next attempt at this one, is
written once the volume can take it. A call of the volume, such as the write of a bucket, takes at most :data:`MAX_TIMEOUTS` timeouts, and a
write with all its attempts :data:`WRITE_TIMEOUTS`, for which the other ranks may have to wait.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from scalerl_api import endpoints, wire
from scalerl_trainer.errors import first_line
from scalerl_trainer.publish.actor_control import ActorControl, Answer
from scalerl_trainer.publish.published_weights import WeightSource
from scalerl_trainer.publish.publisher import (
    MAX_TIMEOUTS,
    WRITE_TIMEOUTS,
    Outcome,
    PhaseSeconds,
    decode_received,
    stats_of,
)
from scalerl_trainer.publish.weight_writer import WeightWriter, Written

log = logging.getLogger(__name__)

MAX_UNREAD = 3
"""Versions in a row that a member may fail to read. After each that it refuses, a base is written."""
_UNREAD = ("fetch-failed", "fetch-stalled", "fetch-unreachable")


class FilePublisher:
    """Executes the publishes of a run on rank 0.

    Args:
        retry_seconds: pause before the second and last attempt of a publish to write its version.
    """

    def __init__(
        self,
        writer: WeightWriter,
        control: ActorControl,
        *,
        bucket_bytes: int,
        timeout_seconds: float,
        retry_seconds: float = 5.0,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._writer = writer
        self._control = control
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._unread: Counter[str] = Counter()
        """Versions in a row that a member could not read, by its id, which another registration does not have."""

    def close(self) -> None:
        """Delete the files, at the end of the run."""
        self._writer.remove(self._timeout_seconds)

    def publish(
        self,
        version: int,
        weights: WeightSource,
        members: list[wire.Member],
        have_read: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """See :meth:`.Publisher.publish`. The weights may change once they are written."""
        started = time.perf_counter()
        written = self._write(version, weights) if members else None
        have_read()
        clock, answers = PhaseSeconds(gather=time.perf_counter() - started), dict[str, Answer]()
        if isinstance(written, Written):
            message = wire.WeightReceive(
                epoch=0,
                version=version,
                tensors=weights.manifest,
                bucket_bytes=self._bucket_bytes,
                timeout_seconds=self._timeout_seconds,
                adapter_scale=weights.adapter_scale,
                files=written.files,
            )
            messages = {member.member_id: message for member in members}
            calls = self._control.start(members, endpoints.WEIGHTS_RECEIVE, messages, self._timeout_seconds)
            answers = calls.wait()
        names = {member.member_id: member.name for member in members}
        kept, failed = self._not_received(version, names, answers)
        received = {m: decode_received(a.body) for m, a in answers.items() if a.body is not None}
        stats = stats_of(list(received.values()), clock, time.perf_counter() - started)
        stats |= {
            "publish_rounds": float(isinstance(written, Written)),
            "publish_members": float(len(received)),
            "publish_failed_members": float(len(failed)),
            "publish_bytes": float(written.bytes if isinstance(written, Written) else 0),
        }
        problem = written if isinstance(written, str) else next(iter([*failed.values(), *kept.values()]), "")
        slow = any(answer.problem == "fetch-continues" for answer in answers.values())
        return Outcome(version, list(received), list(failed), problem, stats, list(kept), slow)

    def _not_received(
        self, version: int, names: Mapping[str, str], answers: Mapping[str, Answer]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The errors of members that keep their version, and of those that failed, by their ids."""
        kept, failed = dict[str, str](), dict[str, str]()
        for member_id, answer in answers.items():
            name, error = names[member_id], answer.error
            if answer.ok:
                del self._unread[member_id]
                continue
            if answer.problem in _UNREAD:
                self._unread[member_id] += 1
            readable = self._unread[member_id] <= MAX_UNREAD
            if readable and answer.problem == "fetch-failed":
                self._writer.refuse()
            if not readable:
                error += f". It could not read {MAX_UNREAD} versions before, either: check "
                to = self._writer.folder.to
                error += (
                    f"its credentials and route to {to}"
                    if to
                    else "the volume of the run where it is mounted"
                )
            if readable and answer.problem in (*_UNREAD, "fetch-continues"):
                kept[member_id] = error
                log.warning("%s keeps its weights, version %d is not read: %s", name, version, error)
            else:
                failed[member_id] = error
                log.error("gave up publishing version %d to %s: %s", version, name, error)
        return kept, failed

    def _write(self, version: int, weights: WeightSource) -> Written | str:
        """Write a version; returns the problem if it cannot be written."""
        call_seconds, left = (times * self._timeout_seconds for times in (MAX_TIMEOUTS, WRITE_TIMEOUTS))
        deadline = time.monotonic() + left
        for attempt in (1, 2):
            try:
                return self._writer.write(version, weights.manifest, weights.stream, call_seconds, left)
            except OSError as error:
                late = isinstance(error, TimeoutError)
                advice = self._writer.folder.advice
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    advice = "Free space on the volume of the run"
                elif late:
                    advice += ", or raise weightSync.timeoutSeconds if it is only slow"
                problem = (
                    f"version {version} cannot be written to {self._writer.folder}: {first_line(error)}. "
                    f"{advice}; generators keep their weights meanwhile"
                )
                log.error("%s", problem)
            left = deadline - time.monotonic() - self._retry_seconds
            if attempt == 2 or late or left <= 0:
                break
            time.sleep(self._retry_seconds)
        return problem
