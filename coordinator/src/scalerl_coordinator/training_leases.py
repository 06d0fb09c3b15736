"""Assigns training slots to generators, by the policy of ``spec.schedule``.

The staleness bound alone determines which slots may be leased; a policy distributes them over the generators with an open
lease request. A slot keeps its step, so which rollouts a step has does not depend on their lengths.

Slots get their prompts when the window reaches them, in slot order, by a separate record. From then on they wait in
``open_slots``, like slots whose lease ended; a restarted coordinator assigns all slots found there.

A slot that failed with a generator is not assigned by the policy: the first generator that asks and may retry it gets it.

An assignment may pass over a generator in favor of another that has asked. In case that one is lost before it takes its
slots, a generator gets any open slots after waiting for :data:`PATIENCE_SECONDS`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerl_api.registry import Kind, make
from scalerl_api.schedule import ScheduleSpec
from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import WORK, Core
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member
from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.sampler_interface import SamplerInput
from scalerl_coordinator.scheduling import (
    ByLength,
    Generator,
    LeastLoaded,
    OpenSlot,
    Pace,
    SchedulerInput,
    SchedulingPolicy,
    expected_load,
)
from scalerl_coordinator.slot_attempts import SlotAttempts
from scalerl_coordinator.slots import lease_limit, on_policy_slots, scheme

PATIENCE_SECONDS = 1.0
_MAX_OPEN_SLOTS = 1024
"""Bound on the slots ordered by length in one assignment: each takes about 10 µs of the event loop."""

_Expected = Callable[[PromptRef], float]
"""Expected tokens of a completion of a prompt."""


@dataclass(slots=True)
class _Request:
    """An open lease request."""

    groups: int
    """Groups that it asks for."""
    passed_over_at: float | None = None
    """When the member first got no place although there were some; None if it did not."""


@dataclass(slots=True)
class _Assignment:
    """Slots for all members with an open request, computed once for all of them: a publish wakes many requests at once.

    It is valid until the next tick, a new request, or a change of the state other than by issuing these slots.
    """

    version: int
    """Weight version of the member for which it was computed. Members with newer weights take part as well."""
    changes: int
    """:attr:`.Core.changes` when it was computed."""
    slots: dict[str, list[int]]
    """Slots by member id."""


class TrainingLeases:
    """Chooses the training slots of each lease request."""

    def __init__(self, core: Core, attempts: SlotAttempts) -> None:
        self._core, self._attempts = core, attempts
        self._policy: SchedulingPolicy = policy_of(core.settings.schedule)
        self._uses_lengths = not isinstance(self._policy, LeastLoaded)
        self._requests: dict[str, _Request] = {}
        self._assignment: _Assignment | None = None
        self.pace = Pace()
        """Of groups, which :class:`~.pushed_groups.PushedGroups` measures, and of steps."""
        self._ticked_at = 0.0

    # --- inputs of the policy --------------------------------------------------------------------

    def begin_request(self, member_id: str, groups: int) -> None:
        """Record that a member waits for ``groups`` leases, until :meth:`end_request`."""
        self._requests[member_id] = _Request(groups)
        self._assignment = None

    def end_request(self, member_id: str) -> None:
        """Record that a request was answered or its client disconnected. Its remaining slots go to the other members."""
        if self._requests.pop(member_id, None) is None:
            return
        if self._assignment is not None and self._assignment.slots.get(member_id):
            self._assignment = None
        if any(request.passed_over_at is not None for request in self._requests.values()):
            self._core.wake.add(WORK)

    def tick(self, now: float) -> None:
        """Measure the pace of steps, and wake the members that have waited for ``PATIENCE_SECONDS`` since the last tick."""
        self.pace.observe_step(self._core.state.version, now)
        self._assignment = None
        before, self._ticked_at = self._ticked_at, now
        if any(
            request.passed_over_at is not None and before < request.passed_over_at + PATIENCE_SECONDS <= now
            for request in self._requests.values()
        ):
            self._core.wake.add(WORK)

    # --- the choice -----------------------------------------------------------------------------

    def choose(self, member: Member, wanted: int, now: float) -> list[int]:
        """At most ``wanted`` slots for ``member``, in the order in which to start them. The caller issues them."""
        core = self._core
        off_policy = scheme(core.settings.identity)
        limit = lease_limit(member.version, core.state.batch_sizes, off_policy, core.settings.max_steps)
        self._select_prompts(member, limit)
        if wanted < 1:
            return []
        request = self._requests.setdefault(member.member_id, _Request(wanted))
        request.groups = wanted
        failed = self._failed(member, limit, wanted, now)
        wanted -= len(failed)
        exclusive = request.passed_over_at is not None and now - request.passed_over_at >= PATIENCE_SECONDS
        assignment = self._assignment
        if (
            assignment is None
            or exclusive
            or assignment.version > member.version
            or (assignment.version < member.version and not assignment.slots.get(member.member_id))
            or assignment.changes != core.changes
        ):
            assignment = self._assignment = self._assign(member, limit, now, exclusive=exclusive)
        slots = assignment.slots.get(member.member_id, [])
        slots, assignment.slots[member.member_id] = slots[:wanted], slots[wanted:]
        others_have_slots = any(assignment.slots.values())
        if failed or slots or not others_have_slots:
            request.passed_over_at = None
        elif request.passed_over_at is None:
            request.passed_over_at = now
        if slots and not others_have_slots:
            self._assignment = None  # it may have covered only some of the slots, or only this generator
        return failed + slots

    def _assign(self, member: Member, limit: int, now: float, *, exclusive: bool) -> _Assignment:
        """Assign the slots that may be leased to ``member``.

        All members with an open request and weights at least as new take part; with ``exclusive``, only ``member``.
        """
        core, members = self._core, self._core.membership.members
        requesting = [
            (other, request.groups)
            for member_id, request in self._requests.items()
            if (other := members.get(member_id)) is not None
            and (other is member or not exclusive)
            and other.healthy
            and member.version <= other.version <= core.newest_possible
        ]
        expected = self._expected_tokens() if self._uses_lengths else None
        max_open_slots = _MAX_OPEN_SLOTS if self._uses_lengths else sum(groups for _, groups in requesting)
        open_slots = self._open_slots(member, limit, max_open_slots, expected, now)
        generators = [
            self._generator(other, groups, expected, now) for other, groups in requesting if open_slots
        ]
        assigned = self._policy.assign(SchedulerInput(open_slots, generators, self.pace.tokens_per_step))
        slots = {member_id: [open_slot.slot for open_slot in given] for member_id, given in assigned.items()}
        return _Assignment(member.version, core.changes, slots)

    def _open_slots(
        self, member: Member, limit: int, max_open_slots: int, expected: _Expected | None, now: float
    ) -> list[OpenSlot]:
        """The first slots, at most ``max_open_slots``, that may be leased now to ``member`` and members with newer weights."""
        state = self._core.state
        retries = {
            slot: retry for (_, split, slot), retry in self._core.book.retries.items() if split is Split.TRAIN
        }
        open_slots: list[OpenSlot] = []
        step, end, waiting = -1, -1, range(0)
        for slot in state.open_slots:
            if slot >= limit or len(open_slots) == max_open_slots:
                break
            if slot >= end:
                step = state.step_of(slot)
                end = state.slots_of(step).stop
                waiting = self._waiting(step, member.version)
            retry = retries.get(slot)
            if slot in waiting or (retry is not None and (retry.failed_by or now < retry.not_before)):
                continue
            open_slots.append(OpenSlot(slot, step, expected(state.prompts[slot]) if expected else 1.0))
        return open_slots

    def _failed(self, member: Member, limit: int, max_slots: int, now: float) -> list[int]:
        """The first slots, at most ``max_slots``, that failed with a generator and may be leased to ``member`` now."""
        core, state = self._core, self._core.state
        slots = sorted(
            slot
            for (_, split, slot), retry in core.book.retries.items()
            if retry.failed_by and split is Split.TRAIN and slot < limit and _has(state.open_slots, slot)
        )
        ready = (
            slot
            for slot in slots
            if slot not in self._waiting(state.step_of(slot), member.version)
            and self._attempts.may_issue(slot_key(state.prompts[slot], slot), member, now)
        )
        return list(itertools.islice(ready, max_slots))

    def _waiting(self, step: int, version: int) -> range:
        """The slots of ``step`` that wait for newer weights than ``version``."""
        state, identity = self._core.state, self._core.settings.identity
        if version >= step or step <= state.lost or identity.steps_per_batch:
            return range(0)  # under PPO-off-policy the first step of every batch is on-policy in any case
        return on_policy_slots(step, state.batch_sizes, identity.max_staleness_steps)

    def _select_prompts(self, member: Member, limit: int) -> None:
        """Give every new slot of the window its prompt."""
        core, state = self._core, self._core.state
        selected: list[tuple[int, PromptRef]] = []
        cursors = dict(enumerate(state.cursors))
        known: dict[tuple[int, int], KnownHistory] = {}  # by step and task
        for slot in range(state.next_slot, limit):
            step, task = state.step_of(slot), core.samplers.task(slot)
            if (step, task) not in known:
                until = step - core.settings.identity.max_staleness_steps
                known[step, task] = state.histories[task].as_of(until)
            inputs = SamplerInput(cursors[task], known[step, task])
            index, cursors[task] = core.samplers[task].choose(inputs)
            selected.append((slot, PromptRef(task, Split.TRAIN, index)))
        if selected:
            core.commit(r.LeasesIssued(member.name, [], selected, cursors=cursors))
            self._assignment = None

    # --- expectations ---------------------------------------------------------------------------

    def _expected_tokens(self) -> _Expected:
        """Expected tokens by prompt: the mean of its history, or that of its task if it has none."""
        histories = self._core.state.histories
        means = [history.overall_mean_tokens or 1.0 for history in histories]
        return lambda prompt: histories[prompt.task].mean_tokens(prompt.index) or means[prompt.task]

    def _generator(self, member: Member, groups: int, expected: _Expected | None, now: float) -> Generator:
        """The policy's view of a member that requests ``groups``.

        Its load are the leases that it still samples. Evaluations count as groups only, since their lengths are unknown.
        """
        core, tokens = self._core, 0.0
        leases = core.book.of(member.name) - member.generated_leases
        if expected is not None:
            training = [
                (lease_id, lease.prompt)
                for lease_id in leases
                if (lease := core.state.leases[lease_id]).split is Split.TRAIN
            ]
            tokens = expected_load(
                (expected(prompt), self.pace.tokens(core.book.open_seconds(lease_id, now)))
                for lease_id, prompt in training
            )
        return Generator(member.member_id, groups, len(leases), tokens)


def policy_of(spec: ScheduleSpec) -> SchedulingPolicy:
    """The policy of ``spec.schedule``. Raises ``PluginError``."""
    if spec.plugin is not None:
        made: SchedulingPolicy = make(Kind.SCHEDULE, spec.plugin.name, spec.plugin.parameters)
        return made
    return ByLength() if spec.by_length is not None else LeastLoaded()


def _has(ascending: Sequence[int], value: int) -> bool:
    i = bisect.bisect_left(ascending, value)
    return i < len(ascending) and ascending[i] == value
