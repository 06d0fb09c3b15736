"""Which training slots a generator gets: slot order, or the policy of ``spec.schedule``.

Which slots may be leased follows from the staleness bound alone; a policy chooses among those. A slot keeps its step, so the
rollouts of a step do not depend on their lengths.

In slot order, a slot gets its prompt when it is issued. A policy chooses by prompt: all slots of the window get theirs when the
window reaches them, in slot order, by a record of their own. From then on they wait in ``reissue``, as slots whose lease
ended do, and a restarted coordinator chooses again among those that are not leased.

A policy may leave a generator without a lease because another one that asks should get the place. That one may not take it: a
slot that failed with it goes to others. So after :data:`PATIENCE_SECONDS`, a generator gets what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import WORK, Core
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member
from scalerl_coordinator.off_policy import scheme
from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.prompt_sequence import View as PromptView
from scalerl_coordinator.scheduling import ByLength, Generator, Pace, Place, Policy, View, expected_load
from scalerl_coordinator.slots import is_on_policy, lease_limit

PATIENCE_SECONDS = 1.0
_MAX_PLACES = 1024
"""Places in one view, of about 10 µs each, while the event loop waits."""

NumberlessIssue = tuple[PromptRef, int, int]
"""Prompt, slot or position in the evaluation set, and version of an issue that has no number yet."""


@dataclass(slots=True)
class _Request:
    """An open lease request."""

    groups: int
    passed_over_at: float | None = None
    """When there were places and the policy had none for it, for the first time."""


@dataclass(frozen=True, slots=True)
class TrainingIssues:
    """Slots for a member, and the new slots that were passed over, with their prompts and the samplers' cursors after them."""

    issues: list[NumberlessIssue]
    held_back: list[tuple[int, PromptRef]]
    cursors: dict[int, int]


class TrainingLeases:
    """Chooses training slots."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._policy: Policy | None = ByLength() if core.settings.by_length else None
        self._requests: dict[str, _Request] = {}
        self._pace = Pace()
        self._ticked_at = 0.0

    # --- what the policy knows of the generators -------------------------------------------------

    def begin_request(self, member_id: str, groups: int) -> None:
        """A member waits for leases until :meth:`end_request`."""
        self._requests[member_id] = _Request(groups)

    def end_request(self, member_id: str) -> None:
        if self._requests.pop(member_id, None) and any(
            one.passed_over_at is not None for one in self._requests.values()
        ):
            self._core.wake.add(WORK)  # they may have the places that were reserved for it

    def observe_group(self, seconds: float, lengths: Sequence[int]) -> None:
        """A group took so many seconds."""
        self._pace.observe_group(seconds, lengths)

    def tick(self, now: float) -> None:
        """Note the pace of steps, and wake the members whose patience ended since the last tick."""
        self._pace.observe_step(self._core.state.version, now)
        before, self._ticked_at = self._ticked_at, now
        if any(
            one.passed_over_at is not None and before < one.passed_over_at + PATIENCE_SECONDS <= now
            for one in self._requests.values()
        ):
            self._core.wake.add(WORK)

    # --- the choice -----------------------------------------------------------------------------

    def choose(self, member: Member, wanted: int, now: float) -> TrainingIssues:
        """At most ``wanted`` slots for ``member``."""
        core, version = self._core, member.version
        state, identity = core.state, core.settings.identity
        limit = lease_limit(version, state.batch_sizes, scheme(identity), core.settings.max_steps)
        if self._policy is None:
            return self._in_slot_order(member, wanted, limit, now)
        if wanted < 1:
            return TrainingIssues([], [], {})
        self._select_prompts(member, limit)
        request = self._requests.setdefault(member.member_id, _Request(wanted))
        means = [history.overall_mean_tokens or 1.0 for history in state.histories]
        places = self._places(member, limit, means, now)
        if not places:
            request.passed_over_at = None
            return TrainingIssues([], [], {})
        patient = request.passed_over_at is None or now - request.passed_over_at < PATIENCE_SECONDS
        view = View(
            places=places,
            asking=self._generator(member, wanted, means, now),
            others=self._others(member, means, now) if patient else (),
            tokens_per_step=self._pace.tokens_per_step,
        )
        chosen = self._policy.choose(view)
        if chosen:
            self._requests.pop(member.member_id)
        elif request.passed_over_at is None:
            request.passed_over_at = now
        return TrainingIssues([(state.prompts[place.slot], place.slot, version) for place in chosen], [], {})

    def _places(self, member: Member, limit: int, means: Sequence[float], now: float) -> list[Place]:
        """The first places that may be leased to ``member`` now."""
        state = self._core.state
        places: list[Place] = []
        step, end = -1, -1
        for slot in state.reissue:
            if slot >= limit or len(places) == _MAX_PLACES:
                break
            if slot >= end:
                step = state.step_of(slot)
                end = state.slots_of(step).stop
            if self._may_issue(slot, member, now):
                places.append(Place(slot, step, self._expected(state.prompts[slot], means)))
        return places

    def _in_slot_order(self, member: Member, wanted: int, limit: int, now: float) -> TrainingIssues:
        state, version = self._core.state, member.version
        issues: list[NumberlessIssue] = []
        for slot in state.reissue:
            if len(issues) >= wanted or slot >= limit:
                break
            if self._may_issue(slot, member, now):
                issues.append((state.prompts[slot], slot, version))
        held_back: list[tuple[int, PromptRef]] = []
        new, cursors = _NewPrompts(self._core), {}
        for slot in range(state.next_slot, limit):
            if len(issues) >= wanted:
                break
            prompt = new.choose(slot)
            if self._too_old(slot, version):
                held_back.append((slot, prompt))
            else:
                issues.append((prompt, slot, version))
                cursors = dict(new.cursors)
        newest = max((slot for _, slot, _ in issues), default=-1)
        return TrainingIssues(issues, [(slot, p) for slot, p in held_back if slot < newest], cursors)

    def _select_prompts(self, member: Member, limit: int) -> None:
        """Give every new slot of the window its prompt."""
        new = _NewPrompts(self._core)
        selected = [(slot, new.choose(slot)) for slot in range(self._core.state.next_slot, limit)]
        if selected:
            self._core.commit(r.LeasesIssued(member.name, [], selected, cursors=new.cursors))

    def _may_issue(self, slot: int, member: Member, now: float) -> bool:
        """Whether a slot of ``reissue`` may be issued to ``member`` now; other members come first for one that failed with it."""
        core = self._core
        if self._too_old(slot, member.version):
            return False
        key = slot_key(core.state.prompts[slot], slot)
        return not core.book.waits(key, now) and not core.others_should_try(key, member)

    def _too_old(self, slot: int, version: int) -> bool:
        """Whether ``slot`` waits for newer weights than ``version``."""
        state, identity = self._core.state, self._core.settings.identity
        step = state.step_of(slot)
        if version >= step or step <= state.lost or identity.steps_per_batch:
            return False  # under PPO-off-policy the first step of every batch is on-policy by itself
        return is_on_policy(slot, state.batch_sizes, identity.max_staleness_steps)

    # --- expectations ---------------------------------------------------------------------------

    def _expected(self, prompt: PromptRef, means: Sequence[float]) -> float:
        """Tokens of a completion; of a prompt without history, the mean of its task (``means``)."""
        return self._core.state.histories[prompt.task].mean_tokens(prompt.index) or means[prompt.task]

    def _generator(self, member: Member, room: int, means: Sequence[float], now: float) -> Generator:
        core = self._core
        held = []
        for lease_id in core.book.of(member.name):
            lease = core.state.leases[lease_id]
            if lease.split is Split.TRAIN and lease_id not in member.generated_leases:
                so_far = self._pace.tokens(core.book.held_seconds(lease_id, now))
                held.append((self._expected(lease.prompt, means), so_far))
        return Generator(member.name, room, len(held), expected_load(held))

    def _others(self, member: Member, means: Sequence[float], now: float) -> list[Generator]:
        """Members with an open request that may be leased what ``member`` may."""
        members = self._core.membership.members
        return [
            self._generator(other, request.groups, means, now)
            for member_id, request in self._requests.items()
            if member_id != member.member_id
            and (other := members.get(member_id)) is not None
            and other.healthy
            and member.version <= other.version <= self._core.newest_possible
        ]


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
