"""Who is there: generators that registered, what weights they hold, and when one counts as lost.

Nothing here is journaled. After a restart of the coordinator members register again within a heartbeat or two;
until they did, the holders of open leases are expected (:meth:`Membership.expect`) as long as a silent member would
be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MISSED_HEARTBEATS = 4
_FIRST_BACKOFF_SECONDS = 5.0
_LONGEST_BACKOFF_SECONDS = 300.0


class UnknownMember(Exception):
    """No member of this id: it was lost, replaced or failed a publish; it has to register again."""


@dataclass(slots=True)
class Member:
    """One incarnation of a generator."""

    member_id: str
    name: str
    control_url: str
    last_seen: float
    registered_at: float
    version: int = -1
    heard: bool = False
    """It has said what it holds. Before that it may hold anything: nobody sends it weights, or takes it for behind."""
    version_set_at: float = float("-inf")
    healthy: bool = True
    busy_seconds: float = 0.0
    generated_tokens: int = 0
    proven: bool = False
    """A group of this incarnation was accepted: what it fails at may be at fault itself."""


@dataclass(slots=True)
class _Trouble:
    """A name that did not take weights lately."""

    failures: int
    not_before: float


@dataclass(slots=True)
class Membership:
    """All members, by id; a name has at most one. Times are logical seconds."""

    heartbeat_seconds: float
    members: dict[str, Member] = field(default_factory=dict)
    _expected: dict[str, float] = field(default_factory=dict)
    _trouble: dict[str, _Trouble] = field(default_factory=dict)

    @property
    def patience_seconds(self) -> float:
        """Silence after which a member is lost."""
        return MISSED_HEARTBEATS * self.heartbeat_seconds

    def get(self, member_id: str, now: float) -> Member:
        """The member, seen now.

        Raises:
            UnknownMember: register again.
        """
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is not known here (any more); register again")
        member.last_seen = now
        return member

    def named(self, name: str) -> Member | None:
        return next((m for m in self.members.values() if m.name == name), None)

    def register(self, member_id: str, name: str, control_url: str, now: float) -> Member:
        """A new incarnation; one of the same name before it is gone."""
        before = self.named(name)
        if before is not None:
            del self.members[before.member_id]
        self._expected.pop(name, None)
        member = Member(member_id, name, control_url, now, now)
        self.members[member_id] = member
        return member

    def expect(self, names: set[str], now: float) -> None:
        """These held leases before the coordinator restarted; give them the time a silent member has."""
        for name in names - {m.name for m in self.members.values()}:
            self._expected[name] = now

    def remove(self, member_id: str) -> Member | None:
        return self.members.pop(member_id, None)

    def report_version(self, member: Member, version: int, now: float) -> bool:
        """What the member says it holds; whether that is news.

        A lower version right after a publish was committed is a message that was under way, not a loss.
        """
        if version < member.version and now - member.version_set_at < self.heartbeat_seconds:
            return False
        changed = version != member.version or not member.heard
        member.version, member.heard = version, True
        return changed

    def set_version(self, member: Member, version: int, now: float) -> None:
        """A committed publish says so; the name is in good standing again."""
        member.version, member.heard, member.version_set_at = version, True, now
        self._trouble.pop(member.name, None)

    def failed_publish(self, name: str, now: float) -> None:
        """It did not take weights: the next try waits, longer each time."""
        failures = self._trouble[name].failures + 1 if name in self._trouble else 1
        delay = min(_FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 16), _LONGEST_BACKOFF_SECONDS)
        self._trouble[name] = _Trouble(failures, now + delay)

    def publishable(self, now: float) -> list[Member]:
        """Members that weights may be sent to now, by name."""
        return sorted(
            (
                m
                for m in self.members.values()
                if m.healthy
                and m.heard
                and (m.name not in self._trouble or self._trouble[m.name].not_before <= now)
            ),
            key=lambda m: m.name,
        )

    def lost(self, now: float) -> list[str]:
        """Names that were silent for too long; they are members (or expected) no more."""
        limit = now - self.patience_seconds
        names = []
        for member in [m for m in self.members.values() if m.last_seen < limit]:
            del self.members[member.member_id]
            names.append(member.name)
        for name in [n for n, since in self._expected.items() if since < limit]:
            del self._expected[name]
            names.append(name)
        return names

    def backoff_over(self, before: float, now: float) -> bool:
        """Whether somebody's wait after a failed publish ended in (before, now]."""
        return any(before < t.not_before <= now for t in self._trouble.values())
