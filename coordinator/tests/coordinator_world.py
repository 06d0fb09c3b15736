"""A coordinator without sockets and disk, for tests of its decisions: settings, and a journal in a bytearray."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from coordinator_client import make_group

from scalerl_api import wire
from scalerl_api.recipe.curriculum import CurriculumSpec, UniformSpec
from scalerl_api.schedule import ByLengthSpec, ScheduleSpec
from scalerl_api.wire import NextAction, PushResult, Split
from scalerl_coordinator import frames
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.generator_requests import GeneratorRequests
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.journaled_core import load_state
from scalerl_coordinator.samplers import make_samplers
from scalerl_coordinator.settings import Identity, Settings
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.trainer_requests import TrainerRequests
from scalerl_coordinator.transitions import apply

TRAIN_PROMPTS = 7


def _schedule(changes: dict[str, Any]) -> dict[str, Any]:
    """The setting for ``by_length``, which this takes out of ``changes``."""
    by_length = changes.pop("by_length", None)
    return (
        {}
        if by_length is None
        else {"schedule": ScheduleSpec(by_length=ByLengthSpec() if by_length else None)}
    )


def make_settings(**changes: Any) -> Settings:
    """Three prompts a step, two completions each, k = 1, a point every second version over two held-out prompts."""
    identity = Identity(
        prompts_per_step=3,
        completions_per_prompt=2,
        max_completion_tokens=8,
        max_staleness_steps=1,
        zero_variance_filter=True,
        seed=11,
        train_digest="train",
        held_out_digest="held-out",
        held_out_prompts=2,
        evaluation_samples=2,
        evaluation_temperature=0.5,
    )
    fields = {name: changes.pop(name) for name in list(changes) if name in Identity.__struct_fields__}
    changes |= _schedule(changes)
    values: dict[str, Any] = {
        "temperature": 1.0,
        "evaluation_every": 2,
        "hold_seconds": 60.0,
        "lease_seconds": 100.0,
        "max_steps": None,
        "generator_devices": 1,
        "trainer_devices": 2,
        "curriculum": CurriculumSpec(uniform=UniformSpec()),
    }
    return Settings(identity=msgspec.structs.replace(identity, **fields), **{**values, **changes})


class QuickDisk(Disk):
    """For walks of thousands of records: there is no power cut, so nothing has to be synced."""

    def sync(self, fd: int) -> None:
        return None


class Prompts:
    """What samplers ask of training prompts."""

    def __len__(self) -> int:
        return TRAIN_PROMPTS

    def difficulty(self, prompt: int) -> float:
        return prompt % 5


class World:
    """A coordinator, its journal, and the time. Crashes lose what was not acknowledged, and nothing else."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.changed = False
        """It was restarted with other settings."""
        self.now = 0.0
        self.process = 0
        self.member_ids = 0
        self.log = bytearray(frames.segment_header(1))
        self.acknowledged = len(self.log)
        self.core: Core
        self._begin(CoordinatorState())

    def _begin(self, state: CoordinatorState) -> None:
        self.process += 1
        identity, weights = self.settings.identity, self.settings.weights
        train = [Prompts() for _ in identity.tasks]
        samplers = make_samplers(self.settings.curriculum, train, identity.tasks, weights, identity.seed)
        labels = {
            task: [{"parity": str(p % 2)} for p in range(self.settings.identity.evaluation_set(task).prompts)]
            for task in self.settings.identity.set_tasks
        }
        self.core = Core.begin(self.settings, samplers, state, f"p{self.process}", self.now, labels)
        self.generator_requests = GeneratorRequests(self.core)
        self.trainer_requests = TrainerRequests(self.core)
        self.write()

    @property
    def state(self) -> CoordinatorState:
        return self.core.state

    # --- the journal ----------------------------------------------------------------------------

    def write(self) -> None:
        """What was decided goes to the journal, not yet known to be on disk."""
        for record, blob in self.core.outbox:
            for part in frames.encode_frame(r.encode(record), blob, self.acknowledged):
                self.log += part
        self.core.outbox.clear()

    def acknowledge(self) -> None:
        """It is on disk, and answers go out."""
        self.write()
        self.acknowledged = len(self.log)

    def replay(self) -> CoordinatorState:
        state = CoordinatorState()
        for frame in frames.read_segment(memoryview(bytes(self.log)), "log", 1, last=True):
            apply(state, r.decode(frame.header))
        return state

    def crash(self, keep: int) -> None:
        """The process dies; ``keep`` bytes of the unacknowledged records reached the disk."""
        self.write()
        del self.log[min(self.acknowledged + keep, len(self.log)) :]
        end = len(frames.segment_header(1))
        for frame in frames.read_segment(memoryview(bytes(self.log)), "log", 1, last=True):
            end = frame.end
        del self.log[end:]
        self._begin(self.replay())
        self.acknowledge()

    def change(self, keep: int = 0, **changes: Any) -> None:
        """The same, and the coordinator starts again with other settings."""
        changes |= _schedule(changes)
        fields = {name: changes.pop(name) for name in list(changes) if name in Identity.__struct_fields__}
        identity = msgspec.structs.replace(self.settings.identity, **fields)
        self.changed |= identity != self.settings.identity
        self.settings = replace(self.settings, identity=identity, **changes)
        self.crash(keep)

    def lose_volume(self) -> None:
        """The coordinator starts again with an empty directory."""
        self.log = bytearray(frames.segment_header(1))
        self.acknowledged = len(self.log)
        self._begin(CoordinatorState())
        self.acknowledge()

    # --- shorthands -----------------------------------------------------------------------------

    def register(self, name: str, held: list[str] | None = None, version: int | None = -1) -> str:
        """Register, and say (unless None) which weights it holds."""
        self.member_ids += 1
        member_id = f"{name}/{self.member_ids}"
        request = wire.Register(name=name, control_url="u", task_digest="train", held_leases=held or [])
        self.generator_requests.register(request, member_id, self.now)
        if version is not None:
            self.beat(member_id, version)
        return member_id

    def beat(self, member_id: str, version: int, **changes: Any) -> None:
        values = {"healthy": True, "busy_seconds": 0.0, "generated_tokens": 0, **changes}
        self.generator_requests.heartbeat(
            wire.Heartbeat(member_id=member_id, weight_version=version, **values), self.now
        )

    def lease(self, member_id: str, version: int, groups: int = 100) -> list[wire.Lease]:
        """A lease request that does not wait."""
        self.ask(member_id, version, groups)
        leases = self.take(member_id, groups)
        self.generator_requests.end_lease_request(member_id)
        return leases

    def ask(self, member_id: str, version: int, groups: int = 100) -> None:
        """Open a lease request."""
        request = wire.LeaseRequest(
            member_id=member_id, weight_version=version, max_groups=groups, wait_seconds=0
        )
        self.generator_requests.receive_lease_request(request, self.now)

    def take(self, member_id: str, groups: int = 100) -> list[wire.Lease]:
        """Answer it if there is something."""
        leases = self.generator_requests.offer(member_id, groups, self.now)
        if leases is None:
            return []
        self.core.book.mark_sent((lease.lease_id for lease in leases.leases), self.now)
        return leases.leases

    def push(self, member_id: str, group: wire.Group) -> wire.PushResult:
        return self.generator_requests.pushes.receive(
            member_id, group, msgspec.msgpack.encode(group), self.now
        )[0]

    def serve(self, member_id: str, version: int, groups: int = 100, **changes: Any) -> list[wire.Lease]:
        """Lease, and push it all."""
        leases = self.lease(member_id, version, groups)
        for lease in leases:
            assert self.push(member_id, make_group(lease, version=version, **changes)) == "accepted"
        return leases

    def hello(self, incarnation: str, version: int = 0, snapshot: bytes | None = None) -> wire.TrainerWelcome:
        request = wire.TrainerHello(incarnation=incarnation, version=version, world_size=1, snapshot=snapshot)
        return self.trainer_requests.hello(request, self.now)

    def next(self, incarnation: str) -> wire.Next | None:
        request = wire.NextRequest(incarnation=incarnation, version=self.state.version, wait_seconds=0)
        return self.trainer_requests.next(request, self.now)

    def report(
        self, incarnation: str, step: int, skipped: str = "", **stats: float
    ) -> dict[str, float] | None:
        request = wire.StepReport(
            incarnation=incarnation,
            step=step,
            stats=stats,
            busy_seconds=0.5,
            trained_tokens=0 if skipped else 10,
            skipped=skipped,
        )
        return self.trainer_requests.step(request, self.now)

    def begin_publish(self, incarnation: str) -> wire.PublishPermit | None:
        request = wire.PublishBegin(incarnation=incarnation, version=self.state.version, wait_seconds=0)
        return self.trainer_requests.publish_begin(request, self.now)

    def commit_publish(
        self,
        incarnation: str,
        updated: list[str],
        failed: list[str] | None = None,
        refused: list[str] | None = None,
        problem: str = "",
        kept: list[str] | None = None,
        **stats: float,
    ) -> None:
        request = wire.PublishCommit(
            incarnation=incarnation,
            version=self.state.version,
            updated=updated,
            failed=failed or [],
            stats=stats,
            refused=refused or [],
            problem=problem,
            kept=kept or [],
        )
        self.trainer_requests.publish_commit(request, self.now)

    def publish(self, incarnation: str, **stats: float) -> list[str]:
        """Begin and commit to everyone permitted."""
        permit = self.begin_publish(incarnation)
        assert permit is not None
        updated = [m.member_id for m in permit.members]
        self.commit_publish(incarnation, updated, **stats)
        return updated

    def checkpoint(self, incarnation: str, kept: list[int]) -> bytes:
        begin = wire.CheckpointBegin(incarnation=incarnation, step=self.state.version)
        snapshot = self.trainer_requests.checkpoint_begin(begin, self.now).snapshot
        commit = wire.CheckpointCommit(incarnation=incarnation, step=self.state.version, kept_steps=kept)
        self.trainer_requests.checkpoint_commit(commit, self.now)
        return snapshot

    def plan(self, incarnation: str, step: int, rank: int = 0, world_size: int = 1) -> Any:
        request = wire.ShardRequest(incarnation=incarnation, step=step, rank=rank, world_size=world_size)
        return self.trainer_requests.plan_shard(request)

    def pass_time(self, seconds: float, beats: dict[str, int] | None = None) -> None:
        """Let time pass in ticks of a second; members in ``beats`` (id → version) send heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for member_id, version in (beats or {}).items():
                if member_id in self.core.membership.members:
                    self.beat(member_id, version)
            self.core.tick(self.now)
            self.generator_requests.tick(self.now)
            self.trainer_requests.tick(self.now)


class JournalWorld(World):
    """The same on a real :class:`Journal` with segments of a few records; an orderly stop is a crash like others."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.directory = directory
        self.loop = asyncio.new_event_loop()
        self.journal: Journal | None = None
        super().__init__(settings)

    def _begin(self, state: CoordinatorState) -> None:
        self.journal = Journal(self.directory, disk=QuickDisk(), segment_bytes=4000)
        state = load_state(self.journal)
        self.loop.run_until_complete(self.journal.start())
        super()._begin(state)

    def write(self) -> None:
        assert self.journal is not None
        for record, blob in self.core.outbox:
            self.journal.append(
                r.encode(record), record.lease_id if isinstance(record, r.GroupAccepted) else None, blob
            )
        self.core.outbox.clear()
        self.journal.blobs.forget(self.core.forgotten)
        self.core.forgotten.clear()
        if self.journal.wants_rotation:
            self.journal.rotate(self.core.state.encode())

    def acknowledge(self) -> None:
        self.write()
        assert self.journal is not None
        self.loop.run_until_complete(self.journal.durable())

    def replay(self) -> CoordinatorState:
        self.acknowledge()
        assert self.journal is not None
        return load_state(self.journal)

    def crash(self, keep: int) -> None:
        """All that was decided is on disk; every other time a snapshot is, too, as after SIGTERM."""
        self.write()
        before = self.state.encode()
        assert self.journal is not None
        if keep % 2:
            self.journal.rotate(before)
        self.close()
        self._begin(CoordinatorState())
        self.acknowledge()
        self.journal.blobs.read(g.lease_id for g in self.state.groups.values() if not g.given_up)

    def lose_volume(self) -> None:
        self.write()
        self.close()
        for path in self.directory.iterdir():
            path.unlink()
        self._begin(CoordinatorState())
        self.acknowledge()

    def close(self) -> None:
        assert self.journal is not None
        self.loop.run_until_complete(self.journal.close())


def ready(world: World, name: str = "g") -> World:
    """A trainer at version 0 and one generator that holds it; the point of version 0 is made."""
    world.member = world.register(name)
    world.hello("t")
    assert world.next("t").action is NextAction.PUBLISH
    world.publish("t")
    world.beat(world.member, 0)
    leases = world.lease(world.member, 0, 2)
    assert [lease.split for lease in leases] == [Split.HELD_OUT] * 2
    for lease in leases:
        assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    assert [p.version for p in world.state.points] == [0]
    return world


def train(world: World, incarnation: str = "t", *, publish: bool = True) -> None:
    """Generate what can be, train one step, publish, and measure what is due."""
    version = world.state.version
    world.serve(world.member, world.core.membership.members[world.member].version)
    following = world.next(incarnation)
    assert following.action is NextAction.TRAIN, following
    world.report(incarnation, version)
    if publish:
        world.publish(incarnation)
        if world.state.evaluations:
            world.serve(world.member, version + 1, 2)


def check_consistency(world: World) -> None:
    """What holds after every record."""
    state, counts, identity = world.state, world.state.counts, world.settings.identity
    assert counts.acknowledged == counts.trained + counts.filtered + counts.queued + counts.skipped
    assert min(counts.trained, counts.filtered, counts.queued, counts.skipped, counts.given_up) >= 0
    if not world.changed:
        size, rollouts = identity.prompts_per_step, identity.completions_per_prompt
        done = rollouts * (state.first_kept_step * size + len(state.groups)) + counts.refilled
        assert counts.acknowledged + counts.given_up == done
    if state.rows and state.first_kept_step == 0:
        skipped = [g for step in range(state.version) if step in state.skips for g in state.step_groups(step)]
        assert counts.skipped == sum(g.rollouts for g in skipped if not g.filtered)
    untrained = {slot: g for slot, g in state.groups.items() if state.step_of(slot) >= state.version}
    assert counts.queued == sum(g.rollouts for g in untrained.values() if not g.filtered)
    # Every issued slot is somewhere, and in one place.
    leased = [lease.slot for lease in state.leases.values() if lease.split is wire.Split.TRAIN]
    places = sorted([*leased, *state.open_slots, *state.groups])
    assert places == list(range(state.slots_of(state.first_kept_step)[0], state.next_slot))
    assert sorted(state.prompts) == places
    assert set(state.expired_lease_of) <= set(state.open_slots)
    assert set(state.tries) <= set(places)
    assert all(one.group.filtered for tries in state.tries.values() for one in tries)
    if state.first_kept_step == 0:
        assert counts.refilled == sum(one.group.rollouts for tries in state.tries.values() for one in tries)
    assert all(state.closed(step) for step in range(state.first_kept_step, state.version))
    filled = Counter(state.step_of(slot) for slot in state.groups)
    assert {step: groups for step, groups in state.filled.items() if groups} == filled
    assert set(state.progress_at) == set(range(state.first_kept_step, state.version)) or not state.rows
    for (version, task), evaluation in state.evaluations.items():
        held = [
            lease.slot
            for lease in state.leases.values()
            if lease.split is wire.Split.HELD_OUT
            and (lease.policy_version, lease.prompt.task) == (version, task)
        ]
        assert sorted([*held, *evaluation.todo, *evaluation.results]) == list(range(evaluation.prompts))
    assert len({(p.version, p.task) for p in state.points}) == len(state.points)
    for (
        point
    ) in state.points:  # every prompt of its set, each with all its samples: none is lost or counted twice
        assert point.prompts == identity.evaluation_set(point.task).prompts
    for lease in state.leases.values():
        if lease.split is wire.Split.HELD_OUT:
            assert lease.prompt.index == lease.slot
    assert sorted(world.core.book._open) == sorted(state.leases)
