"""Rank 0's side of the loop: it asks the coordinator what to do and gives the order, all ranks follow (:mod:`.worker`).

Rank 0 waits for nobody outside for more than :data:`POLL_SECONDS` without a ``Meet``, so a rank that is
told to stop or dies is noticed within that. A rank that raises ends its process; the others lose their
connection to it and end too, and all come back from the last checkpoint.

After an update the order is: report the step, publish, checkpoint where due, export what is measured. Once the
run is ending the checkpoint comes first, because what follows (giving out the last weights, measuring them) may take
long, and whoever interrupts a run waits for the checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from scalerl_api import wire
from scalerl_api.load import SpecError
from scalerl_api.mismatch import RATIO, SAMPLED
from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.algo.mismatch import BEYOND_RATIO, by_position
from scalerl_trainer.batch import Staleness
from scalerl_trainer.checkpoint import CheckpointError
from scalerl_trainer.coordinator_client import CoordinatorUnreachable, Unresumable
from scalerl_trainer.engine import StepStats
from scalerl_trainer.errors import DivergedError
from scalerl_trainer.exporting import Exporter
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.publish.control import ActorControl
from scalerl_trainer.publish.probe import ProbeSequence, probe
from scalerl_trainer.publish.publisher import Publisher, Weights
from scalerl_trainer.tensor_files import TensorInfo
from scalerl_trainer.worker import Order, Trained, Worker

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
SKIPPED_STEPS_BROKEN = 3
"""So many skipped steps in a row are no bad item: the weights or the generators are bad."""


class Leader:
    """Talks to the coordinator and the actors, gives the orders."""

    def __init__(
        self,
        worker: Worker,
        publisher: Publisher,
        control: ActorControl,
        exporter: Exporter,
        load_run: Callable[[], ScaleRLRun],
    ) -> None:
        self._worker = worker
        self._load_run = load_run
        self._scaling_mode = worker.spec.autoscaling.mode
        self._exporter = exporter
        self._publisher = publisher
        self._control = control
        self._coordinator = worker.coordinator
        self._published = -1
        self._skipped_in_a_row = 0
        self._wait_seconds = 0.0
        self._checkpoint_seconds = 0.0
        self._export_seconds = 0.0
        self._checkpoint_failures = 0
        self._uncommitted: tuple[int, list[int]] | None = None
        self._answered = time.monotonic()
        self._points = -1
        """How many evaluations the exporter was given; -1: it has to be given them."""

    def lead(self, snapshot: bytes | None, save_now: bool) -> None:
        """From hello to the order to leave. ``save_now``: what was just learnt is in no checkpoint yet.

        Raises:
            CheckpointError: what was trained last is in no checkpoint.
            Unresumable: the coordinator does not go on from this version; all ranks raise it.
            CoordinatorError, RankLost, DivergedError: see the modules.
        """
        w = self._worker
        try:
            welcome = self._coordinator.hello(w.version, w.ranks.world, snapshot)
        except Unresumable:
            self._tell(Order.REFUSE)
            raise
        if welcome.next_step != w.version:
            raise RuntimeError(f"the coordinator goes on at step {welcome.next_step}, not {w.version}")
        self._published = welcome.published_version
        self._skipped_in_a_row = welcome.consecutive_skipped_steps
        log.info("hello: version %d, published %d", w.version, self._published)
        if save_now:
            self._save()
        while not self._told_to_stop():
            order = self._ask()
            if self._exporter.waiting and order.points != self._points:
                self._evaluated()
            if order.reason:  # the run is ending
                self._save()
            if order.measured and not w.stop.is_set() and self._exporter.wants(w.version):
                self._export()
            match order.action:
                case wire.NextAction.TRAIN:
                    self._train(order.step)
                    if w.version > self._published:
                        self._publish()
                    if w.version % w.spec.checkpoint.every_steps == 0:
                        self._save()
                case wire.NextAction.PUBLISH:
                    self._publish()
                case wire.NextAction.WAIT:
                    pass
                case wire.NextAction.FINISH:
                    log.info("finish: %s", order.reason)
                    break
        self._save()
        self._seal()
        self._commit(patient=True)
        self._tell(Order.LEAVE)
        self._evaluated()
        self._exporter.close(w.stop.is_set)
        if w.saver.last_step != w.version:
            raise CheckpointError(
                f"version {w.version} could not be saved; what was trained since the checkpoint before is lost"
            )

    # --- orders -------------------------------------------------------------------------------------------

    def _tell(self, order: Order) -> None:
        self._worker.ranks.from_leader(order)

    def _told_to_stop(self) -> bool:
        self._tell(Order.MEET)
        stop, sealed = self._worker.meet()
        if sealed:
            self._seal()
        self._commit()
        return stop

    def _ask(self, wait_seconds: float = POLL_SECONDS) -> wire.Next:
        """The coordinator's word; WAIT while it does not answer, for a limited time."""
        begin = time.perf_counter()
        try:
            order = self._coordinator.next(self._worker.version, wait_seconds)
            self._answered = time.monotonic()
            return order
        except CoordinatorUnreachable as error:
            self._unanswered(error)
            return wire.Next(action=wire.NextAction.WAIT, step=self._worker.version, points=self._points)
        finally:
            self._wait_seconds += time.perf_counter() - begin

    def _unanswered(self, error: CoordinatorUnreachable) -> None:
        silent = time.monotonic() - self._answered
        if silent > COORDINATOR_TIMEOUT_SECONDS:
            raise error
        log.warning("the coordinator has not answered for %.0f s: %s", silent, error)
        self._worker.stop.wait(min(2.0, 0.2 + silent / 10))

    # --- a step -------------------------------------------------------------------------------------------

    def _train(self, step: int) -> None:
        w = self._worker
        if step != w.version:
            raise RuntimeError(f"told to train step {step} while holding version {w.version}")
        self._tell(Order.TRAIN)
        trained = w.train()
        done, staleness, seconds = trained.done, trained.staleness, trained.seconds
        phases = {
            **seconds,
            "wait_seconds": self._wait_seconds,
            "checkpoint_seconds": self._checkpoint_seconds,
            "export_seconds": self._export_seconds,
        }
        self._wait_seconds = self._checkpoint_seconds = self._export_seconds = 0.0
        stats = trained.stats | _stats(done, staleness) | phases
        stats["checkpoint_failures"] = float(self._checkpoint_failures)
        busy_seconds = seconds["forward_backward_seconds"] + seconds["optimizer_seconds"]
        if done.skipped:
            self._skip(trained, step, stats, busy_seconds)
            return
        self._skipped_in_a_row = 0
        self._coordinator.report(step, stats, busy_seconds, done.trainable_tokens)
        w.metrics.show(stats)
        w.metrics.tokens.inc(done.trainable_tokens)
        w.metrics.step_seconds.observe(sum(seconds.values()))
        for name, value in phases.items():
            w.metrics.seconds.labels(name.removesuffix("_seconds")).inc(value)
        log.info(
            "step %d: reward %.3f loss %.4f grad_norm %.3f ratio_max %.2f staleness %.2f/%d tokens %d busy %.2f s",
            *(
                step,
                stats.get("reward_mean", math.nan),
                stats["loss"],
                stats["grad_norm"],
                stats["ratio_max"],
            ),
            *(stats["staleness_mean"], staleness.largest, done.trainable_tokens, busy_seconds),
        )

    def _skip(self, trained: Trained, step: int, stats: dict[str, float], busy_seconds: float) -> None:
        """The step is over without an update: a record says which rollouts were not trained on, and why.

        Raises:
            DivergedError: so many in a row are no bad item; all ranks raise it.
        """
        reason = trained.done.skipped
        if trained.broken:
            worst = ", ".join(f"{tokens} in slot {slot}" for slot, tokens in trained.broken.most_common(5))
            reason += f"; tokens beyond a ratio of {BEYOND_RATIO:g} or not a number: {worst}"
        log.error("step %d is skipped, weights and optimizer stay as they are: %s", step, reason)
        finite = {name: value for name, value in stats.items() if math.isfinite(value)}
        self._coordinator.report(step, finite, busy_seconds, 0, skipped=reason)
        self._worker.metrics.show(finite)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= SKIPPED_STEPS_BROKEN:
            self._tell(Order.BROKEN)
            raise DivergedError(
                f"{self._skipped_in_a_row} steps in a row were skipped; step {step}, the last, because {reason}. The last "
                "checkpoint is good: check that generators hold the published weights and sample at the recipe's "
                "temperature, lower the learning rate, or look at the data"
            )

    # --- weights ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Give the present version to everyone who holds less, once the coordinator lets it out."""
        w = self._worker
        members = self._permit()
        if members is None:
            return
        outcome = self._publisher.publish(w.version, Weights(self._manifest(), self._stream), members)
        stats = dict(outcome.stats)
        holders = [m for m in members if m.member_id in outcome.updated]
        if holders and w.probes:
            begin = time.perf_counter()
            stats |= probe(self._control, holders[w.version % len(holders)], w.version, w.probes, self._score)
            stats["probe_seconds"] = time.perf_counter() - begin
        self._coordinator.publish_commit(w.version, outcome.updated, outcome.failed, stats)
        self._published = max(self._published, w.version)
        w.metrics.show(stats)
        w.metrics.published_version.set(self._published)
        w.metrics.publishes.labels("failed" if outcome.failed else "ok").inc()
        w.metrics.publish_members_failed.inc(len(outcome.failed))
        w.metrics.seconds.labels("publish").inc(stats["publish_seconds"])
        w.metrics.publish_seconds.observe(stats["publish_seconds"])
        log.info(
            "published version %d to %d of %d in %.3f s (pause %.3f transfer %.3f load %.3f resume %.3f) probe %s",
            *(w.version, len(outcome.updated), len(members), stats["publish_seconds"]),
            *(stats[f"publish_{phase}_seconds"] for phase in ("pause", "transfer", "load", "resume")),
            f"{stats['probe_kl']:.2e}" if "probe_kl" in stats else "not measured",
        )

    def _permit(self) -> list[wire.Member] | None:
        """Whom to publish to; None when told to stop, or to finish, while waiting for it."""
        w = self._worker
        while True:
            begin = time.perf_counter()
            try:
                permit = self._coordinator.publish_begin(w.version, POLL_SECONDS)
                self._answered = time.monotonic()
                if permit.ready:
                    return permit.members
            except CoordinatorUnreachable as error:
                self._unanswered(error)
            finally:
                self._wait_seconds += time.perf_counter() - begin
            if self._told_to_stop() or self._ending():
                return None

    def _ending(self) -> bool:
        """Whether the run has been stopped in such a way that nothing more is published; if it is ending at all, what
        was trained is saved now."""
        order = self._ask(0.0)
        if order.reason:
            self._save()
        return order.action is wire.NextAction.FINISH

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._worker.spec.trainer.zero_stage == 3:  # else rank 0 has all it needs
            self._tell(Order.GATHER)
        return self._worker.gather()

    def _manifest(self) -> list[wire.TensorSpec]:
        dtype = self._worker.spec.model.dtype
        shapes = self._worker.engine.parameter_shapes()
        return [wire.TensorSpec(name, dtype, list(shape)) for name, shape in shapes]

    def _score(self, sequences: Sequence[ProbeSequence]) -> list[torch.Tensor]:
        self._tell(Order.SCORE)
        scored = self._worker.engine.logprobs(
            [
                PackedSequence(
                    s.token_ids[: s.prompt_tokens].tolist(), s.token_ids[s.prompt_tokens :].tolist()
                )
                for s in sequences
            ],
            temperature=1.0,
        )
        return scored.per_sequence()

    def _export(self) -> None:
        """The present weights as a model that others load; what fails is the exporter's."""
        infos = [TensorInfo(s.name, getattr(torch, s.dtype), tuple(s.shape)) for s in self._manifest()]
        version = self._worker.version
        self._export_seconds += self._exporter.write(
            version, infos, lambda: (tensor for _, tensor in self._stream())
        )
        self._points = -1  # an earlier trainer's version may have been evaluated already

    def _evaluated(self) -> None:
        try:
            points = self._coordinator.points()
            self._exporter.evaluated(points)
            self._points = len(points)
        except CoordinatorUnreachable as error:
            log.warning("the evaluations could not be asked for: %s", error)

    # --- checkpoints --------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Begin a checkpoint of the present version, unless there is one. A failure is counted, not raised."""
        w = self._worker
        self._seal()
        if w.saver.last_step == w.version:
            return
        begin = time.perf_counter()
        try:
            begun = self._coordinator.checkpoint_begin(w.version)
        except CoordinatorUnreachable as error:
            self._save_failed(str(error))
            return
        self._tell(Order.SAVE)
        # Only a run whose curve is watched is taken back to where it was best: others save the space.
        best = -1 if self._read_scaling_mode() == "Off" else begun.best_version
        problem = w.saver.start(w.version, begun.snapshot, best)
        self._checkpoint_seconds += time.perf_counter() - begin
        if problem is not None:
            self._save_failed(problem)

    def _read_scaling_mode(self) -> str:
        """``spec.autoscaling.mode`` as the run file has it now: no process restarts for an edit of it."""
        try:
            self._scaling_mode = self._load_run().spec.autoscaling.mode
        except SpecError as error:
            log.warning("spec.autoscaling.mode counts as %s, as before: %s", self._scaling_mode, error)
        return self._scaling_mode

    def _seal(self) -> None:
        """Finish a checkpoint that was begun, if there is one."""
        w = self._worker
        if not w.saver.pending:
            return
        begin = time.perf_counter()
        self._tell(Order.SEAL)
        saved = w.saver.finish()
        self._checkpoint_seconds += time.perf_counter() - begin
        if saved.error is not None:
            self._save_failed(saved.error)
            return
        w.metrics.checkpoints.labels("ok").inc()
        w.metrics.checkpoint_step.set(saved.step)
        log.info("checkpoint %d is on disk (kept: %s)", saved.step, saved.kept_steps)
        self._uncommitted = (saved.step, saved.kept_steps)
        self._commit()

    def _commit(self, *, patient: bool = False) -> None:
        """Tell the coordinator of the newest checkpoint on disk, unless it knows.

        It may refuse for as long as it cannot write its own files: training goes on meanwhile, and it is told again.
        ``patient``: the last word of this process, tried for as long as any other.
        """
        if self._uncommitted is None:
            return
        step, kept_steps = self._uncommitted
        try:
            self._coordinator.checkpoint_commit(step, kept_steps, patient=patient)
        except CoordinatorUnreachable as error:
            if patient:
                raise
            log.warning("checkpoint %d is on disk, but the coordinator did not take note: %s", step, error)
            return
        self._uncommitted = None

    def _save_failed(self, reason: str) -> None:
        self._checkpoint_failures += 1
        self._worker.metrics.checkpoints.labels("failed").inc()
        log.error("checkpoint of version %d failed, the one before stays: %s", self._worker.version, reason)


def _stats(done: StepStats, staleness: Staleness) -> dict[str, float]:
    stats = {
        "loss": done.loss,
        "grad_norm": done.gradient_norm,
        "entropy": done.entropy,
        "learning_rate": done.learning_rate,
        "applied": float(done.applied),
        "trained_tokens": float(0 if done.skipped else done.trainable_tokens),
        "computed_tokens": float(done.tokens),
        "padding_fraction": done.padding / max(1, done.tokens + done.padding),
        "staleness_mean": staleness.total / max(1, staleness.tokens),
        "staleness_max": float(staleness.largest),
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
    }
    if done.ratios is not None:
        stats |= {
            "ratio_mean": done.ratios.ratio_mean,
            "ratio_max": done.ratios.ratio_max,
            "ratio_beyond_fraction": done.ratios.beyond_fraction,
            "effective_sample_fraction": done.ratios.effective_sample_fraction,
        }
        stats |= by_position(RATIO, done.ratios_by_position)
    if done.fresh_ratios_by_position:
        stats |= by_position(SAMPLED, done.fresh_ratios_by_position)
    return stats | {f"ratio_{name}_fraction": value for name, value in done.loss_means.items()}
