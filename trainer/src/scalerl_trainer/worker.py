"""Executes the commands of rank 0 (:mod:`.leader`) on every rank.

===================== ===========================================================================
command               what every rank does
===================== ===========================================================================
``SYNC``              gathers whether any rank is to stop and whether the checkpoint is written
``TRAIN``             updates the weights from its shard of the step, and fetches that of the next on a thread
``GATHER``            takes part in gathering whole parameters (ZeRO-3), which rank 0 publishes or exports
``GATHER_ADAPTERS``   the same with adapters
``SCORE``             takes part in scoring rank 0's sequences, those of a probe or those of the start
``SAVE``              starts to copy its state to the host, and to write it to the staging folder
``COMMIT_CHECKPOINT`` takes part in committing that checkpoint
``EXIT``              returns
``REJECTED``          raises ``Unresumable``: the coordinator refuses this trainer
``DIVERGED``          raises ``DivergedError``: too many consecutive steps were skipped, or one of numbers that are none
``PUBLISH_REFUSED``   raises ``PublishRefusedError``: generators could not use the published weights
===================== ===========================================================================
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

from scalerl_api.spec import RunSpec
from scalerl_api.weight_sync import PROBE_SEQUENCES
from scalerl_api.wire import Shard, TrainedSequence
from scalerl_trainer.algo.losses import Loss
from scalerl_trainer.background import Prefetch
from scalerl_trainer.checkpoints.upload import UploadState
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.coordinator_client import Coordinator, Unresumable
from scalerl_trainer.engine import Engine, PackedShard, StepStats
from scalerl_trainer.errors import DivergedError, PublishRefusedError
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.models.lora import PEFT
from scalerl_trainer.publish.probe import ProbeSequence, probe_sequences, start_sequences
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.shard_conversion import (
    RankBatch,
    Staleness,
    check_logprobs,
    rank_batch,
    recorded,
)

FETCH_SECONDS = 30.0
"""The next step's shard is requested this often before the step is closed."""


class Command(Enum):
    SYNC = auto()
    TRAIN = auto()
    GATHER = auto()
    GATHER_ADAPTERS = auto()
    SCORE = auto()
    SAVE = auto()
    COMMIT_CHECKPOINT = auto()
    EXIT = auto()
    REJECTED = auto()
    DIVERGED = auto()
    PUBLISH_REFUSED = auto()


@dataclass(frozen=True)
class Trained:
    """A finished step, applied or skipped."""

    stats: dict[str, float]
    """Statistics of the whole step, from the coordinator's groups."""
    staleness: Staleness
    """Staleness of all ranks' tokens."""
    step_stats: StepStats
    """Statistics of the engine."""
    seconds: dict[str, float]
    """Duration of each phase, as a mean over ranks."""
    broken: Counter[int]
    """Number of ratio outliers by slot, if the step was skipped."""
    sequences: list[TrainedSequence]
    """All ranks' sequences that are recorded."""


@dataclass(frozen=True)
class _Fetched:
    """A step as fetched and converted while the one before it was trained."""

    shard: Shard
    batch: RankBatch
    packed: PackedShard
    probes: list[ProbeSequence]


@dataclass
class Worker:
    """One rank, rank 0 included."""

    spec: RunSpec
    ranks: Ranks
    engine: Engine
    loss: Loss
    coordinator: Coordinator
    checkpointer: Checkpointer
    metrics: Metrics
    stop: threading.Event
    version: int
    probes: list[ProbeSequence] = field(default_factory=list)
    """Sequences of the last batch for the probe after a publish; :func:`.publish.probe.first_probes` before the first batch."""

    def __post_init__(self) -> None:
        self._steps = Prefetch(self._fetch, self.engine.device)
        self.reading: Future[None] | None = None
        """Done when a publish has read rank 0's weights; its next update waits for it."""
        self.engine.before_update = self._finish_reading

    def follow(self) -> None:
        """Execute rank 0's commands until ``EXIT``.

        Raises:
            Unresumable: the coordinator refuses this trainer.
            DivergedError: too many consecutive steps were skipped.
            PublishRefusedError: generators could not use the published weights.
        """
        while True:
            command = self.ranks.broadcast(None, Command)
            match command:
                case Command.SYNC:
                    self.sync()
                case Command.TRAIN:
                    self.train()
                case Command.GATHER:
                    for _ in self.engine.weights.gather_checkpoint(self.spec.publish_bucket_bytes):
                        pass
                case Command.GATHER_ADAPTERS:
                    # Rank 0 may gather them as PUBLISHED: the names only label what is yielded, and followers yield nothing.
                    for _ in self.engine.weights.gather_adapters(PEFT):
                        pass
                case Command.SCORE:
                    self.engine.logprobs([], temperature=1.0)
                case Command.SAVE:
                    self.checkpointer.start(self.version, None)
                case Command.COMMIT_CHECKPOINT:
                    self.checkpointer.finish()
                case Command.EXIT:
                    return
                case Command.REJECTED:
                    raise Unresumable(
                        "the coordinator refuses to resume from this checkpoint; see rank 0's log"
                    )
                case Command.DIVERGED:
                    raise DivergedError("steps were skipped; see rank 0's log")
                case Command.PUBLISH_REFUSED:
                    raise PublishRefusedError(
                        "generators could not use the published weights; see rank 0's log"
                    )

    def send(self, command: Command) -> None:
        """Send a command to the other ranks; on rank 0, which then takes part in it."""
        self.ranks.broadcast(command, Command)

    def sync(self) -> tuple[bool, bool]:
        """Whether any rank is to stop, and whether the pending checkpoint is flushed on all ranks. A collective.

        The ranks' uploads continue with each other's states.
        """
        uploader = self.checkpointer.uploader
        upload = UploadState() if uploader is None else uploader.state
        states = self.ranks.all_gather(
            (self.stop.is_set(), self.checkpointer.flushed, upload), tuple[bool, bool, UploadState]
        )
        if uploader is not None:
            uploader.advance([state for _, _, state in states])
        return any(stop for stop, _, _ in states), all(flushed for _, flushed, _ in states)

    def _fetch(self, step: int) -> _Fetched:
        """Fetch this rank's shard of a step, and convert and pack it. On a thread."""
        shard = self.coordinator.shard(step, self.ranks.rank, self.ranks.world, FETCH_SECONDS)
        check_logprobs(shard)
        batch = rank_batch(shard, self.spec.recipe, router_replay=self.spec.trainer.router_replay)
        probes = probe_sequences(shard, PROBE_SEQUENCES, self.spec.model.context_tokens)
        return _Fetched(shard, batch, self.engine.pack(batch.batch), probes)

    def train(self) -> Trained:
        """Train the next step. A collective."""
        begin = time.perf_counter()
        step = self._steps.take(self.version)
        shard, shard_batch = step.shard, step.batch
        fetched = time.perf_counter()
        if self.engine.steps_done == 0:  # the batch is of the weights of the start, and they still hold
            kept = start_sequences(shard, self.spec.model.context_tokens) if self.ranks.is_leader else []
            self.engine.keep_start(kept)
        updates = self.spec.recipe.proximal_updates
        if updates and (self.version % updates == 0 or not self.engine.has_proximal):
            self.engine.set_proximal()
        step_stats = self.engine.step(shard_batch.batch, self.loss, shard=step.packed)
        self.probes = step.probes or self.probes
        self.version += 1
        self.metrics.version.set(self.version)
        own_seconds = {
            "shard_seconds": fetched - begin,
            "forward_backward_seconds": step_stats.seconds.get("pack", 0.0)
            + step_stats.seconds.get("compute", 0.0),
            "optimizer_seconds": step_stats.seconds.get("update", 0.0),
            "publish_wait_seconds": step_stats.seconds.get("wait", 0.0),
            "checkpoint_seconds": step_stats.seconds.get("copy", 0.0),
        }
        broken = Counter[int]()
        for index, tokens in step_stats.broken.items():
            broken[shard.groups[shard.sequences[index].group].slot] += tokens
        gathered = self.ranks.all_gather(
            (
                own_seconds,
                shard_batch.staleness,
                dict(broken),
                recorded(shard, shard_batch.batch, step_stats.differences_n),
            ),
            tuple[dict[str, float], Staleness, dict[int, int], list[TrainedSequence]],
        )
        seconds = {name: sum(s[name] for s, *_ in gathered) / len(gathered) for name in own_seconds}
        staleness = sum((s for _, s, *_ in gathered), Staleness())
        return Trained(
            shard_batch.stats,
            staleness,
            step_stats,
            seconds,
            sum((Counter(b) for _, _, b, _ in gathered), Counter()),
            [sequence for *_, sequences in gathered for sequence in sequences],
        )

    @property
    def reads_beside(self) -> bool:
        """Whether a publish may read the weights beside a step: not where that is a collective, as a step's own ones are."""
        return self.spec.trainer.zero_stage < 3

    def _finish_reading(self) -> None:
        """Wait until a publish has read the weights, or has failed."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.result()
