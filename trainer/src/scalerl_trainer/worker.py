"""What one rank does when rank 0 gives an order, the same on all of them.

=========== =====================================================================================
order        what every rank does
=========== =====================================================================================
``Meet``     says whether it was told to stop and whether its share of a checkpoint is flushed
``Train``    fetches its share of the step, updates
``Gather``   takes part in gathering whole parameters (ZeRO-3; rank 0 publishes them)
``Score``    takes part in scoring (rank 0 has the sequences)
``Save``     writes its state aside, begins to flush it
``Seal``     makes that checkpoint count
``Leave``    returns
``Refuse``   raises: the coordinator does not take this trainer
``Broken``   raises: too many steps in a row were skipped
=========== =====================================================================================

Who gives them, and when, is :mod:`.leader`'s.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from scalerl_api.fields import quantity_bytes
from scalerl_api.spec import RunSpec
from scalerl_trainer.algo.losses import Loss
from scalerl_trainer.batch import Staleness, probe_sequences, rank_batch
from scalerl_trainer.coordinator_client import Coordinator, Unresumable
from scalerl_trainer.engine import Engine, StepStats
from scalerl_trainer.errors import DivergedError
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.publish.buckets import NamedTensors
from scalerl_trainer.publish.probe import ProbeSequence
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.saving import Saver


class Order(Enum):
    MEET = auto()
    TRAIN = auto()
    GATHER = auto()
    SCORE = auto()
    SAVE = auto()
    SEAL = auto()
    LEAVE = auto()
    REFUSE = auto()
    BROKEN = auto()


@dataclass(frozen=True)
class Trained:
    """A step that is over.

    stats: of the whole step, as the coordinator sent it.
    seconds: by phase, means over ranks.
    broken: of a skipped step, tokens beyond the ratio or not a number, by slot.
    """

    stats: dict[str, float]
    staleness: Staleness
    done: StepStats
    seconds: dict[str, float]
    broken: Counter[int]


@dataclass
class Worker:
    """One rank: what each order means, the same on all of them."""

    spec: RunSpec
    ranks: Ranks
    engine: Engine
    loss: Loss
    coordinator: Coordinator
    saver: Saver
    metrics: Metrics
    stop: threading.Event
    version: int
    probes: list[ProbeSequence] = field(default_factory=list)

    def follow(self) -> None:
        """Do as rank 0 says until it says leave.

        Raises:
            Unresumable: the coordinator has refused rank 0.
            DivergedError: too many steps in a row were skipped.
        """
        while True:
            order: Order = self.ranks.from_leader(None)
            match order:
                case Order.MEET:
                    self.meet()
                case Order.TRAIN:
                    self.train()
                case Order.GATHER:
                    for _ in self.gather():
                        pass
                case Order.SCORE:
                    self.engine.logprobs([], temperature=1.0)
                case Order.SAVE:
                    self.saver.start(self.version, None)
                case Order.SEAL:
                    self.saver.finish()
                case Order.LEAVE:
                    return
                case Order.REFUSE:
                    raise Unresumable("the coordinator refuses to go on from here; rank 0's log says why")
                case Order.BROKEN:
                    raise DivergedError("too many steps in a row were skipped; rank 0's log says why")

    def meet(self) -> tuple[bool, bool]:
        """Whether any rank was told to stop, and whether a pending checkpoint is flushed on all."""
        told = self.ranks.all((self.stop.is_set(), self.saver.sealed))
        return any(stop for stop, _ in told), all(sealed for _, sealed in told)

    def train(self) -> Trained:
        """The step of the present version, which is over then, applied or skipped."""
        begin = time.perf_counter()
        shard = self.coordinator.shard(self.version, self.ranks.rank, self.ranks.world)
        share = rank_batch(shard, self.spec.recipe)
        fetched = time.perf_counter()
        done = self.engine.step(share.batch, self.loss)
        self.probes = probe_sequences(shard, self.spec.weight_sync.probe_sequences)
        self.version += 1
        self.metrics.version.set(self.version)
        own = {
            "shard_seconds": fetched - begin,
            "forward_backward_seconds": done.seconds.get("pack", 0.0) + done.seconds.get("compute", 0.0),
            "optimizer_seconds": done.seconds.get("update", 0.0),
        }
        broken = Counter[int]()
        for index, tokens in done.broken.items():
            broken[shard.groups[shard.sequences[index].group].slot] += tokens
        everyone = self.ranks.all((own, share.staleness, broken))
        seconds = {name: sum(s[name] for s, _, _ in everyone) / len(everyone) for name in own}
        staleness = sum((s for _, s, _ in everyone), Staleness())
        return Trained(share.stats, staleness, done, seconds, sum((b for _, _, b in everyone), Counter()))

    def gather(self) -> NamedTensors:
        """Whole parameters, one by one, on rank 0; nothing on the others, in step with it."""
        for bucket in self.engine.gather_parameters(self.bucket_bytes):
            yield from zip(bucket.names, bucket.tensors, strict=False)

    @property
    def bucket_bytes(self) -> int:
        return quantity_bytes(self.spec.weight_sync.bucket)
