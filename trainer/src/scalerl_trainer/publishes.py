"""Rank 0's publishes of weights: from the coordinator's permission to the commit, with the probes, and what ends the run.

A publish, with the generators' part of its probe and its commit, runs on a thread beside the forward and backward of the next step,
with a stream of its own on a GPU (:mod:`.background`).
The next update waits until the publish has read the weights, and the report of the next step until it is committed, so the
coordinator sees one version after the other.

A version with which no probed generator computes what the trainer computes is not committed: no generator gets work with it,
its checkpoint is written, and all ranks exit (:class:`.errors.PublishRefusedError`).
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch

from scalerl_api import wire
from scalerl_trainer.background import in_background, new_stream, on_stream
from scalerl_trainer.checkpoints.when_to_save import POLL_SECONDS, RunCheckpoints
from scalerl_trainer.coordinator_client import CoordinatorUnreachable
from scalerl_trainer.coordinator_silence import CoordinatorSilence
from scalerl_trainer.errors import PublishRefusedError
from scalerl_trainer.models.lora import AdapterNames
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.probe import Prober, ProbeResult, ProbeSequence
from scalerl_trainer.publish.published_weights import weights_to_publish
from scalerl_trainer.publish.publisher import Publisher
from scalerl_trainer.worker import Command, Worker

log = logging.getLogger(__name__)

START_EVERY = 4
"""Versions between two comparisons with the start of the run: of a tiny model, one takes a few per cent of a step."""
MAX_EQUAL_PUBLISH_FAILURES = 3
"""This many consecutive publishes that fail in the same way are not a passing fault, before any generator held weights or if
the only answers to probes disagree."""


@dataclass(frozen=True)
class _Published:
    """A publish that is committed."""

    version: int
    members: list[wire.Member]
    held: bool
    """Whether a generator holds the version."""
    probed: ProbeResult
    error: str
    """Why the first member did not get the weights; empty if all did."""
    failed: bool = False
    """Whether a member failed, and none that failed continues to read the weights."""


class PermittedPublishes:
    """Rank 0's publishes, one at a time.

    Args:
        own_directory: see :class:`.leader.Leader`.
    """

    def __init__(
        self,
        worker: Worker,
        publisher: Publisher,
        control: ActorControl,
        checkpoints: RunCheckpoints,
        silence: CoordinatorSilence,
        own_directory: bool,
    ) -> None:
        self._worker = worker
        self._coordinator = worker.coordinator
        self._publisher = publisher
        self._prober = Prober(control, worker.spec.probe_limit)
        self._checkpoints = checkpoints
        self._silence = silence
        self._own_directory = own_directory
        self.published = -1
        """The newest version that was published."""
        self.in_progress: Future[_Published] | None = None
        """The publish in progress."""
        self.wait_seconds = 0.0
        """That this thread waited for publishes, since the last report of a step."""
        self._publish_stream = new_stream(worker.engine.device)
        self._unchecked: _Published | None = None
        """A publish that is over and of which :meth:`check_publish` has not been called."""
        self._silent: set[str] = set()
        """Names of the members that did not answer while all others disagreed, and have not answered since."""
        self._held_weights = False
        """Whether a generator has held weights of this run."""
        self._publish_failures: list[str] = []
        """Cause of each of the last publishes, which no generator could use; equal, and fewer than the maximum."""

    def publish(self) -> None:
        """Start to publish the current version to the members that the coordinator lists, unless an evaluation holds that.

        The trainer's part of the probe comes first, on this thread: it is a collective, like the forward pass of a step.
        """
        worker = self._worker
        permit = self._permit()
        if permit is None:
            return
        # Also from an earlier trainer: a member that joins them and disagrees is at fault, not the weights.
        if permit.holders:
            self._prober.agreed_version = worker.version
        begin = time.perf_counter()
        scores: list[torch.Tensor] = []
        stats: dict[str, float] = {}
        if permit.members and worker.probes:
            scores = self._score(worker.probes)
            if worker.engine.start is not None and worker.version % START_EVERY == 0:
                self._worker.send(Command.SCORE)
                stats |= worker.engine.start_kl()
        scored_seconds = time.perf_counter() - begin
        self.wait_seconds += scored_seconds
        probing = partial(
            self._prober.check, worker.version, list(worker.probes), scores, stats, scored_seconds
        )
        reading = Future[None]()
        work = partial(self._publish_to, worker.version, permit.members, probing, reading)
        if not worker.reads_beside:
            self.in_progress = Future()
            self.in_progress.set_result(work())
            return
        worker.reading = reading
        self.in_progress = in_background(
            "publish", on_stream(work, self._publish_stream), worker.engine.device
        )

        def end_reading(_: Future[_Published]) -> None:
            if not reading.done():  # it failed before it had read the weights
                reading.set_result(None)

        self.in_progress.add_done_callback(end_reading)

    def _publish_to(
        self,
        version: int,
        members: list[wire.Member],
        probing: Callable[[list[wire.Member]], ProbeResult],
        reading: Future[None],
    ) -> _Published:
        """Publish, probe and commit. On the publish thread; ``reading`` is done once the weights may change."""
        worker = self._worker

        def have_read() -> None:
            if worker.engine.device.type == "cuda":  # copies may be queued on this thread's stream
                torch.cuda.current_stream(worker.engine.device).synchronize()
            reading.set_result(None)

        weights = weights_to_publish(worker.spec, worker.engine.weights, self.stream, self.adapters)
        outcome = self._publisher.publish(version, weights, members, have_read)
        stats = dict(outcome.stats)
        probed = probing([m for m in members if m.member_id in outcome.updated])
        stats |= probed.stats
        problem = "; ".join(filter(None, (outcome.error, probed.problem)))
        held = [m for m in outcome.updated if m not in (*probed.refused, *probed.silent)]
        failed = [*outcome.failed, *probed.silent]
        self._coordinator.publish_commit(
            version,
            held,
            failed,
            {name: value for name, value in stats.items() if math.isfinite(value)},
            probed.refused,
            problem,
            outcome.kept,
        )
        worker.metrics.show(stats)
        unusable = len(failed) + len(outcome.kept) + len(probed.refused)
        worker.metrics.publishes.labels("failed" if unusable or outcome.error else "ok").inc()
        worker.metrics.publish_members_failed.inc(unusable)
        worker.metrics.seconds.labels("publish").inc(stats["publish_seconds"])
        worker.metrics.publish_seconds.observe(stats["publish_seconds"])
        log.info(
            "published version %d to %d of %d in %.3f s (pause %.3f transfer %.3f load %.3f resume %.3f) probe %s",
            *(version, len(held), len(members), stats["publish_seconds"]),
            *(stats[f"publish_{phase}_seconds"] for phase in ("pause", "transfer", "load", "resume")),
            f"{stats['probe_kl']:.2e}" if "probe_kl" in stats else "not measured",
        )
        return _Published(
            version,
            members,
            bool(held),
            probed,
            outcome.error,
            bool(outcome.failed or outcome.kept) and not outcome.slow,
        )

    def finish_publish(self) -> bool:
        """Wait until the publish in progress is committed; returns whether there was one. Raises what it raised."""
        publishing = self.in_progress
        if publishing is None:
            return False
        begin = time.perf_counter()
        while not wait([publishing], POLL_SECONDS).done:
            self._checkpoints.sync_and_check_stop()
        self.wait_seconds += time.perf_counter() - begin
        self.in_progress = None
        self._unchecked = done = publishing.result()
        self.published = max(self.published, done.version)
        self._worker.metrics.published_version.set(self.published)
        return True

    def check_publish(self) -> None:
        """End the attempt if the last publish shows that no generator can use the weights. Raises as :meth:`_check_refused`."""
        done, self._unchecked = self._unchecked, None
        if done is None:
            return
        if done.held:
            self._held_weights = True
            self._publish_failures.clear()
            self._silent.clear()
        else:
            self._check_refused(done)

    def _check_refused(self, done: _Published) -> None:
        """End the attempt if a publish that no generator holds shows that none can use the weights.

        The step that was computed meanwhile is applied and reported, so the checkpoint is of the version after the refused one.

        Raises:
            PublishRefusedError: all generators disagreed, or :data:`MAX_EQUAL_PUBLISH_FAILURES` publishes in a row showed the
                same: those that answered disagreed, or the weights reached no generator, and none has ever held weights.
                All ranks raise it.
        """
        worker, probed = self._worker, done.probed
        message = ""
        names = {m.member_id: m.name for m in done.members}
        self._silent |= {names[i] for i in probed.silent}
        self._silent -= {names[i] for i in probed.refused}
        # A silent member is removed, and may be absent from the next publish: that is no evidence either.
        if probed.refused and self._silent and self._prober.agreed_version != done.version:
            if self._repeats("silent"):
                message = (
                    f"{probed.problem}; the other generators did not answer the probes of {MAX_EQUAL_PUBLISH_FAILURES} publishes "
                    "in a row"
                )
        elif probed.refused and self._prober.agreed_version != done.version:
            message = (
                f"{probed.problem}. Check that the generators' vLLM supports this model and runs with its dtype; if they compute "
                "with less precision on purpose (a quantized KV cache), raise weightSync.probeLimit"
            )
        elif done.members and not probed.refused:
            self._held_weights |= done.version > 0 or any(m.weight_version >= 0 for m in done.members)
            if not self._held_weights and done.failed and self._repeats(_without_numbers(done.error)):
                message = (
                    f"{MAX_EQUAL_PUBLISH_FAILURES} publishes in a row reached no generator, and none has ever held weights: "
                    f"{done.error}"
                )
        if not message:
            return
        if worker.version > 0:
            unsaved = self._checkpoints.save_last() or (
                self._checkpoints.finish_upload() if self._own_directory else ""
            )
            message += f"; {unsaved}" if unsaved else ""
        self._worker.send(Command.PUBLISH_REFUSED)
        raise PublishRefusedError(message)

    def _repeats(self, cause: str) -> bool:
        """Count a publish that no generator can use; returns whether it is the last of several with the same cause."""
        if self._publish_failures and self._publish_failures[-1] != cause:
            self._publish_failures.clear()
        self._publish_failures.append(cause)
        return len(self._publish_failures) >= MAX_EQUAL_PUBLISH_FAILURES

    def _permit(self) -> wire.PublishPermit | None:
        """The permission to publish now; None if a stop comes first, or while an evaluation needs the weights that members hold.

        An answer may be lost after the coordinator has given the permission, so it is asked until it answers.
        """
        while True:
            with self._silence.waiting():
                try:
                    permit = self._coordinator.publish_begin(self._worker.version, 0.0)
                    self._silence.answered()
                    return permit if permit.ready else None
                except CoordinatorUnreachable as error:
                    self._silence.no_answer(error)
            if self._checkpoints.sync_and_check_stop():
                return None

    def _score(self, sequences: Sequence[ProbeSequence]) -> list[torch.Tensor]:
        self._worker.send(Command.SCORE)
        scored = self._worker.engine.logprobs([one.sequence for one in sequences], temperature=1.0)
        return scored.per_sequence()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        worker = self._worker
        if worker.spec.trainer.zero_stage == 3:  # otherwise rank 0 has whole parameters
            worker.send(Command.GATHER)
        return worker.engine.weights.gather_checkpoint(worker.spec.publish_bucket_bytes)

    def adapters(self, names: AdapterNames) -> Iterator[tuple[str, torch.Tensor]]:
        if self._worker.spec.trainer.zero_stage == 3:
            self._worker.send(Command.GATHER_ADAPTERS)
        return self._worker.engine.weights.gather_adapters(names)


def _without_numbers(error: str) -> str:
    """An error without what differs from one publish to the next: ports, versions, epochs, checksums.

    >>> _without_numbers("POST http://127.0.0.1:4711/: version 0, group epoch 1699: refused")
    'POST http://#.#.#.#:#/: version #, group epoch #: refused'
    """
    return re.sub(r"-?\d+", "#", error)
