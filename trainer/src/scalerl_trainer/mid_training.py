"""Mid-training: supervised steps (:mod:`.sft`) on worked solutions before RL, with separate checkpoints.

Mid-training checkpoints have the format of RL checkpoints, and are named by the number of supervised steps. A run with an
RL checkpoint has finished its mid-training; one without resumes from the newest mid-training checkpoint, or starts it.

A checkpoint that fails is tried again when the volume has more space, at the latest when the next one is due. Mid-training
ends, or stops, only when its last weights are in a checkpoint: until then, the ranks keep them in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from scalerl_api.compute import supervised_tokens
from scalerl_api.paths import RunPaths
from scalerl_api.spec import PromptSpec, RunSpec, TrainingTask
from scalerl_api.wire import INTERRUPTED
from scalerl_tasks import (
    Mixture,
    PromptError,
    PromptSource,
    TokenizerError,
    Train,
    open_tasks,
    open_warm_start,
    render_prompt,
)
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.text import ModelTokenizer
from scalerl_trainer.checkpoint import STAGE, CheckpointError, CheckpointStore
from scalerl_trainer.checkpointer import LAST_RETRY_SECONDS, RETRY_SECONDS, Checkpointer, FailedSave, held_by
from scalerl_trainer.coordinator_client import Coordinator, CoordinatorUnreachable, Unresumable
from scalerl_trainer.engine import Engine, StepStats
from scalerl_trainer.errors import BadBatchError, MidTrainingError, Stopped
from scalerl_trainer.fence import Fence
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.sft import Progress, encode_pair, train_supervised

log = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 50
HELD_OUT_EXAMPLES = 256
POLL_SECONDS = 5.0
"""Time between two collectives while the ranks wait for space."""
REPORT_SECONDS = 2.0
"""Seconds between reports to the coordinator; the time of a killed trainer after its last report is not counted."""


class MidTraining:
    """The mid-training of one run. All methods are collectives, except where noted."""

    def __init__(
        self,
        engine: Engine,
        spec: RunSpec,
        paths: RunPaths,
        ranks: Ranks,
        coordinator: Coordinator,
        stop: threading.Event,
        fence: Fence | None,
    ) -> None:
        assert spec.warm_start is not None
        self._engine, self._spec, self._wanted = engine, spec, spec.warm_start
        self._paths, self._ranks, self._coordinator, self._stop = paths, ranks, coordinator, stop
        store = CheckpointStore(paths.mid_training, spec.checkpoint.keep, fence=fence)
        self._checkpointer = Checkpointer(
            store, ranks, engine, f"remove {paths.mid_training.root} to begin mid-training again"
        )
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
        step = self._checkpointer.load()
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
            return msgspec.json.decode(self._checkpointer.stage(step), type=Progress)
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
            retry = self._failed is not None and self._failed.may_retry(self._checkpointer.volume())
            append_row(self._paths.supervised_metrics, _row(done, stats, seconds))
            if done.steps % _LOG_EVERY_STEPS == 0:
                log.info("mid-training step %d: loss %.4f", done.steps, stats.loss)
            if time.monotonic() - self._reported >= REPORT_SECONDS:
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
            retry = self._ranks.is_leader and self._failed.may_retry(self._checkpointer.volume())
            states = self._ranks.all_gather((self._stop.is_set(), retry), tuple[bool, bool])
            if any(stop for stop, _ in states):
                time.sleep(LAST_RETRY_SECONDS)
                return True
            if states[0][1]:
                return False
            if time.monotonic() - reported >= RETRY_SECONDS:  # the coordinator may have restarted
                reported = time.monotonic()
                self._report_failure(self._failed.reason)
                if self._ranks.is_leader:  # the time of the hold counts
                    self._report(done)
            self._stop.wait(POLL_SECONDS)

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


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line to ``mid-training.jsonl``. A failed write, such as on a full disk, is only logged."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)


def keep_rows(path: Path, steps: int) -> None:
    """Drop the rows from step ``steps`` on, which are trained again, and lines truncated by a crash or a full disk."""

    def is_kept(line: str) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] < steps
        except (ValueError, LookupError, TypeError):
            return False

    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        staged = path.with_name(f".{path.name}")
        staged.write_text("".join(kept), encoding="utf-8")
        staged.rename(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)


def held_out_examples(spec: RunSpec, model: Path) -> list[PackedSequence]:
    """Up to about 256 held-out prompts with their worked solutions; in a mix, in proportion to the tasks' weights.

    Examples that cannot be generated, have no solution or do not fit a micro-batch are left out.
    """
    found = []
    opened = open_tasks(spec, model.parent)  # the run's directory
    for one, task in zip(opened.sections, opened.tasks, strict=True):
        tokenizer = ModelTokenizer(
            model, one.section.prompt, f"{one.field}.prompt", tools_of(one.section.environment)
        )
        count = min(math.ceil(HELD_OUT_EXAMPLES * one.weight), len(task.held_out))
        pairs = Pairs(task.held_out, one.section.prompt, tokenizer, np.arange(count))
        for index in range(count):
            # A prompt without a usable solution is left out here and is still evaluated during RL.
            with contextlib.suppress(BadBatchError):
                found.append(encode_pair(tokenizer, *pairs[index]))
    return [pair for pair in found if pair.tokens <= spec.micro_batch_tokens]


def own_examples(
    source: PromptSource, train: Train, field: str
) -> tuple[PromptSource, npt.NDArray[np.int64]]:
    """The separate problems of ``warmStart``, and the indices of those that are not held out, int64. ``field``: theirs in the spec.

    Raises ``MidTrainingError`` if all are held out.
    """
    kept = np.array([index for index in range(len(source)) if not train.excludes(source[index])], np.int64)
    if not len(kept):
        raise MidTrainingError(
            f"{field}: every prompt is held out by task.heldOut or evaluation.sets: add others, or leave it out"
        )
    if len(kept) < len(source):
        log.warning(
            "%s: %d of %d prompts are held out by task.heldOut or evaluation.sets, and not trained on",
            *(field, len(source) - len(kept), len(source)),
        )
    return source, kept


def of_source(done: Progress, spec: RunSpec, digest: str) -> Progress:
    """``done`` with the digest of the examples' source. Raises ``MidTrainingError`` if the digest has changed."""
    if done.source not in ("", digest):
        own = spec.warm_start.own if spec.warm_start is not None else ""
        where = f"{own}: the examples" if own else "task: the training prompts"
        raise MidTrainingError(
            f"{where}, digest {digest[:12]}, is not what mid-training has trained on up to step {done.steps}, digest "
            f"{done.source[:12]}: put the examples back, or start a new run"
        )
    return msgspec.structs.replace(done, source=digest)


def solved_pairs(spec: RunSpec, model: Path) -> Pairs | MixedPairs:
    """The training pairs in an order fixed by the seed, without those that ``steps`` cannot reach.

    Pairs of a mix are in its proportions. ``model``: the folder with the tokenizer. Raises ``MidTrainingError`` as
    :func:`own_examples`.
    """
    wanted = spec.warm_start
    assert wanted is not None
    most = None if wanted.steps is None else wanted.steps * wanted.batch_size
    opened = open_tasks(spec, model.parent)  # the run's directory
    given = opened.sections

    def pairs(
        source: PromptSource, kept: npt.NDArray[np.int64], one: TrainingTask, seed: int | tuple[int, int]
    ) -> Pairs:
        tokenizer = ModelTokenizer(
            model, one.section.prompt, f"{one.field}.prompt", tools_of(one.section.environment)
        )
        order = kept[np.random.default_rng(seed).permutation(len(kept))[:most]]
        return Pairs(source, one.section.prompt, tokenizer, order)

    own = open_warm_start(spec, model.parent)
    if own is not None:
        # One task's exclusions suffice: each task excludes the held-out prompts of all tasks from training.
        return pairs(*own_examples(own, opened.tasks[0].train, wanted.own), given[0], spec.seed)
    train = [task.train for task in opened.tasks]
    if len(train) == 1:
        return pairs(train[0], np.arange(len(train[0])), given[0], spec.seed)
    parts = [
        pairs(prompts, np.arange(len(prompts)), one, (spec.seed, at))
        for at, (one, prompts) in enumerate(zip(given, train, strict=True))
    ]
    return MixedPairs.of(parts, [one.weight for one in given], spec.seed, opened.digest)


@dataclass(frozen=True)
class Pairs(Sequence[tuple[Sequence[int], str]]):
    """Pairs of a prompt's token ids and its worked solution, each made on access; the same on all ranks.

    Access raises ``BadBatchError`` for a prompt that cannot be generated or rendered, or has neither solution nor answer.
    """

    source: PromptSource
    wording: PromptSpec
    tokenizer: ModelTokenizer
    order: npt.NDArray[np.int64]

    @property
    def digest(self) -> str:
        """Digest of the source."""
        return self.source.digest

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        try:
            prompt = self.source[int(self.order[index])]
            rendered = render_prompt(prompt, self.wording.template, self.wording.system)
            (ids,) = self.tokenizer.encode_prompts([rendered])
            return ids, prompt.worked_solution
        except (PromptError, TokenizerError, ValueError) as error:
            raise BadBatchError(str(error)) from error


@dataclass(frozen=True)
class MixedPairs(Sequence[tuple[Sequence[int], str]]):
    """Pairs of the tasks of a mix, in its proportions; the task that is used up first limits their number."""

    parts: Sequence[Pairs]
    mixture: Mixture
    total: int
    digest: str
    """Digest of the mix's training prompts."""

    @classmethod
    def of(cls, parts: Sequence[Pairs], weights: Sequence[Fraction], seed: int, digest: str) -> MixedPairs:
        """Mix ``parts`` by ``weights``, in their order.

        In every prefix, each task's count deviates from its proportion by less than the number of tasks.
        """
        sizes = [int((len(part) - len(parts)) / weight) for part, weight in zip(parts, weights, strict=True)]
        return cls(parts, Mixture(weights, seed), max(1, min(sizes)), digest)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        at, place = self.mixture.place(int(index))
        return self.parts[at][place % len(self.parts[at])]
