"""Publishes versions through files (:mod:`.weight_writer`): no process group, and no member waits for another one.

The weights may change once the version is written, before members have read it. A version that is sent again, to a member that
joins, is not written again. After an answer that a file cannot be read, the next version that is sent, also if it is the same one, is
written as a base, which no damage to the files before it concerns.

If the files cannot be written, nothing is sent and no member has failed: they generate with their versions until those are too old, and
the next version, or the next attempt at this one, is written once there is space.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from scalerl_api import endpoints, wire
from scalerl_trainer.errors import first_line
from scalerl_trainer.publish.actor_control import ActorControl, Answer
from scalerl_trainer.publish.publisher import Outcome, PhaseSeconds, Weights, decode_received, stats_of
from scalerl_trainer.publish.weight_writer import WeightWriter, Written

log = logging.getLogger(__name__)


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

    def close(self) -> None:
        """Delete the files, at the end of the run."""
        self._writer.remove()

    def publish(
        self,
        version: int,
        weights: Weights,
        members: list[wire.Member],
        have_read: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Publish ``version`` to ``members``.

        Args:
            have_read: called once the weights may change.

        Raises:
            SourceError: the stream of weights differs from its manifest.
        """
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
        failed = {m: answer.error for m, answer in answers.items() if not answer.ok}
        for member_id, error in failed.items():
            log.error("gave up publishing version %d to %s: %s", version, names[member_id], error)
        if any(answer.problem == "fetch-failed" for answer in answers.values()):
            self._writer.refuse()
        received = {m: decode_received(a.body) for m, a in answers.items() if a.body is not None}
        stats = stats_of(list(received.values()), clock, time.perf_counter() - started)
        stats |= {
            "publish_rounds": float(isinstance(written, Written)),
            "publish_members": float(len(received)),
            "publish_failed_members": float(len(failed)),
            "publish_bytes": float(written.bytes if isinstance(written, Written) else 0),
        }
        problem = written if isinstance(written, str) else next(iter(failed.values()), "")
        slow = any(answer.problem == "fetch-continues" for answer in answers.values())
        return Outcome(version, list(received), list(failed), problem, stats, slow)

    def _write(self, version: int, weights: Weights) -> Written | str:
        """Write a version; returns the problem if it cannot be written."""
        for attempt in (1, 2):
            try:
                return self._writer.write(version, weights.manifest, weights.stream)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                problem = (
                    f"version {version} cannot be written to {self._writer.folder}: {first_line(error)}. "
                    f"{'Free space on' if full else 'Check'} the volume of the run; generators keep their weights meanwhile"
                )
                log.error("%s", problem)
            if attempt == 1:
                time.sleep(self._retry_seconds)
        return problem
