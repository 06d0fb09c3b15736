"""Deadlines and troubles of open leases: the part that a restart may forget.

What is leased to whom is in the :class:`~.state.State`. Here is only until when, in the time of this process; after
a restart every open lease starts its time again. So a jump of any clock, or a coordinator that was down, expires
nobody, and at worst a lost lease is noticed later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from scalerl_api.wire import Split

_LONGEST_DELAY_SECONDS = 60.0
NOTABLE_ATTEMPTS = 5
"""A slot that came back spoiled so often is worth a word in the status."""
HOPELESS_ATTEMPTS = 10
"""A final evaluation does not wait for a prompt that came back so often."""
MOST_FAILURES = 5
"""A place that failed so often with members that have served others, or with all there are, is given up."""

Place = tuple[Split, int]
"""A training slot, or a position in the held-out set."""


@dataclass(slots=True)
class _Open:
    holder: str
    deadline: float
    told_at: float | None
    """When the answer that carries it went out; None while that is still to come."""
    prompt_id: str | None = None
    progress: int = 0


@dataclass(slots=True)
class Spoiled:
    """A place whose groups were refused, or whose leases were given back."""

    attempts: int
    not_before: float
    reason: str
    failures: int = 0
    """Of the attempts: by members that were well."""
    failed_by: frozenset[str] = frozenset()
    """Their names."""
    proven_failures: int = 0
    """Of the failures: by members that served another group since they registered. It is not they that are broken."""
    proven: frozenset[str] = frozenset()
    """Their names."""


@dataclass(slots=True)
class LeaseBook:
    """Open leases by id, in the order in which they expire. Times are logical seconds, and never go back."""

    lease_seconds: float
    spoiled: dict[Place, Spoiled] = field(default_factory=dict)
    """Places in trouble."""
    _open: dict[str, _Open] = field(default_factory=dict)
    _by_holder: dict[str, set[str]] = field(default_factory=dict)

    def add(self, lease_id: str, holder: str, now: float, *, told: bool = True) -> None:
        """``told``: its holder knows of it; else :meth:`tell` says when it does."""
        self._open[lease_id] = _Open(holder, now + self.lease_seconds, now if told else None)
        self._by_holder.setdefault(holder, set()).add(lease_id)

    def tell(self, lease_ids: Iterable[str], now: float) -> None:
        """The answer with these leases goes out now: from here on their holder can be asked about them."""
        for lease_id in lease_ids:
            lease = self._open.get(lease_id)
            if lease is not None:
                lease.told_at = now

    def extend(self, lease_id: str, holder: str, progress: int, now: float) -> None:
        """``holder`` has come to ``progress`` with the lease; it has its whole time again if that is news."""
        lease = self._open.get(lease_id)
        if lease is not None and lease.holder == holder and progress > lease.progress:
            del self._open[lease_id]
            lease.progress, lease.deadline = progress, now + self.lease_seconds
            self._open[lease_id] = lease

    def remaining_seconds(self, lease_id: str, now: float) -> float | None:
        """Until the deadline; None for a lease that is not open any more."""
        lease = self._open.get(lease_id)
        return None if lease is None else max(0.0, lease.deadline - now)

    def remove(self, lease_id: str) -> None:
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            mine = self._by_holder[lease.holder]
            mine.discard(lease_id)
            if not mine:
                del self._by_holder[lease.holder]

    def of(self, holder: str) -> set[str]:
        """Open leases of a member's name."""
        return set(self._by_holder.get(holder, ()))

    def abandoned(self, holder: str, held: Collection[str], older_than: float) -> list[str]:
        """Leases ``holder`` was told of before ``older_than`` and does not say it works on."""
        return sorted(
            i
            for i in self.of(holder) - set(held)
            if (told_at := self._open[i].told_at) is not None and told_at < older_than
        )

    def expired(self, now: float) -> list[str]:
        """Leases past their deadline, earliest first. The caller closes them and calls :meth:`remove`."""
        over = []
        for lease_id, lease in self._open.items():
            if lease.deadline > now:
                break
            over.append(lease_id)
        return over

    def set_prompt_id(self, lease_id: str, prompt_id: str) -> None:
        """What the lease's group has to say its prompt is, once that is known."""
        if lease_id in self._open:
            self._open[lease_id].prompt_id = prompt_id

    def prompt_id(self, lease_id: str) -> str | None:
        lease = self._open.get(lease_id)
        return None if lease is None else lease.prompt_id

    def spoil(
        self,
        place: Place,
        reason: str,
        now: float,
        *,
        failed_by: str | None = None,
        proven: bool = False,
    ) -> Spoiled:
        """``place`` came back for ``reason``. It is issued again at once; from the second time on it waits.

        ``failed_by``: its holder's name, if that was well and could not serve it. ``proven``: it has served others.
        """
        before = self.spoiled.get(place, Spoiled(0, 0.0, ""))
        attempts = before.attempts + 1
        delay = 0.0 if attempts == 1 else min(2.0 ** min(attempts - 2, 16), _LONGEST_DELAY_SECONDS)
        names = frozenset[str]() if failed_by is None else frozenset({failed_by})
        self.spoiled[place] = Spoiled(
            attempts,
            now + delay,
            reason,
            before.failures + len(names),
            before.failed_by | names,
            before.proven_failures + len(names) * proven,
            before.proven | (names if proven else frozenset()),
        )
        return self.spoiled[place]

    def attempts(self, place: Place) -> int:
        """How often ``place`` came back since it was last served."""
        spoiled = self.spoiled.get(place)
        return 0 if spoiled is None else spoiled.attempts

    def waits(self, place: Place, now: float) -> bool:
        """Whether ``place`` may not be issued yet."""
        spoiled = self.spoiled.get(place)
        return spoiled is not None and now < spoiled.not_before

    def wait_over(self, before: float, now: float) -> bool:
        """Whether some place's wait ended in (before, now]."""
        return any(before < s.not_before <= now for s in self.spoiled.values())

    def resync(self, open_leases: dict[str, str], now: float) -> None:
        """Make the book agree with the state's open leases (id → holder); known ones keep their deadlines."""
        for lease_id in [i for i in self._open if i not in open_leases]:
            self.remove(lease_id)
        for lease_id, holder in open_leases.items():
            if lease_id not in self._open:
                self.add(lease_id, holder, now)
