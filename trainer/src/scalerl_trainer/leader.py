"""Rank 0's loop: polls the coordinator for the next action and sends commands to all ranks (:mod:`.worker`).

Rank 0 sends a ``SYNC`` at least every :data:`POLL_SECONDS` while it waits for other processes, so that it detects a signal
to any rank, or a lost rank, within that time. A rank that raises an exception exits; the others lose their connection to it
and exit too, and all restart from the last checkpoint.

A version with which no probed generator computes what the trainer computes is not committed: no generator gets work with it,
its checkpoint is written, and all ranks exit (:class:`.errors.PublishRefusedError`).

After an update, rank 0 reports the step, starts to publish if the coordinator's reply requests it, writes a checkpoint if one is
due, and exports the model if the version is evaluated. Once the run is ending, the checkpoint comes first: publishing and
evaluating the last weights may take long, and an interrupted run must not wait for them.

A publish, with the generators' part of its probe and its commit, runs on a thread beside the forward and backward of the next step.
The next update waits until the publish has read the weights, and the report of the next step until it is committed, so the
coordinator sees one version after the other. While an evaluation holds a publish, the steps that are closed are trained.

A checkpoint that fails during training is tried again when the volume has more space, at the latest when the next one is due.
At the end of training, rank 0 keeps the weights in memory until they are saved (:meth:`Leader._save_last`).
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from scalerl_api import wire
from scalerl_api.exports import Exports
from scalerl_api.load import SpecError
from scalerl_api.mismatch import RATIO, SAMPLED
from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.algo.distillation import TEACHER_KL
from scalerl_trainer.algo.kl import REFERENCE_KL
from scalerl_trainer.algo.mismatch import BEYOND_RATIO, by_position
from scalerl_trainer.background import in_background, new_stream, on_stream
from scalerl_trainer.batch import UNUSABLE_FRACTION, Staleness
from scalerl_trainer.checkpoint import CheckpointError
from scalerl_trainer.checkpointer import FailedSave, held_by
from scalerl_trainer.coordinator_client import CoordinatorUnreachable, Unresumable, VolumeFull
from scalerl_trainer.engine import StepStats
from scalerl_trainer.errors import DivergedError, PublishRefusedError
from scalerl_trainer.export import exports_adapter
from scalerl_trainer.exporter import Exporter
from scalerl_trainer.models.lora import PEFT, PUBLISHED, AdapterNames
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.file_publisher import FilePublisher
from scalerl_trainer.publish.probe import ProbeSequence, probe
from scalerl_trainer.publish.publisher import Publisher, Weights
from scalerl_trainer.tensor_files import TensorInfo
from scalerl_trainer.utilization import utilization
from scalerl_trainer.worker import Command, Trained, Worker

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
UPLOAD_SECONDS = 1800.0
"""Time to finish the upload of the last checkpoint at the end of the run."""
STOPPED_UPLOAD_SECONDS = 150.0
"""The same once the trainer is asked to stop, within the 300 s of grace of its pod."""
START_EVERY = 4
"""Versions between two comparisons with the start of the run: of a tiny model, one takes a few per cent of a step."""
MAX_CONSECUTIVE_SKIPPED_STEPS = 3
"""This many consecutive skipped steps are not caused by a bad batch, but by broken weights or generators."""
MAX_EQUAL_PUBLISH_FAILURES = 3
"""This many consecutive publishes that fail in the same way are not a passing fault, before any generator held weights or if
the only answers to probes disagree."""


@dataclass(frozen=True)
class _ProbeResult:
    """Result of the probes after a publish."""

    stats: dict[str, float] = field(default_factory=dict)
    """Statistics for metrics.jsonl."""
    refused: list[str] = field(default_factory=list)
    """Ids of the members that must not generate with the version."""
    silent: list[str] = field(default_factory=list)
    """Ids of the members that did not answer, if all that did disagree: whether the weights are at fault is open, and these
    get no work with the version either."""
    problem: str = ""
    """The measured mismatch, if it is above the limit; else empty."""


@dataclass(frozen=True)
class _Published:
    """A publish that is committed."""

    version: int
    members: list[wire.Member]
    held: bool
    """Whether a generator holds the version."""
    probed: _ProbeResult
    error: str
    """Why the first member did not get the weights; empty if all did."""
    failed: bool = False
    """Whether a member failed, and none that failed continues to read the weights."""


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
        publisher: Publisher | FilePublisher,
        control: ActorControl,
        exporter: Exporter,
        load_run: Callable[[], ScaleRLRun],
        *,
        own_directory: bool = False,
    ) -> None:
        self._worker = worker
        self._load_run = load_run
        self._scaling_mode = worker.spec.autoscaling.mode
        self._exporter = exporter
        self._own_directory = own_directory
        self._reported_exports: Exports | None = None
        self._publisher = publisher
        self._control = control
        self._coordinator = worker.coordinator
        self._published = -1
        self._consecutive_skipped_steps = 0
        self._probed: set[str] = set()
        """Ids of the members that computed the same as the trainer in a probe."""
        self._silent: set[str] = set()
        """Names of the members that did not answer while all others disagreed, and have not answered since."""
        self._agreed_version = -1
        """The newest version at which a member did, or with which other members generate."""
        self._held_weights = False
        """Whether a generator has held weights of this run."""
        self._publish_failures: list[str] = []
        """Cause of each of the last publishes, which no generator could use; equal, and fewer than the maximum."""
        self._publishing: Future[_Published] | None = None
        """The publish in progress."""
        self._publish_stream = new_stream(worker.engine.device)
        self._unchecked: _Published | None = None
        """A publish that is over and of which :meth:`_check_publish` has not been called."""
        self._publish_wait_seconds = 0.0
        self._wait_seconds = 0.0
        self._checkpoint_seconds = 0.0
        self._export_seconds = 0.0
        self._checkpoint_failures = 0
        self._failed: FailedSave | None = None
        """The last attempt to write a checkpoint, if it failed."""
        self._holding = False
        """Training has ended, and the last version is in no checkpoint yet."""
        self._saved_first: Callable[[], None] | None = None
        """Called once the first checkpoint is on disk."""
        self._uncommitted: tuple[int, list[int]] | None = None
        """Step and kept steps of a checkpoint that is on disk and not acknowledged by the coordinator."""
        self._copied = -1
        """With ``own_directory``, the newest copy that was reported to the coordinator, or may have been."""
        self._answered = time.monotonic()
        """When the coordinator last answered."""
        self._points = -1
        """Number of evaluation points passed to the exporter; -1 to pass them again."""
        self._coordinator.while_full = self._sync_while_full

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
            self._command(Command.REJECTED)
            raise
        if welcome.next_step != worker.version:
            raise RuntimeError(f"the coordinator resumes at step {welcome.next_step}, not {worker.version}")
        if self._own_directory and (known := self._coordinator.exports()) is not None:
            self._exporter.restore(known)
        self._published = welcome.published_version
        self._consecutive_skipped_steps = welcome.consecutive_skipped_steps
        log.info("registered: version %d, published %d", worker.version, self._published)
        if saved_first is not None:
            self._saved_first = saved_first
            self._save()
            self._finish_checkpoint()
        while not self._sync_and_check_stop():
            self._exported()
            if self._publishing is not None and self._publishing.done():
                self._finish_publish()
            self._check_publish()
            reply = self._next()
            if self._exporter.waiting and reply.points != self._points:
                self._evaluated()
            if reply.reason:
                self._save_at_end()
            if reply.measured and not worker.stop.is_set() and self._exporter.wants(worker.version):
                self._export()
            match reply.action:
                case wire.NextAction.TRAIN:
                    published_now = self._train(reply.step)
                    self._check_publish()
                    if published_now and worker.version > self._published:
                        self._publish()
                    if worker.version % worker.spec.checkpoint.every_steps == 0 or self._may_retry():
                        self._save()
                case wire.NextAction.PUBLISH:
                    if not self._finish_publish():
                        self._publish()
                case wire.NextAction.WAIT:
                    pass
                case wire.NextAction.FINISH:
                    log.info("finish: %s", reply.reason)
                    break
        # First, since a member that is lost may delay the end of a publish beyond the time that a stop leaves.
        unsaved = self._save_last()
        self._finish_publish()
        self._check_publish()
        unsaved = self._finish_upload() or unsaved
        self._command(Command.EXIT)
        self._evaluated()
        self._exporter.close(worker.stop.is_set)
        self._exported(retry=True)
        if unsaved:
            raise CheckpointError(unsaved)

    # --- commands -----------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        self._worker.ranks.broadcast(command, Command)

    def _sync_and_check_stop(self) -> bool:
        """Sync with all ranks, finish a flushed checkpoint; returns whether any rank is to stop."""
        self._command(Command.SYNC)
        stop, flushed = self._worker.sync()
        if flushed:
            self._finish_checkpoint()
        self._commit()
        return stop

    def _sync_while_full(self) -> None:
        """Sync during a call that waits for the coordinator's volume, or the other ranks' collective would time out."""
        self._command(Command.SYNC)
        stop, _ = self._worker.sync()
        if stop:  # ends the retries of the call, as a signal to this rank does
            self._worker.stop.set()

    def _next(self, wait_seconds: float = POLL_SECONDS) -> wire.Next:
        """The coordinator's next action, or WAIT if it does not answer.

        Raises:
            CoordinatorUnreachable: it has not answered for :data:`COORDINATOR_TIMEOUT_SECONDS`.
        """
        begin = time.perf_counter()
        try:
            reply = self._coordinator.next(self._worker.version, wait_seconds, self._uploads())
            self._answered = time.monotonic()
            return reply
        except CoordinatorUnreachable as error:
            self._no_answer(error)
            return wire.Next(action=wire.NextAction.WAIT, step=self._worker.version, points=self._points)
        finally:
            self._wait_seconds += time.perf_counter() - begin

    def _uploads(self) -> wire.Uploads | None:
        uploader = self._worker.checkpointer.uploader
        return None if uploader is None else wire.Uploads(version=uploader.uploaded, problem=uploader.problem)

    def _no_answer(self, error: CoordinatorUnreachable) -> None:
        if isinstance(error, VolumeFull):  # it answers, and nothing is lost meanwhile
            self._answered = time.monotonic()
            log.warning("waiting until the coordinator can write its volume: %s", error)
            self._worker.stop.wait(POLL_SECONDS)
            return
        silent_seconds = time.monotonic() - self._answered
        if silent_seconds > COORDINATOR_TIMEOUT_SECONDS:
            raise error
        log.warning("the coordinator has not answered for %.0f s: %s", silent_seconds, error)
        self._worker.stop.wait(min(2.0, 0.2 + silent_seconds / 10))

    # --- steps --------------------------------------------------------------------------------------------

    def _train(self, step: int) -> bool:
        """Train and report one step; returns whether to publish the new version now."""
        worker = self._worker
        if step != worker.version:
            raise RuntimeError(
                f"the coordinator requests step {step}, this trainer has version {worker.version}"
            )
        self._command(Command.TRAIN)
        trained = worker.train()
        self._finish_publish()
        step_stats, staleness, seconds = trained.step_stats, trained.staleness, trained.seconds
        seconds["publish_wait_seconds"] += self._publish_wait_seconds
        self._publish_wait_seconds = 0.0
        phases = {
            **seconds,
            "wait_seconds": self._wait_seconds,
            "checkpoint_seconds": self._checkpoint_seconds,
            "export_seconds": self._export_seconds,
        }
        self._wait_seconds = self._checkpoint_seconds = self._export_seconds = 0.0
        stats = trained.stats | _stats(step_stats, staleness) | phases
        stats["checkpoint_failures"] = float(self._checkpoint_failures)
        if (uploads := self._uploads()) is not None:
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
                self._command(Command.DIVERGED)
                raise DivergedError(
                    f"step {step} was skipped because {reason}: the trainer's log-probabilities of {fraction:.0%} of its tokens are "
                    "not numbers or far from the generators'. The last checkpoint is good if one was written. Check the model's "
                    "weights and model.dtype"
                )
        if self._consecutive_skipped_steps >= MAX_CONSECUTIVE_SKIPPED_STEPS:
            self._command(Command.DIVERGED)
            raise DivergedError(
                f"{self._consecutive_skipped_steps} consecutive steps were skipped, the last one (step {step}) because {reason}. "
                "The last checkpoint is good. Check that generators hold the published weights and sample at the recipe's "
                "temperature, lower the learning rate, or inspect the data"
            )
        return publish

    # --- weights ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Start to publish the current version to the members that the coordinator lists, unless an evaluation holds that.

        The trainer's part of the probe comes first, on this thread: it is a collective, like the forward pass of a step.
        """
        worker = self._worker
        permit = self._permit()
        if permit is None:
            return
        # Also from an earlier trainer: a member that joins them and disagrees is at fault, not the weights.
        if permit.holders:
            self._agreed_version = worker.version
        begin = time.perf_counter()
        scores: list[torch.Tensor] = []
        stats: dict[str, float] = {}
        if permit.members and worker.probes:
            scores = self._score(worker.probes)
            if worker.engine.start is not None and worker.version % START_EVERY == 0:
                self._command(Command.SCORE)
                stats |= worker.engine.start_kl()
        scored_seconds = time.perf_counter() - begin
        self._publish_wait_seconds += scored_seconds
        probing = partial(self._probe, worker.version, list(worker.probes), scores, stats, scored_seconds)
        reading = Future[None]()
        work = partial(self._publish_to, worker.version, permit.members, probing, reading)
        if not worker.reads_beside:
            self._publishing = Future()
            self._publishing.set_result(work())
            return
        worker.reading = reading
        self._publishing = in_background(
            "publish", on_stream(work, self._publish_stream), worker.engine.device
        )

        def end_reading(_: Future[_Published]) -> None:
            if not reading.done():  # it failed before it had read the weights
                reading.set_result(None)

        self._publishing.add_done_callback(end_reading)

    def _publish_to(
        self,
        version: int,
        members: list[wire.Member],
        probing: Callable[[list[wire.Member]], _ProbeResult],
        reading: Future[None],
    ) -> _Published:
        """Publish, probe and commit. On the publish thread; ``reading`` is done once the weights may change."""
        worker = self._worker

        def have_read() -> None:
            if worker.engine.device.type == "cuda":  # copies may be queued on this thread's stream
                torch.cuda.current_stream(worker.engine.device).synchronize()
            reading.set_result(None)

        outcome = self._publisher.publish(version, self._weights(), members, have_read)
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

    def _finish_publish(self) -> bool:
        """Wait until the publish in progress is committed; returns whether there was one. Raises what it raised."""
        publishing = self._publishing
        if publishing is None:
            return False
        begin = time.perf_counter()
        while not wait([publishing], POLL_SECONDS).done:
            self._sync_and_check_stop()
        self._publish_wait_seconds += time.perf_counter() - begin
        self._publishing = None
        self._unchecked = done = publishing.result()
        self._published = max(self._published, done.version)
        self._worker.metrics.published_version.set(self._published)
        return True

    def _check_publish(self) -> None:
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

    def _probe(
        self,
        version: int,
        sequences: list[ProbeSequence],
        scores: list[torch.Tensor],
        stats: dict[str, float],
        scored_seconds: float,
        holders: list[wire.Member],
    ) -> _ProbeResult:
        """Compare the log-probabilities of members that hold ``version`` with ``scores``, the trainer's.

        Probed are each member after its first weights, and one other, in turn. If all of them disagree, the other holders are
        probed too: a member that is broken by itself must not end the run. A probe without an answer is no evidence.

        Args:
            stats: measured with the scores, in ``scored_seconds``.
        """
        if not holders or not scores:
            return _ProbeResult()
        begin = time.perf_counter()
        turn = holders[version % len(holders)]
        chosen = [turn, *(m for m in holders if m is not turn and m.member_id not in self._probed)]
        limit = self._worker.spec.probe_limit
        measured = probe(self._control, chosen, version, sequences, scores)
        k3_n, refused = measured.k3_n, measured.above(limit)
        others = [m for m in holders if m not in chosen]
        if refused and len(refused) == len(k3_n) and others and self._agreed_version != version:
            more = probe(self._control, others, version, sequences, scores)
            k3_n, refused = k3_n | more.k3_n, [*refused, *more.above(limit)]
        agreed = k3_n.keys() - set(refused)
        if agreed:
            self._probed |= agreed
            self._agreed_version = version
        names = {m.member_id: m.name for m in holders}
        problem, silent = "", list[str]()
        if refused:
            measures = ", ".join(f"{names[m]} {float(k3_n[m].mean()):.3g}" for m in refused[:5])
            problem = (
                f"after the publish of version {version}, generators compute something else than the trainer: KL of "
                f"{measures} nats per token ({len(refused)} of {len(k3_n)} probed are above the limit of {limit:g}, "
                "weightSync.probeLimit)"
            )
            if (
                self._agreed_version != version
            ):  # all holders are probed; without a silent one, the weights are at fault
                silent = [m.member_id for m in holders if m.member_id not in k3_n]
                problem += f"; {len(silent)} did not answer" if silent else ""
            log.error("%s", problem)
        seconds = {"probe_seconds": scored_seconds + time.perf_counter() - begin}
        return _ProbeResult(measured.stats | stats | seconds, refused, silent, problem)

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
        if probed.refused and self._silent and self._agreed_version != done.version:
            if self._repeats("silent"):
                message = (
                    f"{probed.problem}; the other generators did not answer the probes of {MAX_EQUAL_PUBLISH_FAILURES} publishes "
                    "in a row"
                )
        elif probed.refused and self._agreed_version != done.version:
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
            unsaved = self._save_last() or (self._finish_upload() if self._own_directory else "")
            message += f"; {unsaved}" if unsaved else ""
        self._command(Command.PUBLISH_REFUSED)
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
            begin = time.perf_counter()
            try:
                permit = self._coordinator.publish_begin(self._worker.version, 0.0)
                self._answered = time.monotonic()
                return permit if permit.ready else None
            except CoordinatorUnreachable as error:
                self._no_answer(error)
            finally:
                self._wait_seconds += time.perf_counter() - begin
            if self._sync_and_check_stop():
                return None

    def _weights(self) -> Weights:
        """The current weights, or the adapters, as they are published."""
        worker, lora = self._worker, self._worker.spec.trainer.lora
        adapters = lora is not None and lora.publish == "Adapter"
        shapes = worker.engine.adapter_shapes(PUBLISHED) if adapters else worker.engine.checkpoint_shapes()
        manifest = [wire.TensorSpec(name, worker.spec.model.dtype, list(shape)) for name, shape in shapes]
        if lora is not None and adapters:
            return Weights(manifest, partial(self._adapters, PUBLISHED), lora.alpha / lora.rank)
        return Weights(manifest, self._stream)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._worker.spec.trainer.zero_stage == 3:  # otherwise rank 0 has whole parameters
            self._command(Command.GATHER)
        return self._worker.gather()

    def _adapters(self, names: AdapterNames) -> Iterator[tuple[str, torch.Tensor]]:
        if self._worker.spec.trainer.zero_stage == 3:
            self._command(Command.GATHER_ADAPTERS)
        return self._worker.engine.gather_adapters(names)

    def _score(self, sequences: Sequence[ProbeSequence]) -> list[torch.Tensor]:
        self._command(Command.SCORE)
        scored = self._worker.engine.logprobs([one.sequence for one in sequences], temperature=1.0)
        return scored.per_sequence()

    def _export(self) -> None:
        """Export the current weights; the exporter handles failures."""
        worker, adapters = self._worker, exports_adapter(self._worker.spec) is not None
        shapes = worker.engine.adapter_shapes(PEFT) if adapters else worker.engine.checkpoint_shapes()
        infos = [TensorInfo(name, getattr(torch, worker.spec.model.dtype), shape) for name, shape in shapes]
        self._export_seconds += self._exporter.write(
            worker.version,
            infos,
            lambda: (tensor for _, tensor in (self._adapters(PEFT) if adapters else self._stream())),
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

    # --- checkpoints --------------------------------------------------------------------------------------

    def _save_at_end(self) -> None:
        """Start a checkpoint while the run is ending, unless an attempt to save this version has just failed."""
        failed = self._failed
        if failed is None or failed.step != self._worker.version or self._may_retry():
            self._save()

    def _save_last(self) -> str:
        """Save the last version. If that fails, keep the weights in memory and retry until it succeeds or SIGTERM
        arrives, which leaves one more attempt. Returns what is lost, empty if nothing is.

        Raises:
            CoordinatorUnreachable: the checkpoint is on disk, but the coordinator does not acknowledge it.
        """
        worker, stop = self._worker, False
        while True:
            self._save()
            self._finish_checkpoint()
            if worker.checkpointer.last_step == worker.version:
                self._holding = False
                self._commit(retry=True)
                return ""
            assert self._failed is not None
            if stop:
                saved = worker.checkpointer.committed_step
                lost = "all updates are" if saved is None else f"all updates since version {saved} are"
                return f"version {worker.version} could not be saved, {lost} lost: {self._failed.reason}"
            if not self._holding:
                self._holding = True
                log.error(
                    "training has stopped, and version %d is in no checkpoint. The weights stay in memory, and the trainer tries "
                    "again: free space on the volume %s, or end the trainer to give them up. %s",
                    *(worker.version, worker.checkpointer.root, held_by(worker.ranks.world)),
                )
            stop = self._wait_to_retry()

    def _wait_to_retry(self) -> bool:
        """Wait until the next attempt to save the last version; returns whether it is the last one."""
        assert self._failed is not None
        reported, timings = -math.inf, self._worker.checkpointer.timings
        while not self._may_retry():
            if self._sync_and_check_stop():
                time.sleep(timings.last_retry)
                return True
            if time.monotonic() - reported >= timings.retry:  # the coordinator may have restarted
                reported = time.monotonic()
                self._report_failure()
            self._worker.stop.wait(POLL_SECONDS)
        return self._sync_and_check_stop()

    def _may_retry(self) -> bool:
        """Whether the last checkpoint failed and another attempt may succeed."""
        if self._failed is None:
            return False
        checkpointer = self._worker.checkpointer
        return self._failed.may_retry(checkpointer.volume(), checkpointer.timings)

    def _save(self) -> None:
        """Start a checkpoint of the current version, unless there is one. A failure is counted, not raised."""
        worker = self._worker
        self._finish_checkpoint()
        if worker.checkpointer.last_step == worker.version:
            return
        begin = time.perf_counter()
        try:
            snapshot_reply = self._coordinator.checkpoint_begin(worker.version, retry=not self._holding)
        except CoordinatorUnreachable as error:
            self._save_failed(str(error))
            return
        self._command(Command.SAVE)
        # Only autoscaling returns a run to its best checkpoint; without it, do not keep one.
        best = -1 if self._read_scaling_mode() == "Off" else snapshot_reply.best_version
        problem = worker.checkpointer.start(worker.version, snapshot_reply.snapshot, best)
        self._checkpoint_seconds += time.perf_counter() - begin
        if problem is not None:
            self._save_failed(problem)

    def _read_scaling_mode(self) -> str:
        """``spec.autoscaling.mode``, read again from the run file because an edit of it restarts no process."""
        try:
            self._scaling_mode = self._load_run().spec.autoscaling.mode
        except SpecError as error:
            log.warning(
                "cannot read the run file, keeping spec.autoscaling.mode %s: %s", self._scaling_mode, error
            )
        return self._scaling_mode

    def _finish_upload(self) -> str:
        """Wait until the newest checkpoint is in the object store, for :data:`UPLOAD_SECONDS`, or :data:`STOPPED_UPLOAD_SECONDS`
        after a signal; with ``own_directory`` until the signal. The exporter has its own time after that.

        Returns what is lost with this pod, empty if nothing is.
        """
        worker, uploader = self._worker, self._worker.checkpointer.uploader
        if uploader is None:
            return ""
        retry_seconds = worker.checkpointer.timings.retry
        deadline = math.inf if self._own_directory else time.monotonic() + UPLOAD_SECONDS
        reported = time.monotonic()
        while uploader.busy and time.monotonic() < deadline:
            if self._sync_and_check_stop():
                deadline = min(deadline, time.monotonic() + STOPPED_UPLOAD_SECONDS)
            if self._own_directory and uploader.problem and time.monotonic() - reported >= retry_seconds:
                reported, self._holding = time.monotonic(), True
                self._failed = FailedSave(worker.version, uploader.problem, worker.checkpointer.volume())
                self._report_failure()
            time.sleep(0.2)
        self._holding = False
        self._commit(retry=True)
        saved = worker.checkpointer.committed_step
        if saved is not None and saved != uploader.uploaded:
            log.error(
                "checkpoint %d is on the volume only, the newest complete copy is %d: %s",
                *(saved, uploader.uploaded, uploader.problem or "its copy did not finish in time"),
            )
        try:  # what the coordinator's status says of the copies stays after this process
            self._coordinator.next(worker.version, 0.0, self._uploads())
        except CoordinatorUnreachable as error:
            log.warning("cannot report the last copy of a checkpoint: %s", error)
        if not self._own_directory or saved is None or saved == uploader.uploaded:
            return ""
        return f"checkpoint {saved} could not be copied, all updates since version {max(uploader.uploaded, 0)} are lost: {uploader.problem}"

    def _finish_checkpoint(self) -> None:
        """Finish the pending checkpoint, if there is one."""
        worker = self._worker
        if not worker.checkpointer.pending:
            return
        begin = time.perf_counter()
        self._command(Command.COMMIT_CHECKPOINT)
        saved = worker.checkpointer.finish()
        self._checkpoint_seconds += time.perf_counter() - begin
        if saved.error is not None:
            self._save_failed(saved.error, saved.step)
            return
        worker.metrics.checkpoints.labels("ok").inc()
        worker.metrics.checkpoint_step.set(saved.step)
        self._failed = None
        if self._saved_first is not None:
            self._saved_first()
            self._saved_first = None
        log.info("checkpoint %d is on disk (kept: %s)", saved.step, saved.kept_steps)
        if not self._own_directory:
            self._uncommitted = (saved.step, saved.kept_steps)
        self._commit()

    def _commit(self, *, retry: bool = False) -> None:
        """Report the newest checkpoint on disk to the coordinator, unless the coordinator has acknowledged it.

        The coordinator refuses while it cannot write its own files. Training continues then, and the next call retries.

        Args:
            retry: retry before this returns, and raise ``CoordinatorUnreachable`` after that; for the process's last call.
        """
        uploader = self._worker.checkpointer.uploader
        if self._own_directory and uploader is not None and uploader.uploaded > self._copied:
            self._copied = uploader.uploaded
            self._uncommitted = (uploader.uploaded, uploader.kept)
        if self._uncommitted is None:
            return
        step, kept_steps = self._uncommitted
        try:
            self._coordinator.checkpoint_commit(step, kept_steps, retry=retry)
        except CoordinatorUnreachable as error:
            if retry:
                raise
            log.warning(
                "checkpoint %d is on disk, but the coordinator did not acknowledge it: %s", step, error
            )
            return
        self._uncommitted = None

    def _save_failed(self, reason: str, step: int | None = None) -> None:
        """Count and report a failed checkpoint of ``step``; None for the current version."""
        step = self._worker.version if step is None else step
        self._checkpoint_failures += 1
        self._worker.metrics.checkpoints.labels("failed").inc()
        log.error("the checkpoint of version %d failed, keeping the last one: %s", step, reason)
        self._failed = FailedSave(step, reason, self._worker.checkpointer.volume())
        self._report_failure()

    def _report_failure(self) -> None:
        """Report the failed checkpoint to the coordinator, which shows it; best effort."""
        assert self._failed is not None
        try:
            self._coordinator.checkpoint_failed(
                self._worker.version, self._failed.reason, holding=self._holding
            )
        except CoordinatorUnreachable as error:
            log.warning("cannot report the failed checkpoint: %s", error)


def _without_numbers(error: str) -> str:
    """An error without what differs from one publish to the next: ports, versions, epochs, checksums.

    >>> _without_numbers("POST http://127.0.0.1:4711/: version 0, group epoch 1699: refused")
    'POST http://#.#.#.#:#/: version #, group epoch #: refused'
    """
    return re.sub(r"-?\d+", "#", error)


def _stats(step_stats: StepStats, staleness: Staleness) -> dict[str, float]:
    stats = {
        "loss": step_stats.loss,
        "grad_norm": step_stats.gradient_norm,
        "entropy": step_stats.entropy,
        "learning_rate": step_stats.learning_rate,
        "applied": float(step_stats.applied),
        "trained_tokens": float(0 if step_stats.skipped else step_stats.trainable_tokens),
        "computed_tokens": float(step_stats.tokens),
        "padding_fraction": step_stats.padding / max(1, step_stats.tokens + step_stats.padding),
        "staleness_mean": staleness.total / max(1, staleness.tokens),
        "staleness_max": float(staleness.largest),
        "guard_masked_tokens": float(step_stats.guard_masked_tokens),
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
    }
    if step_stats.ratios is not None:
        stats |= {
            "ratio_mean": step_stats.ratios.ratio_mean,
            "ratio_max": step_stats.ratios.ratio_max,
            "ratio_beyond_fraction": step_stats.ratios.beyond_fraction,
            "effective_sample_fraction": step_stats.ratios.effective_sample_fraction,
        }
        stats |= by_position(RATIO, step_stats.ratios_by_position)
    if step_stats.fresh_ratios_by_position:
        stats |= by_position(SAMPLED, step_stats.fresh_ratios_by_position)
    stats |= {
        f"grad_norm_{kind}": norm for kind, norm in step_stats.gradient_norms.items()
    } | step_stats.routing
    return stats | {
        name if name in (REFERENCE_KL, TEACHER_KL) else f"ratio_{name}_fraction": value
        for name, value in step_stats.loss_means.items()
    }
