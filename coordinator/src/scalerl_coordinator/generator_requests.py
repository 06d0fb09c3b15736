"""Requests of the generators but pushes (:mod:`.pushed_groups`): membership, leases, unfinished completions."""

from __future__ import annotations

import itertools
import logging
import math

import msgspec

from scalerl_api import wire
from scalerl_api.wire import PromptRef, ReleaseCause, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.evaluators import Evaluators
from scalerl_coordinator.group_checks import InvalidGroup, check_partials
from scalerl_coordinator.membership import Member, UnknownMember
from scalerl_coordinator.partials import MAX_ANSWER_BYTES, PartialKey, PartialStore, partial_key
from scalerl_coordinator.pushed_groups import PushedGroups
from scalerl_coordinator.slot_attempts import SlotAttempts
from scalerl_coordinator.training_leases import TrainingLeases

log = logging.getLogger(__name__)

_MAX_LEASES = 4096
"""Maximum of leases in one response."""

OTHER_SETS_EVERY = 8
"""Every eighth lease goes first to an evaluation set that the forecast does not follow. Such an evaluation therefore completes
even if training could use all generators, and takes at most an eighth of the leases from it."""


class GeneratorRequests:
    """Decides the requests of the actors on a :class:`~.core.Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._partials = PartialStore()
        self._attempts, self._evaluators = SlotAttempts(core), Evaluators(core)
        self._training_leases = TrainingLeases(core, self._attempts)
        self.pushes = PushedGroups(
            core, self._attempts, self._partials, self._training_leases.pace.observe_group
        )
        self._ticked_at = 0.0

    # --- membership -----------------------------------------------------------------------------

    def register(self, request: wire.Register, member_id: str, now: float) -> wire.Registered:
        """Register a generator. It keeps those leases of its name that it still holds; the others are reassigned.

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
        grading = tuple(request.grading) if any(request.grading) else ()
        if grading != core.settings.identity.grading:
            raise Refusal(
                "task-mismatch",
                f"{request.name} has other code of the verifier than the coordinator: it was edited during the run, or "
                "differs between nodes. Put it back, or resume the run with the new code, which begins another segment of its curve",
            )
        core.membership.register(member_id, request.name, request.control_url, now)
        for lease_id in sorted(core.book.of(request.name) - set(request.held_leases)):
            core.close_lease(lease_id, r.CloseReason.EXPIRED)
        core.wake.add(TRAINER)
        return wire.Registered(member_id=member_id, heartbeat_seconds=core.settings.heartbeat_seconds)

    def heartbeat(self, request: wire.Heartbeat, now: float) -> None:
        """Record a member's report, extend its leases, and reassign those that it will not deliver.

        Raises:
            UnknownMember
            Refusal: ``bad-request``.
        """
        core = self._core
        member = core.membership.get(request.member_id, now)
        if not (math.isfinite(request.busy_seconds) and request.busy_seconds >= 0):
            raise Refusal("bad-request", f"busy_seconds {request.busy_seconds} is not a number of seconds")
        if core.state.leased and not core.finished:
            core.meter.busy += max(0.0, request.busy_seconds - member.busy_seconds)
            core.meter.tokens += max(0, request.generated_tokens - member.generated_tokens)
        member.busy_seconds, member.generated_tokens = request.busy_seconds, request.generated_tokens
        if core.report_version(member, request.weight_version, now) or request.healthy != member.healthy:
            core.wake |= {WORK, TRAINER}
        member.healthy = request.healthy
        if request.teacher_problem and not member.teacher_problem:
            log.warning("%s: %s; its groups wait for the teacher", member.name, request.teacher_problem)
        member.teacher_problem = request.teacher_problem
        if request.reward_problem and not member.reward_problem:
            log.warning("%s: %s; its groups wait", member.name, request.reward_problem)
        member.reward_problem = request.reward_problem
        if request.environment_problem and not member.environment_problem:
            log.warning("%s: %s; its episodes wait", member.name, request.environment_problem)
        member.environment_problem = request.environment_problem
        member.generated_leases = frozenset(request.generated_leases)
        for lease_id, progress in request.progress.items():
            core.book.extend(lease_id, member.name, progress, now)
        if not member.healthy:
            core.reassign_leases(member.name)
        elif request.held_leases is not None:
            # If a response with leases was lost, no worker has them. A heartbeat may have been sent before the response
            # arrived, so a lease counts as lost only if it is missing two intervals after the response.
            two_intervals_ago = now - 2 * core.settings.heartbeat_seconds
            for lease_id in core.book.abandoned(member.name, request.held_leases, two_intervals_ago):
                core.close_lease(lease_id, r.CloseReason.EXPIRED)

    # --- leases ---------------------------------------------------------------------------------

    def receive_lease_request(self, request: wire.LeaseRequest, now: float) -> None:
        """Record the weight version in a lease request, and that the member waits for leases.

        Raises:
            UnknownMember
            Refusal: ``bad-request``.
        """
        core = self._core
        if request.max_groups < 1:
            raise Refusal("bad-request", f"max_groups is {request.max_groups}, must be at least 1")
        member = core.membership.get(request.member_id, now)
        if core.report_version(member, request.weight_version, now):
            core.wake.add(TRAINER)
        self._training_leases.begin_request(request.member_id, min(request.max_groups, _MAX_LEASES))

    def end_lease_request(self, member_id: str) -> None:
        """Record that the member's lease request was answered or its client disconnected."""
        self._training_leases.end_request(member_id)

    def tick(self, now: float) -> None:
        """Handle timeouts (lost members, expired leases, ended back-offs), and update the assignment of training leases.

        Call it a few times a second.
        """
        core, before = self._core, self._ticked_at
        self._ticked_at = now
        for name in core.membership.lost(now):
            core.reassign_leases(name)
            core.wake.add(TRAINER)
        for lease_id in core.book.expired(now):
            lease = core.state.leases[lease_id]
            core.close_lease(lease_id, r.CloseReason.TIMED_OUT)
            reason = f"{lease.holder} made no progress for {core.settings.lease_seconds:g} s"
            self._attempts.retry_slot(lease, reason, now, failed=True)
        if core.book.wait_over(before, now):
            core.wake.add(WORK)
        self._training_leases.tick(now)

    def offer(self, member_id: str, max_groups: int, now: float) -> wire.Leases | None:
        """Issue leases to a member that polls; None while there are none for it.

        The caller calls :meth:`~.leases.LeaseBook.mark_sent` when it sends them.

        Raises:
            UnknownMember
        """
        core = self._core
        member = core.membership.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is unknown; register again")
        if core.state.finish_reason and core.end_reason:
            return wire.Leases(leases=[], stop=True)
        if core.interrupted:
            return None
        if core.state.awaits_trainer or not member.healthy or not 0 <= member.version <= core.newest_possible:
            # A version newer than any known one belongs to a lost lineage.
            return None
        wanted = min(max_groups, _MAX_LEASES)
        issues = self._evaluation_issues(member, wanted, now, followed=True)
        others = self._evaluation_issues(member, wanted - len(issues), now, followed=False)
        if not core.end_reason:
            first = core.state.next_lease + len(issues)
            reserved = sum(n % OTHER_SETS_EVERY == 0 for n in range(first, first + wanted - len(issues)))
            issues, others = issues + others[:reserved], others[reserved:]
            slots = self._training_leases.choose(member, wanted - len(issues), now)
            issues += [(core.state.prompts[slot], slot, member.version) for slot in slots]
        issues += others[: wanted - len(issues)]
        if not issues:
            return None
        self._training_leases.end_request(member_id)
        numbered = [
            r.Issue(core.state.next_lease + n, prompt, slot, version)
            for n, (prompt, slot, version) in enumerate(issues)
        ]
        core.commit(r.LeasesIssued(member.name, numbered))
        leases, bytes_left = [], MAX_ANSWER_BYTES
        for issue in numbered:
            lease = self._lease(issue, member.name, now)
            key = partial_key(lease.prompt, lease.slot, lease.policy_version)
            partial = self._partials.take(key, lease, self._continued_versions(lease, member), bytes_left)
            if partial is not None:
                bytes_left -= sum(2 * len(c.token_ids) for c in partial.completions)
                lease = msgspec.structs.replace(lease, partial=partial)
            leases.append(lease)
        return wire.Leases(leases=leases)

    def _continued_versions(self, lease: wire.Lease, member: Member) -> range:
        """Weight versions of the tokens that ``lease`` may continue from."""
        state, k = self._core.state, self._core.settings.identity.max_staleness_steps
        if lease.split is Split.HELD_OUT:
            # An evaluation that does not hold a publish may continue with newer weights than those it evaluates.
            return range(max(lease.policy_version, state.lost + 1), member.version + 1)
        # Includes newer weights and lost lineages, as generators that were not killed also continue such completions:
        # restarting unfinished completions would bias the batch towards short ones.
        return range(state.step_of(lease.slot) - k, state.newest + 1)

    def _evaluation_issues(
        self, member: Member, wanted: int, now: float, *, followed: bool
    ) -> list[tuple[PromptRef, int, int]]:
        """Up to ``wanted`` prompts of open evaluations that ``member`` may serve, as (prompt, slot, version).

        ``followed``: of the sets that the forecast follows, whose evaluations hold a publish; otherwise of the other sets.
        """
        issues: list[tuple[PromptRef, int, int]] = []
        core, state = self._core, self._core.state

        def priority(entry: tuple[tuple[int, int], Evaluation]) -> tuple[bool, int, tuple[int, int]]:
            # At the end of the run, evaluations of the last version come first: the run waits for them alone. Then the one
            # with the fewest prompts left, so that a large set does not delay a small one.
            key, evaluation = entry
            return bool(core.end_reason) and key[0] != state.version, len(evaluation.todo), key

        for (version, task), evaluation in sorted(state.evaluations.items(), key=priority):
            if core.settings.follows(task) is not followed:
                continue
            # Those that the forecast follows are of one version, unless they are released.
            chosen = None if self._evaluators.newer_may_complete(evaluation) else self._evaluators.of(version)
            if member.version == version or (chosen is None and member.version > version):
                keys = ((task, Split.HELD_OUT, p) for p in evaluation.todo)
                ready = (
                    key[2]
                    for key in keys
                    if chosen is None or self._evaluators.may_evaluate(key, member, chosen)
                    if self._attempts.may_issue(key, member, now, version)
                )
                positions = itertools.islice(ready, wanted - len(issues))
                issues += [(PromptRef(task, evaluation.split, at), at, version) for at in positions]
        return issues

    def _lease(self, issue: r.Issue, holder: str, now: float) -> wire.Lease:
        core, identity = self._core, self._core.settings.identity
        lease_id = core.state.lease_id(issue.number)
        core.book.add(lease_id, holder, now, sent=False)
        held_out = issue.prompt.split is Split.HELD_OUT
        return wire.Lease(
            lease_id=lease_id,
            prompt=issue.prompt,
            slot=issue.slot,
            prompt_id="",
            completions=identity.completions(issue.prompt),
            max_tokens=identity.max_tokens(issue.prompt.task),
            temperature=identity.evaluation_temperature if held_out else core.settings.temperature,
            remaining_seconds=core.book.lease_seconds,
            policy_version=issue.policy_version,
            lost_version=core.state.lost,
            record=core.settings.records(issue.prompt),
        )

    def receive_partials(self, request: wire.Partials, now: float) -> wire.PartialsReply:
        """Keep the unfinished completions of leases for the next leases of their slots. Raises UnknownMember."""
        core, identity = self._core, self._core.settings.identity
        member = core.membership.get(request.member_id, now)
        self._partials.retain(self._is_unserved)
        unstored: dict[str, list[str]] = {"missing": [], "full": []}
        for group in request.groups:
            key = self._key_of(group, member)
            if key is None:
                continue
            try:
                completions, limit = (
                    identity.completions(group.prompt),
                    identity.max_tokens(group.prompt.task),
                )
                check_partials(group, completions, limit, core.state.newest)
            except InvalidGroup as problem:
                log.warning(
                    "lease %s: dropped unfinished completions of %s: %s", group.lease_id, member.name, problem
                )
                self._partials.drop(key)
                continue
            if (outcome := self._partials.put(key, group)) != "stored":
                unstored[outcome].append(group.lease_id)
        return wire.PartialsReply(**unstored)

    def _is_unserved(self, key: PartialKey) -> bool:
        """Whether the slot is leased or will be issued (again)."""
        (task, split, slot), version = key
        state = self._core.state
        if split is Split.TRAIN:
            return slot in state.prompts and slot not in state.groups
        evaluation = state.evaluations.get((version, task))
        return evaluation is not None and slot not in evaluation.results

    @property
    def partial_bytes(self) -> int:
        """Bytes of unfinished completions kept for the next leases."""
        return self._partials.nbytes

    def _key_of(self, group: wire.PartialGroup, member: Member) -> PartialKey | None:
        """The key if the lease is ``member``'s, or expired and its slot is not issued again yet; else None."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        if lease is not None and (lease.prompt, lease.slot, lease.holder) == (
            group.prompt,
            group.slot,
            member.name,
        ):
            return partial_key(lease.prompt, lease.slot, lease.policy_version)
        if group.split is Split.TRAIN and state.expired_lease_of.get(group.slot) == group.lease_id:
            return partial_key(group.prompt, group.slot, -1)
        return None

    def release(self, request: wire.Release, now: float) -> None:
        """Close leases that the member will not serve. Unknown ones were reassigned and are ignored. Raises UnknownMember."""
        failed = request.cause is ReleaseCause.FAILED
        core = self._core
        member = core.membership.get(request.member_id, now)
        for lease_id in request.lease_ids:
            lease = core.state.leases.get(lease_id)
            if lease is None:
                continue
            core.close_lease(lease_id, r.CloseReason.RELEASED)
            if failed:  # its unfinished completions may be the cause
                self._partials.drop(partial_key(lease.prompt, lease.slot, lease.policy_version))
            reason = f"released by {member.name}: {request.reason}"
            if request.cause is ReleaseCause.TOO_LONG:
                self._attempts.give_up(lease, r.GiveUpReason.TOO_LONG, reason, now)
            else:
                self._attempts.retry_slot(lease, reason, now, failed=failed)

    def give_up_prompts(self, failed: dict[str, str], now: float) -> None:
        """Give up leases whose prompts cannot be generated; ``failed`` maps lease ids to reasons."""
        for lease_id, reason in failed.items():
            lease = self._core.state.leases.get(lease_id)
            if lease is not None:
                self._core.close_lease(lease_id, r.CloseReason.RELEASED)
                self._attempts.give_up(lease, r.GiveUpReason.FAILED, reason, now)
