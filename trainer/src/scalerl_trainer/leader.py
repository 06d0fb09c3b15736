"""Rank 0's loop: polls the coordinator for the next action and sends commands to all ranks (:mod:`.worker`).

Rank 0 sends a ``SYNC`` at least every :data:`POLL_SECONDS` while it waits for other processes, so that it detects a signal
to any rank, or a lost rank, within that time. A rank that raises an exception exits; the others lose their connection to it
and exit too, and all restart from the last checkpoint.

After an update, rank 0 reports the step, starts to publish if the coordinator's reply requests it, writes a checkpoint if one is
due, and exports the model if the version is evaluated. Once the run is ending, the checkpoint comes first: publishing and
evaluating the last weights may take long, and an interrupted run must not wait for them.

A publish runs beside the next step (:mod:`.publishes`). While an evaluation holds one, the steps that are closed are trained.
How checkpoints are written, tried again and copied: :mod:`.checkpoints.when_to_save`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from scalerl_api import wire
from scalerl_api.exports import Exports
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.algo.mismatch import BEYOND_RATIO
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.when_to_save import POLL_SECONDS, RunCheckpoints
from scalerl_trainer.coordinator_client import CoordinatorUnreachable, Unresumable
from scalerl_trainer.coordinator_silence import CoordinatorSilence
from scalerl_trainer.errors import DivergedError
from scalerl_trainer.export import exports_adapter
from scalerl_trainer.exporter import Exporter
from scalerl_trainer.models.lora import PEFT
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.publisher import Publisher
from scalerl_trainer.publishes import PermittedPublishes
from scalerl_trainer.shard_conversion import UNUSABLE_FRACTION
from scalerl_trainer.step_stats import stats_of_step
from scalerl_trainer.tensor_files import TensorInfo
from scalerl_trainer.utilization import utilization
from scalerl_trainer.worker import Command, Trained, Worker

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_SKIPPED_STEPS = 3
"""This many consecutive skipped steps are not caused by a bad batch, but by broken weights or generators."""


class Leader:
    """Rank 0's loop: calls the coordinator and the actors, and sends commands to the ranks.

    Args:
        load_run: reads the present run file.
        own_directory: the directory ends with this pod, and the coordinator cannot read it: a checkpoint counts once it is copied,
            and the exported models are reported.
    """

    def __init__(
        self,
        worker: Worker,
        publisher: Publisher,
        control: ActorControl,
        exporter: Exporter,
        load_run: Callable[[], ScaleRLRun],
        *,
        own_directory: bool = False,
    ) -> None:
        self._worker = worker
        self._coordinator = worker.coordinator
        self._exporter = exporter
        self._own_directory = own_directory
        self._reported_exports: Exports | None = None
        self._silence = CoordinatorSilence(worker.stop)
        self._checkpoints = RunCheckpoints(worker, load_run, own_directory)
        self._publishes = PermittedPublishes(
            worker, publisher, control, self._checkpoints, self._silence, own_directory
        )
        self._consecutive_skipped_steps = 0
        self._export_seconds = 0.0
        self._points = -1
        """Number of evaluation points passed to the exporter; -1 to pass them again."""

    def lead(self, snapshot: bytes | None, saved_first: Callable[[], None] | None) -> None:
        """Run from the hello to the end of the run, or to a stop.

        Args:
            snapshot: the coordinator's state in the loaded checkpoint; None without a checkpoint.
            saved_first: if given, write a checkpoint before the first step, and call this once a checkpoint is on disk.

        Raises:
            CheckpointError: the last version is in no checkpoint, and SIGTERM arrived.
            Unresumable: the coordinator cannot resume from this version; all ranks raise it.
            CoordinatorError, RankLost: the coordinator or a rank is lost.
            DivergedError: too many consecutive steps were skipped; all ranks raise it.
            PublishRefusedError: generators cannot use the published weights; all ranks raise it.
        """
        worker = self._worker
        try:
            welcome = self._coordinator.hello(worker.version, worker.ranks.world, snapshot)
        except Unresumable:
            self._worker.send(Command.REJECTED)
            raise
        if welcome.next_step != worker.version:
            raise RuntimeError(f"the coordinator resumes at step {welcome.next_step}, not {worker.version}")
        if self._own_directory and (known := self._coordinator.exports()) is not None:
            self._exporter.restore(known)
        self._publishes.published = welcome.published_version
        self._consecutive_skipped_steps = welcome.consecutive_skipped_steps
        log.info("registered: version %d, published %d", worker.version, self._publishes.published)
        if saved_first is not None:
            self._checkpoints.saved_first = saved_first
            self._checkpoints.save()
            self._checkpoints.finish_checkpoint()
        while not self._checkpoints.sync_and_check_stop():
            self._exported()
            if self._publishes.in_progress is not None and self._publishes.in_progress.done():
                self._publishes.finish_publish()
            self._publishes.check_publish()
            reply = self._next()
            if self._exporter.waiting and reply.points != self._points:
                self._evaluated()
            if reply.reason:
                self._checkpoints.save_at_end()
            if reply.measured and not worker.stop.is_set() and self._exporter.wants(worker.version):
                self._export()
            match reply.action:
                case wire.NextAction.TRAIN:
                    published_now = self._train(reply.step)
                    self._publishes.check_publish()
                    if published_now and worker.version > self._publishes.published:
                        self._publishes.publish()
                    if (
                        worker.version % worker.spec.checkpoint.every_steps == 0
                        or self._checkpoints.may_retry()
                    ):
                        self._checkpoints.save()
                case wire.NextAction.PUBLISH:
                    if not self._publishes.finish_publish():
                        self._publishes.publish()
                case wire.NextAction.WAIT:
                    pass
                case wire.NextAction.FINISH:
                    log.info("finish: %s", reply.reason)
                    break
        # First, since a member that is lost may delay the end of a publish beyond the time that a stop leaves.
        unsaved = self._checkpoints.save_last()
        self._publishes.finish_publish()
        self._publishes.check_publish()
        unsaved = self._checkpoints.finish_upload() or unsaved
        self._worker.send(Command.EXIT)
        self._evaluated()
        self._exporter.close(worker.stop.is_set)
        self._exported(retry=True)
        if unsaved:
            raise CheckpointError(unsaved)

    def _next(self, wait_seconds: float = POLL_SECONDS) -> wire.Next:
        """The coordinator's next action, or WAIT if it does not answer.

        Raises:
            CoordinatorUnreachable: it has been silent for too long (:class:`.CoordinatorSilence`).
        """
        with self._silence.waiting():
            try:
                reply = self._coordinator.next(
                    self._worker.version, wait_seconds, self._checkpoints.uploads()
                )
                self._silence.answered()
                return reply
            except CoordinatorUnreachable as error:
                self._silence.no_answer(error)
                return wire.Next(action=wire.NextAction.WAIT, step=self._worker.version, points=self._points)

    def _train(self, step: int) -> bool:
        """Train and report one step; returns whether to publish the new version now."""
        worker = self._worker
        if step != worker.version:
            raise RuntimeError(
                f"the coordinator requests step {step}, this trainer has version {worker.version}"
            )
        self._worker.send(Command.TRAIN)
        trained = worker.train()
        self._publishes.finish_publish()
        step_stats, staleness, seconds = trained.step_stats, trained.staleness, trained.seconds
        seconds["publish_wait_seconds"] += self._publishes.wait_seconds
        self._publishes.wait_seconds = 0.0
        phases = {
            **seconds,
            "wait_seconds": self._silence.take_waited_seconds(),
            "checkpoint_seconds": seconds["checkpoint_seconds"] + self._checkpoints.seconds,
            "export_seconds": self._export_seconds,
        }
        self._checkpoints.seconds = self._export_seconds = 0.0
        stats = trained.stats | stats_of_step(step_stats, staleness) | phases
        stats["checkpoint_failures"] = float(self._checkpoints.failures)
        if (uploads := self._checkpoints.uploads()) is not None:
            stats["checkpoint_uploaded"] = float(uploads.version)
        busy_seconds = seconds["forward_backward_seconds"] + seconds["optimizer_seconds"]
        engine = worker.engine
        mfu = utilization(
            *(engine.flops_per_token, step_stats.tokens, busy_seconds, worker.ranks.world),
            *(engine.settings.dtype, engine.device),
        )
        if mfu is not None:
            stats["mfu"] = mfu
        if step_stats.skipped:
            return self._skip(trained, step, stats, busy_seconds)
        self._consecutive_skipped_steps = 0
        if step_stats.guard_masked_tokens:
            log.warning(
                "step %d: %d tokens that would have had most of the step's squared gradient were left out of it",
                *(step, step_stats.guard_masked_tokens),
            )
        publish = self._coordinator.report(
            step, stats, busy_seconds, step_stats.trainable_tokens, sequences=trained.sequences
        )
        worker.metrics.show(stats)
        worker.metrics.tokens.inc(step_stats.trainable_tokens)
        worker.metrics.step_seconds.observe(sum(seconds.values()))
        for name, value in phases.items():
            worker.metrics.seconds.labels(name.removesuffix("_seconds")).inc(value)
        log.info(
            "step %d: reward %.3f loss %.4f grad_norm %.3f ratio_max %.2f staleness %.2f/%d tokens %d busy %.2f s",
            *(
                step,
                stats.get("reward_mean", math.nan),
                stats["loss"],
                stats["grad_norm"],
                stats["ratio_max"],
            ),
            *(stats["staleness_mean"], staleness.largest, step_stats.trainable_tokens, busy_seconds),
        )
        return publish

    def _skip(self, trained: Trained, step: int, stats: dict[str, float], busy_seconds: float) -> bool:
        """Report a skipped step, with the reason and the slots that have ratio outliers. Returns as :meth:`_train`.

        Raises:
            DivergedError: too many consecutive skipped steps, or one in which most log-probabilities are not numbers; all ranks
                raise it.
        """
        reason = trained.step_stats.skipped
        if trained.broken:
            worst = ", ".join(f"{tokens} in slot {slot}" for slot, tokens in trained.broken.most_common(5))
            reason += f"; tokens whose ratio is beyond {BEYOND_RATIO:g} or not a number: {worst}"
        log.error("skipped step %d, weights and optimizer are unchanged: %s", step, reason)
        finite = {name: value for name, value in stats.items() if math.isfinite(value)}
        publish = self._coordinator.report(step, finite, busy_seconds, 0, skipped=reason)
        self._worker.metrics.show(finite)
        self._consecutive_skipped_steps += 1
        stats_of = trained.step_stats
        if not math.isfinite(stats_of.loss) and stats_of.ratios is not None:
            fraction = stats_of.ratios.beyond_fraction
            if fraction > UNUSABLE_FRACTION:  # no later step can be better: the weights stay as they are
                self._worker.send(Command.DIVERGED)
                raise DivergedError(
                    f"step {step} was skipped because {reason}: the trainer's log-probabilities of {fraction:.0%} of its tokens are "
                    "not numbers or far from the generators'. The last checkpoint is good if one was written. Check the model's "
                    "weights and model.dtype"
                )
        if self._consecutive_skipped_steps >= MAX_CONSECUTIVE_SKIPPED_STEPS:
            self._worker.send(Command.DIVERGED)
            raise DivergedError(
                f"{self._consecutive_skipped_steps} consecutive steps were skipped, the last one (step {step}) because {reason}. "
                "The last checkpoint is good. Check that generators hold the published weights and sample at the recipe's "
                "temperature, lower the learning rate, or inspect the data"
            )
        return publish

    def _export(self) -> None:
        """Export the current weights; the exporter handles failures."""
        worker, adapters = self._worker, exports_adapter(self._worker.spec) is not None
        weights = worker.engine.weights
        shapes = weights.adapter_shapes(PEFT) if adapters else weights.checkpoint_shapes()
        infos = [TensorInfo(name, getattr(torch, worker.spec.model.dtype), shape) for name, shape in shapes]
        self._export_seconds += self._exporter.write(
            worker.version,
            infos,
            lambda: (
                tensor
                for _, tensor in (self._publishes.adapters(PEFT) if adapters else self._publishes.stream())
            ),
        )
        # An earlier incarnation of the trainer may have had this version evaluated already.
        self._points = -1

    def _evaluated(self) -> None:
        """Pass the evaluation points to the exporter, which keeps or deletes models by their reward."""
        try:
            points = self._coordinator.points()
            self._exporter.evaluated(points)
            self._points = len(points)
        except CoordinatorUnreachable as error:
            log.warning("cannot fetch the evaluation points: %s", error)

    def _exported(self, *, retry: bool = False) -> None:
        """Report the exported models if they have changed and the coordinator cannot read them; best effort."""
        status = self._exporter.status
        if not self._own_directory or status == self._reported_exports:
            return
        try:
            self._coordinator.exports(status, retry=retry)
            self._reported_exports = status
        except CoordinatorUnreachable as error:
            log.warning("cannot report the exported models: %s", error)
