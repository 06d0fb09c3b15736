"""What generators ask for: membership, leases, and taking in what they made."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass

from scalerl_api import wire
from scalerl_api.wire import PushResult, ReleaseCause, Split
from scalerl_coordinator import records as r
from scalerl_coordinator.checks import BadGroup, Measured, measure
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.leases import Place
from scalerl_coordinator.membership import Member, UnknownMember
from scalerl_coordinator.slots import is_fresh, lease_limit, staleness

log = logging.getLogger(__name__)

_MOST_LEASES = 4096
"""In one answer."""

Verdict = tuple[PushResult, str | None]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a pushed group has to be."""

    split: Split
    slot: int
    prompt_index: int
    policy_version: int
    lapsed: bool
    """Its lease expired, but nobody else has the slot yet."""


class Rollouts:
    """The endpoints of the actors, on a :class:`~.core.Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._told_of_grading = False

    # --- membership -----------------------------------------------------------------------------

    def register(self, request: wire.Register, member_id: str, now: float) -> wire.Registered:
        """A generator is up. Leases of its name go on if it says that it holds them, else to others.

        Raises:
            Refusal: ``task-mismatch``.
        """
        core = self._core
        digest = core.settings.identity.train_digest
        if request.task_digest != digest:
            raise Refusal(
                "task-mismatch",
                f"{request.name} has training prompts {request.task_digest[:16]}…, the coordinator {digest[:16]}…: "
                f"both must read the same run file and the same data, with the same version of the task library",
            )
        core.membership.register(member_id, request.name, request.control_url, now)
        for lease_id in sorted(core.book.of(request.name) - set(request.held_leases)):
            core.close_lease(lease_id, r.Why.EXPIRED)
        core.wake.add(TRAINER)
        return wire.Registered(member_id=member_id, heartbeat_seconds=core.settings.heartbeat_seconds)

    def heartbeat(self, request: wire.Heartbeat, now: float) -> None:
        """Raises UnknownMember."""
        core = self._core
        member = core.membership.get(request.member_id, now)
        if not (math.isfinite(request.busy_seconds) and request.busy_seconds >= 0):
            raise Refusal("bad-request", f"busy_seconds {request.busy_seconds} is not a number of seconds")
        if core.state.leased and not core.finished:
            core.meter.busy += max(0.0, request.busy_seconds - member.busy_seconds)
            core.meter.tokens += max(0, request.generated_tokens - member.generated_tokens)
        member.busy_seconds, member.generated_tokens = request.busy_seconds, request.generated_tokens
        if (
            core.membership.report_version(member, request.weight_version, now)
            or request.healthy != member.healthy
        ):
            core.wake |= {WORK, TRAINER}
        member.healthy = request.healthy
        for lease_id, progress in request.progress.items():
            core.book.extend(lease_id, member.name, progress, now)
        if not member.healthy:
            core.give_away(member.name)
        elif request.held_leases is not None:
            # An answer that never arrived leaves leases that nobody works on; two heartbeats after it tell.
            older = now - 2 * core.settings.heartbeat_seconds
            for lease_id in core.book.abandoned(member.name, request.held_leases, older):
                core.close_lease(lease_id, r.Why.EXPIRED)

    # --- leases ---------------------------------------------------------------------------------

    def arrive(self, request: wire.LeaseRequest, now: float) -> None:
        """A lease request came in, with the version its sender holds. Raises UnknownMember."""
        core = self._core
        if request.max_groups < 1:
            raise Refusal("bad-request", f"max_groups is {request.max_groups}, must be at least 1")
        member = core.membership.get(request.member_id, now)
        if core.membership.report_version(member, request.weight_version, now):
            core.wake.add(TRAINER)

    def offer(self, member_id: str, max_groups: int, now: float) -> wire.Leases | None:
        """Work for a member that polls, or None while there is none. Raises UnknownMember.

        Whoever sends the leases says so to the lease book (:meth:`~.leases.LeaseBook.tell`).
        """
        core = self._core
        member = core.membership.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is not known here any more; register again")
        if core.state.finish_reason and core.ending:
            return wire.Leases(leases=[], stop=True)
        if core.interrupted:
            return None
        if core.state.fresh or not member.healthy or not 0 <= member.version <= core.newest_possible:
            # Weights from beyond what is known here belong to a line of versions that is lost.
            return None
        wanted = min(max_groups, _MOST_LEASES)
        issues = self._evaluation_issues(member, wanted, now)
        held_back: list[tuple[int, int]] = []
        if not core.ending:
            training, held_back = self._training_issues(member, wanted - len(issues), now)
            issues += training
        if not issues:
            return None
        numbered = [
            r.Issue(core.state.next_lease + n, split, slot, prompt, version)
            for n, (split, slot, prompt, version) in enumerate(issues)
        ]
        core.commit(r.LeasesIssued(member.name, numbered, held_back))
        return wire.Leases(leases=[self._lease(issue, member.name, now) for issue in numbered])

    def _evaluation_issues(
        self, member: Member, wanted: int, now: float
    ) -> list[tuple[Split, int, int, int]]:
        issues: list[tuple[Split, int, int, int]] = []
        for version, evaluation in sorted(self._core.state.evaluations.items()):
            if member.version == version or (evaluation.released and member.version > version):
                ready = (p for p in evaluation.todo if self._may_try((Split.HELD_OUT, p), member, now))
                positions = itertools.islice(ready, wanted - len(issues))
                issues += [(Split.HELD_OUT, position, position, version) for position in positions]
        return issues

    def _training_issues(
        self, member: Member, wanted: int, now: float
    ) -> tuple[list[tuple[Split, int, int, int]], list[tuple[int, int]]]:
        """What ``member`` may be given, and the new slots (with their prompts) that are passed over for its weights."""
        core, identity = self._core, self._core.settings.identity
        state, version = core.state, member.version
        sizes, k = state.batch_sizes, identity.max_staleness_steps
        limit = lease_limit(version, sizes, k, core.settings.max_steps)

        def too_old(slot: int) -> bool:
            step = state.step_of(slot)
            return version < step and step > state.lost and is_fresh(slot, sizes, k)

        issues: list[tuple[Split, int, int, int]] = []
        for slot in state.reissue:
            if len(issues) >= wanted or slot >= limit:
                break
            if not too_old(slot) and self._may_try((Split.TRAIN, slot), member, now):
                issues.append((Split.TRAIN, slot, state.prompts[slot], version))
        held_back: list[tuple[int, int]] = []
        for slot in range(state.next_slot, limit):
            if len(issues) >= wanted:
                break
            prompt = core.curriculum.choose(slot)
            if too_old(slot):
                held_back.append((slot, prompt))
            else:
                issues.append((Split.TRAIN, slot, prompt, version))
        newest = max((slot for _, slot, _, _ in issues), default=-1)
        return issues, [(slot, prompt) for slot, prompt in held_back if slot < newest]

    def _may_try(self, place: Place, member: Member, now: float) -> bool:
        """Whether ``place`` may be issued to ``member`` now; what failed with it is for others first."""
        core = self._core
        return not core.book.waits(place, now) and not core.others_should_try(place, member)

    def _lease(self, issue: r.Issue, holder: str, now: float) -> wire.Lease:
        core, identity = self._core, self._core.settings.identity
        lease_id = core.state.lease_id(issue.number)
        core.book.add(lease_id, holder, now, told=False)
        held_out = issue.split is Split.HELD_OUT
        return wire.Lease(
            lease_id=lease_id,
            split=issue.split,
            slot=issue.slot,
            prompt_index=issue.prompt_index,
            prompt_id="",
            completions=identity.evaluation_samples if held_out else identity.completions_per_prompt,
            max_tokens=identity.max_completion_tokens,
            temperature=identity.evaluation_temperature if held_out else core.settings.temperature,
            remaining_seconds=core.book.lease_seconds,
            policy_version=issue.policy_version,
        )

    def release(self, request: wire.Release, now: float) -> None:
        """Leases come back unserved. Unknown ones are passed over: they were given away before. Raises UnknownMember."""
        failed = request.cause is ReleaseCause.FAILED
        core = self._core
        member = core.membership.get(request.member_id, now)
        for lease_id in request.lease_ids:
            lease = core.state.leases.get(lease_id)
            if lease is None:
                continue
            core.close_lease(lease_id, r.Why.RELEASED)
            reason = f"released by {member.name}: {request.reason}"
            if request.cause is ReleaseCause.TOO_LONG:
                core.give_up(lease, r.GivenUpFor.TOO_LONG, reason, now)
            else:
                core.spoil(lease, reason, now, failed=failed)

    def give_up_prompts(self, failed: dict[str, str], now: float) -> None:
        """The prompts of these leases cannot be made, for the reason beside each: nobody can serve them."""
        for lease_id, reason in failed.items():
            lease = self._core.state.leases.get(lease_id)
            if lease is not None:
                self._core.close_lease(lease_id, r.Why.RELEASED)
                self._core.give_up(lease, r.GivenUpFor.FAILED, reason, now)

    # --- pushes ---------------------------------------------------------------------------------

    def push(self, member_id: str, group: wire.Group, payload: bytes, now: float) -> Verdict:
        """Take in one group; ``payload`` is its encoding as it came, for the journal. Raises UnknownMember."""
        member = self._core.membership.get(member_id, now)
        expected = self._expected(group)
        if isinstance(expected, tuple):
            return expected
        try:
            measured = self._measure(group, expected)
        except BadGroup as problem:
            return self._spoiled(group, expected, PushResult.INVALID, f"{member.name}: {problem}", now)
        member.proven = True
        self._notice_grading(member, group, measured)
        if expected.split is Split.HELD_OUT:
            self._accept_evaluation(group, expected, measured, now)
            return PushResult.ACCEPTED, None
        identity = self._core.settings.identity
        age = staleness(self._core.state.step_of(expected.slot), measured.oldest_version)
        if age > identity.max_staleness_steps:
            reason = f"{member.name}: a token is {age} steps old at its step, {identity.max_staleness_steps} allowed"
            return self._spoiled(group, expected, PushResult.STALE, reason, now)
        self._core.commit(
            r.GroupAccepted(
                lease_id=group.lease_id,
                slot=expected.slot,
                prompt_tokens=len(group.prompt_token_ids) // 4,
                lengths=measured.lengths,
                scores=measured.scores,
                truncated=measured.truncated,
                oldest_version=measured.oldest_version,
                version_tokens=measured.version_tokens,
                grading_errors=len(measured.ungraded),
                ungraded=measured.ungraded,
                masked_tokens=measured.masked_tokens,
            ),
            payload,
        )
        self._core.book.remove(group.lease_id)
        self._core.book.spoiled.pop((Split.TRAIN, expected.slot), None)
        return PushResult.ACCEPTED, None

    def _expected(self, group: wire.Group) -> _Expected | Verdict:
        """What the group's lease asked for, or why it does not matter any more."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        if lease is not None:
            return _Expected(lease.split, lease.slot, lease.prompt_index, lease.policy_version, False)
        if group.split is Split.HELD_OUT:
            for evaluation in state.evaluations.values():
                result = evaluation.results.get(group.slot)
                if result is not None and result.lease_id == group.lease_id:
                    return PushResult.DUPLICATE, None
            return PushResult.LATE, "the lease had expired, or the evaluation is over"
        accepted = state.groups.get(group.slot)
        if accepted is not None and accepted.lease_id == group.lease_id:
            self._core.commit(r.Dropped(late=0, duplicate=len(group.completions)))
            return PushResult.DUPLICATE, None
        if state.lapsed.get(group.slot) == group.lease_id:
            return _Expected(Split.TRAIN, group.slot, state.prompts[group.slot], -1, True)
        self._core.commit(r.Dropped(late=len(group.completions), duplicate=0))
        return PushResult.LATE, "the lease had expired and the slot was given away"

    def _measure(self, group: wire.Group, expected: _Expected) -> Measured:
        """Raises BadGroup where the group is not what its lease asked for."""
        core, identity = self._core, self._core.settings.identity
        for name in ("split", "slot", "prompt_index"):
            if getattr(group, name) != getattr(expected, name):
                raise BadGroup(f"{name} is {getattr(group, name)}, leased {getattr(expected, name)}")
        prompt_id = core.book.prompt_id(group.lease_id)
        if prompt_id is not None and group.prompt_id != prompt_id:
            raise BadGroup(f"prompt_id is {group.prompt_id!r}, leased {prompt_id!r}")
        held_out = expected.split is Split.HELD_OUT
        return measure(
            group,
            identity.evaluation_samples if held_out else identity.completions_per_prompt,
            identity.max_completion_tokens,
            core.state.newest,
        )

    def _spoiled(
        self, group: wire.Group, expected: _Expected, result: PushResult, reason: str, now: float
    ) -> Verdict:
        core = self._core
        rollouts = len(group.completions)
        log.warning(
            "lease %s, %s slot %d: %s: %s", group.lease_id, expected.split, expected.slot, result, reason
        )
        if expected.lapsed:
            core.commit(r.Dropped(late=rollouts, duplicate=0))
            return PushResult.LATE, reason
        lease = core.state.leases[group.lease_id]
        core.close_lease(group.lease_id, r.Why(result.value), rollouts)
        core.spoil(lease, reason, now, failed=result is PushResult.INVALID)
        return result, reason

    def _notice_grading(self, member: Member, group: wire.Group, measured: Measured) -> None:
        """Say once what went wrong; the rest is counted."""
        if measured.ungraded and not self._told_of_grading:
            self._told_of_grading = True
            error = next(c.grading_error for c in group.completions if c.grading_error is not None)
            log.error(
                "%s, prompt %s: the verifier failed on %d of %d completions: %s; from now on grading errors are "
                "only counted, in the status and in metrics.jsonl",
                *(member.name, group.prompt_id, len(measured.ungraded), len(group.completions), error),
            )

    def _accept_evaluation(
        self, group: wire.Group, expected: _Expected, measured: Measured, now: float
    ) -> None:
        core = self._core
        evaluation = core.state.evaluations[expected.policy_version]
        if len(evaluation.results) + 1 == evaluation.prompts:
            core.flush_usage(now)  # the point that follows carries the time
        core.commit(
            r.EvaluationAccepted(
                lease_id=group.lease_id,
                scores=measured.scores,
                tokens=sum(measured.lengths),
                truncated=measured.truncated,
                mixed=not measured.oldest_version == measured.newest_version == expected.policy_version,
                grading_errors=len(measured.ungraded),
            )
        )
        core.book.remove(group.lease_id)
        core.book.spoiled.pop((Split.HELD_OUT, expected.slot), None)
