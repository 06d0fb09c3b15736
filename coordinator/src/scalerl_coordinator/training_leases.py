"""Which training slots a generator gets: the policy of ``spec.schedule``.

Which slots may be leased follows from the staleness bound alone; a policy assigns those to the generators that ask. A slot keeps
its step, so the rollouts of a step do not depend on their lengths.

All slots of the window get their prompts when the window reaches them, in slot order, by a record of their own. From then on they
wait in ``open_slots``, as slots whose lease ended do, and a restarted coordinator assigns those that are not leased again.

A slot that failed with a generator is not assigned: it goes to the first that asks and may retry it.

An assignment may leave a generator without a lease because another one that asks should get the place, and that one may be lost
before it takes it. So after :data:`PATIENCE_SECONDS`, a generator gets what is there.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import WORK, Core
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member
from scalerl_coordinator.off_policy import scheme
from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.prompt_sequence import View as PromptView
from scalerl_coordinator.scheduling import (
    ByLength,
    Generator,
    LeastLoaded,
    Pace,
    Place,
    Policy,
    View,
    expected_load,
)
from scalerl_coordinator.slots import lease_limit, on_policy_slots

PATIENCE_SECONDS = 1.0
_MAX_PLACES = 1024
"""Places that are ordered by length, of about 10 µs each, while the event loop waits."""

_Expected = Callable[[PromptRef], float]
"""Tokens of a completion."""


@dataclass(slots=True)
class _Request:
    """An open lease request."""

    groups: int
    passed_over_at: float | None = None
    """When there were places and others got them, for the first time."""


@dataclass(slots=True)
class _Assignment:
    """Slots for all that ask. A publish answers many requests at once, so it is made once for all of them.

    It holds until the next tick, a new request, or a change of the state other than by issuing from it.
    """

    version: int
    """Of the member that it was made for; those with newer weights take part, and may take what they get."""
    changes: int
    """:attr:`.Core.changes` when it was made."""
    slots: dict[str, list[int]]
    """By member id."""


class TrainingLeases:
    """Chooses training slots."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._by_length = core.settings.by_length
        self._policy: Policy = ByLength() if self._by_length else LeastLoaded()
        self._requests: dict[str, _Request] = {}
        self._assignment: _Assignment | None = None
        self._pace = Pace()
        self._ticked_at = 0.0

    # --- what the policy knows of the generators -------------------------------------------------

    def begin_request(self, member_id: str, groups: int) -> None:
        """A member waits for leases until :meth:`end_request`."""
        self._requests[member_id] = _Request(groups)
        self._assignment = None

    def end_request(self, member_id: str) -> None:
        """A request has its answer, or nobody waits for it any more. Places that it leaves go to the others."""
        if self._requests.pop(member_id, None) is None:
            return
        if self._assignment is not None and self._assignment.slots.get(member_id):
            self._assignment = None
        if any(one.passed_over_at is not None for one in self._requests.values()):
            self._core.wake.add(WORK)

    def observe_group(self, seconds: float, lengths: Sequence[int]) -> None:
        """A group took so many seconds."""
        self._pace.observe_group(seconds, lengths)

    def tick(self, now: float) -> None:
        """Note the pace of steps, and wake the members whose patience ended since the last tick."""
        self._pace.observe_step(self._core.state.version, now)
        self._assignment = None
        before, self._ticked_at = self._ticked_at, now
        if any(
            one.passed_over_at is not None and before < one.passed_over_at + PATIENCE_SECONDS <= now
            for one in self._requests.values()
        ):
            self._core.wake.add(WORK)

    # --- the choice -----------------------------------------------------------------------------

    def choose(self, member: Member, wanted: int, now: float) -> list[int]:
        """At most ``wanted`` slots for ``member``, in the order in which they are to start. The caller issues them."""
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
        alone = request.passed_over_at is not None and now - request.passed_over_at >= PATIENCE_SECONDS
        assigned = self._assignment
        if (
            assigned is None
            or alone
            or assigned.version > member.version
            or (assigned.version < member.version and not assigned.slots.get(member.member_id))
            or assigned.changes != core.changes
        ):
            assigned = self._assignment = self._assign(member, limit, now, alone=alone)
        slots = assigned.slots.get(member.member_id, [])
        slots, assigned.slots[member.member_id] = slots[:wanted], slots[wanted:]
        others_have = any(assigned.slots.values())
        if failed or slots or not others_have:
            request.passed_over_at = None
        elif request.passed_over_at is None:
            request.passed_over_at = now
        if slots and not others_have:
            self._assignment = None  # it may have been of the first places, or for one generator
        return failed + slots

    def _assign(self, member: Member, limit: int, now: float, *, alone: bool) -> _Assignment:
        """Assign what may be leased to ``member`` to all that ask and may be leased the same; ``alone``: to it."""
        core, members = self._core, self._core.membership.members
        asking = [
            (other, request.groups)
            for member_id, request in self._requests.items()
            if (other := members.get(member_id)) is not None
            and (other is member or not alone)
            and other.healthy
            and member.version <= other.version <= core.newest_possible
        ]
        expected = self._expected_tokens() if self._by_length else None
        most = _MAX_PLACES if self._by_length else sum(room for _, room in asking)
        places = self._places(member, limit, most, expected, now)
        generators = [self._generator(one, room, expected, now) for one, room in asking if places]
        assigned = self._policy.assign(View(places, generators, self._pace.tokens_per_step))
        slots = {name: [place.slot for place in mine] for name, mine in assigned.items()}
        return _Assignment(member.version, core.changes, slots)

    def _places(
        self, member: Member, limit: int, most: int, expected: _Expected | None, now: float
    ) -> list[Place]:
        """The first ``most`` places that may be leased to ``member`` and to those with newer weights now."""
        state = self._core.state
        retries = {
            slot: one for (_, split, slot), one in self._core.book.retries.items() if split is Split.TRAIN
        }
        places: list[Place] = []
        step, end, waiting = -1, -1, range(0)
        for slot in state.open_slots:
            if slot >= limit or len(places) == most:
                break
            if slot >= end:
                step = state.step_of(slot)
                end = state.slots_of(step).stop
                waiting = self._waiting(step, member.version)
            retry = retries.get(slot)
            if slot in waiting or (retry is not None and (retry.failed_by or now < retry.not_before)):
                continue
            places.append(Place(slot, step, expected(state.prompts[slot]) if expected else 1.0))
        return places

    def _failed(self, member: Member, limit: int, most: int, now: float) -> list[int]:
        """The first ``most`` slots that failed with a generator and may be leased to ``member`` now."""
        core, state = self._core, self._core.state
        slots = sorted(
            slot
            for (_, split, slot), one in core.book.retries.items()
            if one.failed_by and split is Split.TRAIN and slot < limit and _has(state.open_slots, slot)
        )
        ready = (
            slot
            for slot in slots
            if slot not in self._waiting(state.step_of(slot), member.version)
            and core.may_issue(slot_key(state.prompts[slot], slot), member, now)
        )
        return list(itertools.islice(ready, most))

    def _waiting(self, step: int, version: int) -> range:
        """The slots of ``step`` that wait for newer weights than ``version``."""
        state, identity = self._core.state, self._core.settings.identity
        if version >= step or step <= state.lost or identity.steps_per_batch:
            return range(0)  # under PPO-off-policy the first step of every batch is on-policy by itself
        return on_policy_slots(step, state.batch_sizes, identity.max_staleness_steps)

    def _select_prompts(self, member: Member, limit: int) -> None:
        """Give every new slot of the window its prompt."""
        new = _NewPrompts(self._core)
        selected = [(slot, new.choose(slot)) for slot in range(self._core.state.next_slot, limit)]
        if selected:
            self._core.commit(r.LeasesIssued(member.name, [], selected, cursors=new.cursors))
            self._assignment = None

    # --- expectations ---------------------------------------------------------------------------

    def _expected_tokens(self) -> _Expected:
        """Of a prompt without history, the mean of its task."""
        histories = self._core.state.histories
        means = [history.overall_mean_tokens or 1.0 for history in histories]
        return lambda prompt: histories[prompt.task].mean_tokens(prompt.index) or means[prompt.task]

    def _generator(self, member: Member, room: int, expected: _Expected | None, now: float) -> Generator:
        """Evaluations count as groups; their lengths are not known. Groups that are sampled are no load any more."""
        core, tokens = self._core, 0.0
        leases = core.book.of(member.name) - member.generated_leases
        if expected is not None:
            training = [(i, one.prompt) for i in leases if (one := core.state.leases[i]).split is Split.TRAIN]
            tokens = expected_load(
                (expected(prompt), self._pace.tokens(core.book.held_seconds(lease_id, now)))
                for lease_id, prompt in training
            )
        return Generator(member.member_id, room, len(leases), tokens)


def _has(ordered: Sequence[int], value: int) -> bool:
    at = bisect.bisect_left(ordered, value)
    return at < len(ordered) and ordered[at] == value


class _NewPrompts:
    """Chooses the prompts of new slots, which are asked for in slot order."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.cursors = dict(enumerate(core.state.cursors))
        self._step = -1
        self._known: dict[int, KnownHistory] = {}

    def choose(self, slot: int) -> PromptRef:
        core = self._core
        state, k = core.state, core.settings.identity.max_staleness_steps
        if (step := state.step_of(slot)) != self._step:
            self._known, self._step = {}, step
        task = core.samplers.task(slot)
        if task not in self._known:
            self._known[task] = state.histories[task].as_of(step - k)
        view = PromptView(self.cursors[task], self._known[task])
        index, self.cursors[task] = core.samplers[task].choose(view)
        return PromptRef(task, Split.TRAIN, index)
