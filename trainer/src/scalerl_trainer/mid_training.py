"""Mid-training: supervised steps (:mod:`.sft`) on worked solutions before RL, with separate checkpoints.

Mid-training checkpoints have the format of RL checkpoints, and are named by the number of supervised steps. A run with an
RL checkpoint has finished its mid-training; one without resumes from the newest mid-training checkpoint, or starts it.

A checkpoint that fails is tried again when the volume has more space, at the latest when the next one is due. Mid-training
ends, or stops, only when its last weights are in a checkpoint: until then, the ranks keep them in memory.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from scalerl_api.compute import supervised_tokens
from scalerl_api.paths import RunPaths
from scalerl_api.spec import PromptSpec, RunSpec
from scalerl_api.wire import INTERRUPTED
from scalerl_tasks import (
    TokenizerError,
)
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.checkpoints.load import CheckpointLoader
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.volume import STAGE, CheckpointStore
from scalerl_trainer.checkpoints.write import TIMINGS, Checkpointer, FailedSave, Timings, held_by
from scalerl_trainer.coordinator_client import Coordinator, CoordinatorUnreachable, Unresumable
from scalerl_trainer.engine import Engine, StepStats
from scalerl_trainer.errors import BadBatchError, MidTrainingError, Stopped
from scalerl_trainer.fence import Fence
from scalerl_trainer.mid_training_examples import held_out_examples, of_source, solved_pairs
from scalerl_trainer.mid_training_rows import append_row, keep_rows
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.sft import Progress, train_supervised

log = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 50


class MidTraining:
    """The mid-training of one run. All methods are collectives, except where noted.

    Args:
        poll_seconds: between two collectives while the ranks wait for space.
        report_seconds: between reports to the coordinator; the time of a killed trainer after its last report is not counted.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RunSpec,
        paths: RunPaths,
        ranks: Ranks,
        coordinator: Coordinator,
        stop: threading.Event,
        fence: Fence | None,
        *,
        timings: Timings = TIMINGS,
        poll_seconds: float = 5.0,
        report_seconds: float = 2.0,
    ) -> None:
        assert spec.warm_start is not None
        self._engine, self._spec, self._wanted = engine, spec, spec.warm_start
        self._paths, self._ranks, self._coordinator, self._stop = paths, ranks, coordinator, stop
        self._store = store = CheckpointStore(paths.mid_training, spec.checkpoint.keep, fence=fence)
        self._timings, self._poll_seconds, self._report_seconds = timings, poll_seconds, report_seconds
        otherwise = f"remove {paths.mid_training.root} to begin mid-training again"
        self._loader = CheckpointLoader(store, ranks, engine, otherwise, exchange_seconds=timings.exchange)
        self._checkpointer = Checkpointer(store, ranks, engine, timings=timings)
        self._failed: FailedSave | None = None
        """The last attempt to write a checkpoint, if it failed."""
        self._holding = False
        """Mid-training has ended, and its last weights are not written yet."""
        self._begun = self._reported = time.monotonic()

    def run(self) -> Progress:
        """Train from the newest checkpoint, or from step 0, until mid-training or the run's budget ends.

        Raises:
            Stopped: on all ranks, once ``stop`` is set on one rank or the run is interrupted; the state is saved.
            Unresumable: the coordinator refuses this trainer.
            MidTrainingError: too many examples are empty or longer than a micro-batch, the examples are not those of the
                checkpoint, the tokenizer does not fit the run, or the state in the checkpoint cannot be read.
            NoUsableCheckpoint: all mid-training checkpoints are damaged.
            CheckpointError: ``stop`` was set on one rank while the last weights could not be saved.
        """
        self._begun = self._reported = time.monotonic()
        self._hello()
        step = self._loader.load()
        self._checkpointer.continue_from(step)
        done = Progress()
        if step is not None:
            done = self._progress(step)
            log.info("mid-training continues after step %d, %d tokens", done.steps, done.tokens)
        if self._ranks.is_leader:
            keep_rows(self._paths.supervised_metrics, done.steps)
        wanted = self._wanted
        try:
            # For solutions only, which are encoded without a task's prompt settings.
            tokenizer = ModelTokenizer(self._paths.base_model, PromptSpec())
            held_out = held_out_examples(self._spec, self._paths.base_model)
            pairs = solved_pairs(self._spec, self._paths.base_model)
            done = of_source(done, self._spec, pairs.digest)
            if done.steps == 0:
                self._evaluate(held_out, done)
            done = train_supervised(
                self._engine,
                tokenizer,
                pairs,
                steps=wanted.steps,
                tokens=supervised_tokens(self._spec.budget),
                batch_size=wanted.batch_size,
                learning_rate=float(wanted.learning_rate),
                stop_at=float(wanted.stop_at_pass_rate) if wanted.stop_at_pass_rate else None,
                ranks=self._ranks,
                seed=self._spec.seed,
                progress=done,
                on_step=self._after_step,
            )
        except (BadBatchError, TokenizerError) as error:
            raise MidTrainingError(f"warmStart: {error}") from error
        self._save_last(done)
        self._evaluate(held_out, done)
        self._with_leader(lambda: self._report(done, retry=True))
        if self._ranks.is_leader:
            log.info(
                "mid-training: %d steps, %d tokens, loss %.4f, pass rate %.3f, %.1f s",
                *(done.steps, done.tokens, done.loss, done.solved, time.monotonic() - self._begun),
            )
        return done

    def _progress(self, step: int) -> Progress:
        try:
            return msgspec.json.decode((self._store.directory(step) / STAGE).read_bytes(), type=Progress)
        except (OSError, msgspec.MsgspecError) as error:
            raise MidTrainingError(
                f"{self._paths.mid_training.checkpoint(step) / STAGE} cannot be read: {error}: it is of another release, or of "
                f"no mid-training; remove {self._paths.mid_training.root} to begin mid-training again"
            ) from error

    def _hello(self) -> None:
        """Register at version 0, so that the coordinator accepts reports or refuses this trainer before the first step."""

        def hello() -> str:
            try:
                self._coordinator.hello(0, self._ranks.world, None)
            except Unresumable as error:
                return str(error)
            return ""

        if refusal := self._with_leader(hello):
            raise Unresumable(refusal)

    def _with_leader(self, call: Callable[[], str]) -> str:
        """Rank 0's result of a call to the coordinator, on all ranks.

        While the coordinator's volume is full, the other ranks wait: a stop of one of them ends the retries of the call.
        """
        if not self._ranks.is_leader:
            while self._leader_waits(waiting=True):
                pass
            return self._ranks.broadcast(None, str)
        before = self._coordinator.while_full
        self._coordinator.while_full = lambda: self._leader_waits(waiting=True)
        try:
            result = call()
        finally:
            self._coordinator.while_full = before
        self._leader_waits(waiting=False)
        return self._ranks.broadcast(result, str)

    def _leader_waits(self, *, waiting: bool) -> bool:
        """Whether rank 0 still waits (its ``waiting``). Sets ``stop`` if it is set on any rank."""
        states = self._ranks.all_gather((waiting, self._stop.is_set()), tuple[bool, bool])
        if any(stop for _, stop in states):
            self._stop.set()
        return states[0][0]

    def _after_step(self, done: Progress, stats: StepStats, seconds: float) -> bool:
        reason, retry = "", False
        if self._ranks.is_leader:
            retry = self._failed is not None and self._failed.may_retry(
                self._checkpointer.volume(), self._timings
            )
            append_row(self._paths.supervised_metrics, _row(done, stats, seconds))
            if done.steps % _LOG_EVERY_STEPS == 0:
                log.info("mid-training step %d: loss %.4f", done.steps, stats.loss)
            if time.monotonic() - self._reported >= self._report_seconds:
                reason = self._report(done)
        states = self._ranks.all_gather(
            (self._stop.is_set(), self._checkpointer.flushed, reason, retry), tuple[bool, bool, str, bool]
        )
        reason, retry = states[0][2:]
        if all(flushed for _, flushed, _, _ in states):
            self._finish_checkpoint()
        if any(stop for stop, _, _, _ in states) or reason == INTERRUPTED:
            self._save_last(done)
            reason = self._report(done) if self._ranks.is_leader else ""
            after = self._ranks.all_gather((self._stop.is_set(), reason), tuple[bool, str])
            reason = after[0][1]  # during a hold, the interruption may have been cancelled
            if not any(stop for stop, _ in after) and reason != INTERRUPTED:
                return bool(reason)
            raise Stopped(f"stopped after step {done.steps} of mid-training; the next start continues there")
        if reason:
            log.warning("mid-training ends after step %d: %s", done.steps, reason)
            return True
        if done.steps % self._spec.checkpoint.every_steps == 0 or retry:
            self._save(done)
        return False

    def _evaluate(self, held_out: list[PackedSequence], done: Progress) -> None:
        """Record loss and expected pass rate on the held-out solutions, without sampling.

        Called before the first step and after the last.
        """
        ranks = self._ranks
        own = self._engine.logprobs(held_out[ranks.rank :: ranks.world], temperature=1.0).per_sequence()
        sums = [(float(one.double().sum()), len(one)) for one in own]
        every = [one for part in ranks.all_gather(sums, list[tuple[float, int]]) for one in part]
        if not ranks.is_leader or not every:
            return
        row = {
            "stage": "midTraining",
            "step": done.steps,
            "held_out_loss": -math.fsum(total for total, _ in every) / sum(count for _, count in every),
            "held_out_solved": math.fsum(math.exp(total) for total, _ in every) / len(every),
            "held_out_prompts": len(every),
            "tokens": done.tokens,
        }
        append_row(self._paths.supervised_metrics, row)
        log.info("mid-training step %d: held-out loss %.4f", done.steps, row["held_out_loss"])

    def _report(self, done: Progress, *, retry: bool = False) -> str:
        """Report the progress with the seconds since this incarnation began; called on rank 0 only.

        Returns the coordinator's reason to end the run, or an empty string.
        """
        self._reported = time.monotonic()
        seconds = self._reported - self._begun
        try:
            return self._coordinator.supervised(done.steps, done.tokens, seconds, retry=retry)
        except CoordinatorUnreachable as error:
            if retry:
                raise
            log.warning("step %d of mid-training is not reported yet: %s", done.steps, error)
            return ""

    def keep_weights(self, done: Progress, write: Callable[[], None]) -> None:
        """Write the weights after mid-training by ``write``, a collective that raises ``OSError`` on all ranks.

        Tries until it succeeds, as :meth:`run` with the last checkpoint. Raises ``CheckpointError`` as :meth:`run`.
        """

        def attempt() -> str:
            try:
                write()
            except OSError as error:
                self._save_failed(done.steps, str(error))
                return str(error)
            return ""

        if problem := self._until_written(attempt, done):
            raise CheckpointError(
                f"the weights after mid-training, the reference of recipe.kl, could not be written: {problem}. They are in the "
                f"checkpoint of mid-training step {done.steps}, from which the next start writes them"
            )

    def _save_last(self, done: Progress) -> None:
        """Save the last weights. If that fails, keep them in memory and retry until it succeeds or ``stop`` is set on one rank,
        which leaves one more attempt. Raises ``CheckpointError`` if that fails too."""

        def attempt() -> str:
            self._save(done)
            self._finish_checkpoint()
            if self._failed is None or self._checkpointer.last_step == done.steps:
                return ""
            return self._failed.reason

        if problem := self._until_written(attempt, done):
            saved = self._checkpointer.committed_step
            lost = "all its steps are" if saved is None else f"all its steps after {saved} are"
            raise CheckpointError(
                f"mid-training step {done.steps} could not be saved, {lost} lost: {problem}"
            )

    def _until_written(self, attempt: Callable[[], str], done: Progress) -> str:
        """Repeat ``attempt``, which returns why it failed, until it succeeds, or once more after ``stop`` is set on one rank.
        Returns why the last one failed, or an empty string."""
        stop = False
        while problem := attempt():
            if stop:
                return problem
            if not self._holding and self._ranks.is_leader:
                log.error(
                    "mid-training has ended, and its weights cannot be written: %s. They stay in memory, and the trainer tries "
                    "again: free space on the volume %s, or end the trainer to give them up. %s",
                    *(problem, self._checkpointer.root, held_by(self._ranks.world)),
                )
            self._holding = True
            stop = self._wait_to_retry(done)
        self._holding = False
        if self._failed is not None:
            self._failed = None
            self._report_failure("")
        return ""

    def _wait_to_retry(self, done: Progress) -> bool:
        """Wait until the next attempt; returns whether it is the last one."""
        assert self._failed is not None
        reported = -math.inf
        while True:
            retry = self._ranks.is_leader and self._failed.may_retry(
                self._checkpointer.volume(), self._timings
            )
            states = self._ranks.all_gather((self._stop.is_set(), retry), tuple[bool, bool])
            if any(stop for stop, _ in states):
                time.sleep(self._timings.last_retry)
                return True
            if states[0][1]:
                return False
            if time.monotonic() - reported >= self._timings.retry:  # the coordinator may have restarted
                reported = time.monotonic()
                self._report_failure(self._failed.reason)
                if self._ranks.is_leader:  # the time of the hold counts
                    self._report(done)
            self._stop.wait(self._poll_seconds)

    def _save(self, done: Progress) -> None:
        """Start a checkpoint, unless there is one of this step."""
        self._finish_checkpoint()
        if self._checkpointer.last_step == done.steps:
            return
        problem = self._checkpointer.start(done.steps, None, stage=msgspec.json.encode(done))
        if problem is not None:
            self._save_failed(done.steps, problem)

    def _finish_checkpoint(self) -> None:
        if not self._checkpointer.pending:
            return
        saved = self._checkpointer.finish()
        if saved.error is not None:
            self._save_failed(saved.step, saved.error)
        elif self._failed is not None and not self._holding:
            self._failed = None
            self._report_failure("")

    def _save_failed(self, step: int, reason: str) -> None:
        self._failed = FailedSave(step, reason, self._checkpointer.volume())
        if self._ranks.is_leader:
            log.error("checkpoint of mid-training step %d failed: %s", step, reason)
        self._report_failure(reason)

    def _report_failure(self, reason: str) -> None:
        """Report a failed checkpoint to the coordinator, which shows it, or without a ``reason`` that none fails; best effort."""
        if not self._ranks.is_leader:
            return
        try:
            self._coordinator.checkpoint_failed(0, reason, holding=self._holding)
        except CoordinatorUnreachable as error:
            log.warning("cannot report the failed checkpoint: %s", error)


def remove_checkpoints(paths: RunPaths) -> None:
    """Remove the checkpoints of a finished mid-training. Rank 0 calls this once the run has an RL checkpoint."""
    shutil.rmtree(paths.mid_training.root, ignore_errors=True)


def _row(done: Progress, stats: StepStats, seconds: float) -> dict[str, Any]:
    return {
        "stage": "midTraining",
        "step": done.steps - 1,
        "loss": stats.loss,
        "solved": stats.loss_means["solved"] * stats.trainable_tokens / stats.sequences,
        "grad_norm": stats.gradient_norm,
        "learning_rate": stats.learning_rate,
        "tokens": done.tokens,
        "replaced": done.replaced,
        "seconds": seconds,
    }
