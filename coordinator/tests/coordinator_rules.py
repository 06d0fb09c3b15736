"""Operations of random walks over a coordinator: those of generators, and those of a trainer."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any

import msgspec
from coordinator_walk import NAMES, REACHED, Walk, oldest, token
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from scalerl_api import wire
from scalerl_api.wire import NextAction, PushResult, Split
from scalerl_coordinator import slots
from scalerl_coordinator.training_leases import PATIENCE_SECONDS


class GeneratorRules(Walk):
    """Generators that come, go, repeat themselves and answer late."""

    @rule(name=st.sampled_from(NAMES), keeps=st.booleans(), said=st.booleans())
    def register(self, name: str, keeps: bool, said: bool) -> None:
        held = [lease.lease_id for holder, lease in self.work if holder == name] if keeps else []
        version = self.members.get(name, ("", -1))[1] if keeps else -1
        self.members[name] = (self.world.register(name, held, version if said else None), version)
        self.world.acknowledge()

    @rule(name=st.sampled_from(NAMES), healthy=st.booleans(), tokens=st.integers(0, 9))
    def beat(self, name: str, healthy: bool, tokens: int) -> None:
        self._as_member(name, lambda i, v: self.world.beat(i, v, healthy=healthy, generated_tokens=tokens))

    @rule(name=st.sampled_from(NAMES), groups=st.integers(1, 8))
    def lease(self, name: str, groups: int) -> None:
        self._lease(name, lambda i, v: self.world.lease(i, v, groups))

    @rule(order=st.permutations(NAMES), groups=st.lists(st.integers(1, 4), min_size=3, max_size=3))
    def lease_at_once(self, order: list[str], groups: list[int]) -> None:
        """All requests are open before the first is answered; who has no answer in the end would have none alone.

        A slot whose retry was delayed may become free meanwhile, for which a request can first be passed over then.
        """
        wanted = dict(zip(order, groups, strict=True))
        open_requests = [
            name
            for name in order
            if self._as_member(name, lambda i, v, n=wanted[name]: self.world.ask(i, v, n) is None)
        ]
        for seconds in (0.0, *[PATIENCE_SECONDS] * 4):
            self.world.now += seconds
            open_requests = [
                name
                for name in open_requests
                if not self._lease(name, lambda i, _, n=wanted[name]: self.world.take(i, n))
            ]
            REACHED["requests passed over"] += bool(open_requests)
        for member_id, _ in self.members.values():
            self.world.generator_requests.end_lease_request(member_id)
        for name in open_requests:
            assert not self._lease(name, lambda i, v: self.world.lease(i, v, 1))

    def _lease(self, name: str, take: Callable[[str, int], list[wire.Lease]]) -> list[wire.Lease]:
        leases = self._as_member(name, take) or []
        self.work += [(name, lease) for lease in leases]
        for lease in leases:
            self.reported[lease.lease_id] = self._continued(lease)
            if lease.split is Split.TRAIN:
                state, identity = self.world.state, self.world.settings.identity
                step, k = state.step_of(lease.slot), identity.max_staleness_steps
                fresh = step > state.lost and lease.slot in slots.on_policy_slots(step, state.batch_sizes, k)
                fresh &= not identity.steps_per_batch
                assert step - self.members[name][1] <= (0 if fresh else self._bound(step))
                assert self.max_steps is None or step < self.max_steps
                tries = len(state.tries.get(lease.slot, ()))
                assert (lease.prompt.task, lease.prompt.index) == self._prompt(lease.slot, tries)
        return leases

    @precondition(lambda self: self.work)
    @rule(data=st.data(), flat=st.booleans())
    def push(self, data: st.DataObject, flat: bool) -> None:
        self._push(data.draw(st.integers(0, len(self.work) - 1)), flat)

    def _push(self, at: int, flat: bool) -> None:
        name, lease = self.work.pop(at)
        group = self._group(name, lease, flat)
        result = self._as_member(name, lambda i, _: self.world.push(i, group))
        if result is None:
            self.work.append((name, lease))
        elif result is PushResult.ACCEPTED and lease.split is Split.TRAIN:
            self.accepted[group.lease_id] = group
            if oldest(group) == self.members[name][1]:
                self.sampled_with[group.lease_id] = oldest(group), self.held_weights[name]
        else:
            stale = {PushResult.STALE} if self.world.changed else set()
            assert result in {PushResult.ACCEPTED, PushResult.LATE} | stale

    @precondition(lambda self: self.work)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def report_unfinished(self, data: st.DataObject, tokens: int) -> None:
        name, lease = data.draw(st.sampled_from(self.work))
        sampled = self.reported[lease.lease_id]
        self._report(name, lease, tokens, data.draw(st.integers(0, len(sampled)), label="start"))

    def _report(self, name: str, lease: wire.Lease, tokens: int, start: int | None) -> None:
        """``tokens`` of each completion from ``start`` on, or after those that were reported."""
        held = self.members.get(name, ("", -1))[1]
        sampled = self.reported[lease.lease_id]
        start = len(sampled) if start is None else start
        tokens = min(tokens, lease.max_tokens - 1 - start)
        if tokens < 0 or held > lease.policy_version or held < max(sampled[:start], default=0):
            return
        ids = [token(lease, at) for at in range(start, start + tokens)]
        partial = wire.Partial(
            start=start,
            token_ids=struct.pack(f"<{tokens}i", *ids),
            logprobs=struct.pack(f"<{tokens}f", *(-0.5 for _ in ids)),
            versions=[wire.VersionSpan(held, 0)] if tokens else [],
        )
        group = wire.PartialGroup(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            temperature=lease.temperature,
            prompt_token_ids=b"",
            completions=[partial] * lease.completions,
        )
        reply = self._as_member(
            name,
            lambda i, _: self.world.generator_requests.receive_partials(
                wire.Partials(member_id=i, groups=[group]), self.world.now
            ),
        )
        if reply is not None:
            missing = lease.lease_id in reply.missing
            self.reported[lease.lease_id] = [] if missing else [*sampled[:start], *[held] * tokens]

    def _continued(self, lease: wire.Lease) -> list[int]:
        """The version of each token that a lease comes with, which must be of its slot and prompt and young enough."""
        if lease.partial is None:
            return []
        partials, state = lease.partial.completions, self.world.state
        assert len(partials) == lease.completions
        ids = struct.unpack(f"<{partials[0].tokens}i", partials[0].token_ids)
        assert list(ids) == [token(lease, at) for at in range(len(ids))]
        ends = [*(span.start for span in partials[0].versions[1:]), len(ids)] if ids else []
        versions = [
            span.version
            for span, end in zip(partials[0].versions, ends, strict=True)
            for _ in range(span.start, end)
        ]
        assert len(versions) == len(ids)
        if lease.split is Split.HELD_OUT:
            assert set(versions) <= {lease.policy_version} - set(range(state.lost + 1))
        else:
            oldest = state.step_of(lease.slot) - self.world.settings.identity.max_staleness_steps
            assert all(oldest <= version <= state.newest for version in versions)
        self.handed_over += len(versions)
        return versions

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def push_again(self, data: st.DataObject, name: str) -> None:
        group = self.accepted[data.draw(st.sampled_from(sorted(self.accepted)))]
        before = self.world.state.counts.acknowledged
        result = self._as_member(name, lambda i, _: self.world.push(i, group))
        assert result in (None, PushResult.DUPLICATE, PushResult.LATE)
        assert self.world.state.counts.acknowledged == before

    @precondition(lambda self: self.work)
    @rule(data=st.data(), bad=st.sampled_from(["nan", "short", "future", "slot", "verdict", "teacher"]))
    def push_spoiled(self, data: st.DataObject, bad: str) -> None:
        name, lease = data.draw(st.sampled_from(self.work))
        group = self._group(name, lease, False)
        completion = group.completions[0]
        if bad == "teacher" and not completion.teacher_logprobs:
            return
        broken: dict[str, Any] = {
            "nan": {"logprobs": b"\x00\x00\xc0\x7f" * completion.tokens},
            "short": {"token_ids": completion.token_ids[:-4]},
            "future": {"versions": [wire.VersionSpan(10_000, 0)]},
            "teacher": {"teacher_logprobs": b""},
        }.get(bad, {})
        fields = {name: getattr(completion, name) for name in wire.Completion.__struct_fields__}
        invalid = wire.Completion(**{**fields, **broken})
        values = {name: getattr(group, name) for name in wire.Group.__struct_fields__}
        values["completions"] = [invalid, *group.completions[1:]]
        if bad == "slot":
            values["prompt"] = msgspec.structs.replace(lease.prompt, index=lease.prompt.index + 1)
        if bad == "verdict":
            values["verdicts"] = wire.Verdicts(scores=[math.nan, *group.verdicts.scores[1:]])
        result = self._as_member(name, lambda i, _: self.world.push(i, wire.Group(**values)))
        assert result in (None, PushResult.INVALID, PushResult.LATE)

    @precondition(lambda self: self.work)
    @rule(data=st.data(), cause=st.sampled_from(wire.ReleaseCause), reports=st.integers(0, 2))
    def release(self, data: st.DataObject, cause: wire.ReleaseCause, reports: int) -> None:
        name, lease = self.work.pop(data.draw(st.integers(0, len(self.work) - 1)))
        if reports:
            self._report(name, lease, reports, None)
        request = lambda i: wire.Release(  # noqa: E731
            member_id=i, lease_ids=[lease.lease_id], reason="no", cause=cause
        )
        self._as_member(name, lambda i, _: self.world.generator_requests.release(request(i), self.world.now))

    @rule(seconds=st.sampled_from([1, 5, 20, 120]), alive=st.sets(st.sampled_from(NAMES)))
    def pass_time(self, seconds: int, alive: set[str]) -> None:
        beats = {i: v for name, (i, v) in self.members.items() if name in alive}
        self.world.pass_time(seconds, beats)
        self.world.acknowledge()


class TrainerRules(Walk):
    """A trainer that falls back to any kept checkpoint."""

    @precondition(lambda self: not self.incarnation)
    @rule()
    def trainer_starts(self) -> None:
        self._hello(max(self.checkpoints, default=0))

    @precondition(lambda self: self.incarnation)
    @rule(data=st.data())
    def trainer_crashes(self, data: st.DataObject) -> None:
        self._hello(data.draw(st.sampled_from(sorted(self.checkpoints) or [0])))

    @precondition(lambda self: self.incarnation)
    @rule(skipped=st.sampled_from(["", "", "", "the loss is nan"]))
    def trainer_goes_on(self, skipped: str = "") -> None:
        world = self.world
        following = world.next(self.incarnation)
        world.acknowledge()
        if following is None:
            return
        if following.action is NextAction.PUBLISH:
            self.unpublished = True
        elif following.action is NextAction.TRAIN:
            step = following.step
            if step > world.state.published and world.trainer_requests.permits.publishes(step):
                REACHED["steps trained while an evaluation holds a publish"] += self.unpublished
                assert not any(
                    world.trainer_requests.evaluations.due(step, t) for t in world.settings.identity.set_tasks
                )
            plan = world.plan(self.incarnation, step)
            assert [g.slot for g in plan.groups] == list(world.state.slots_of(step))
            for lease_id in plan.lease_ids:
                # Acknowledged, or accepted just before a crash that kept it without the answer going out.
                group = self.accepted.get(lease_id)
                if group is not None:
                    tries = len(world.state.tries.get(group.slot, ()))
                    assert (group.prompt.task, group.prompt.index) == self._prompt(group.slot, tries)
                    assert step - oldest(group) <= self._bound(step)
            assert step == len(self.trained)
            for version, weights in map(self.sampled_with.get, plan.lease_ids, repeat((-1, -1))):
                if version == step and weights != self.weights[step]:
                    assert plan.ambiguous, (
                        "tokens of lost weights are compared as if the trainer's had sampled them"
                    )
                    REACHED["trained tokens of lost weights"] += 1
            self._check_shard(plan)
            self.trained[step] = plan.lease_ids
            self.trained_weights += 1
            self.weights[step + 1] = self.trained_weights
            every = [lease_id for ids in self.trained.values() for lease_id in ids if lease_id]
            assert len(set(every)) == len(every)  # each slot once; one given up has no lease
            assert world.report(self.incarnation, step, skipped, loss=1.0) is not None
            assert world.report(self.incarnation, step, skipped, loss=1.0) is None  # its answer was lost
            self.unpublished = world.state.version > world.state.published
            self.unpublished &= world.trainer_requests.permits.publishes(world.state.version)
        elif following.action is NextAction.FINISH:
            assert self.max_steps == world.state.version
        world.acknowledge()

    @precondition(lambda self: self.incarnation and self.unpublished)
    @rule(failing=st.sets(st.sampled_from(NAMES)))
    def trainer_publishes(self, failing: set[str]) -> None:
        world = self.world
        permit = world.begin_publish(self.incarnation)
        if permit is not None:
            failed = [m.member_id for m in permit.members if m.name in failing]
            updated = [m.member_id for m in permit.members if m.name not in failing]
            self._check_kept_versions(permit)
            for name, (member_id, _) in self.members.items():
                if member_id in updated:
                    self.members[name] = (member_id, world.state.version)
                    self.held_weights[name] = self.weights[world.state.version]
            world.commit_publish(self.incarnation, updated, failed, probe_kl=0.001, probe_tokens=8.0)
            self.unpublished = False
        world.acknowledge()

    def _check_kept_versions(self, permit: wire.PublishPermit) -> None:
        """No generator loses the version of a prompt whose evaluation holds a publish."""
        world = self.world
        state, follows = world.state, world.settings.follows
        open_evaluations = [e for e in state.evaluations.values() if follows(e.task) and not e.released]
        holding = {(e.version, e.task) for e in open_evaluations}
        versions = {m.name: m.weight_version for m in permit.members}
        for lease in state.leases.values():
            if lease.split is Split.HELD_OUT and (lease.policy_version, lease.prompt.task) in holding:
                assert versions.get(lease.holder) != lease.policy_version
        kept = {v for v, _ in holding if v < state.version}
        present = {m.version for m in world.core.membership.members.values()}
        REACHED["publishes while a generator keeps a version"] += bool(permit.members) and bool(
            kept & present
        )

    @precondition(lambda self: self.incarnation)
    @rule(keep=st.integers(1, 2))
    def trainer_checkpoints(self, keep: int) -> None:
        version = self.world.state.version
        kept = sorted({*self.checkpoints, version})[-keep:]
        kept = kept if version in kept else [*kept, version]
        snapshot = self.world.checkpoint(self.incarnation, kept)
        self.checkpoints = {v: s for v, s in self.checkpoints.items() if v in kept}
        self.checkpoints[version] = snapshot, dict(self.trained), dict(self.weights)
        self.world.acknowledge()
