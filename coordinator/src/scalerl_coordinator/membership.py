"""Members: registered generators, the weights they hold, and when one counts as lost.

Nothing here is journaled. After a restart of the coordinator, members register again within a heartbeat or two; until
then the holders of open leases are expected (:meth:`Membership.expect`) for as long as a silent member is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MISSED_HEARTBEATS = 4
_FIRST_BACKOFF_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 300.0


class UnknownMember(Exception):
    """No member has this id: it was lost, replaced or failed a publish, and must register again."""


@dataclass(slots=True)
class Member:
    """One incarnation of a generator."""

    member_id: str
    name: str
    control_url: str
    last_seen: float
    registered_at: float
    version: int = -1
    version_reported: bool = False
    """It has reported its version. Before that its version is unknown: it gets no weights and is not outdated."""
    version_set_at: float = float("-inf")
    healthy: bool = True
    busy_seconds: float = 0.0
    generated_tokens: int = 0
    teacher_problem: str = ""
    generated_leases: frozenset[str] = frozenset()
    """Leases that it holds, and no longer samples."""
    proven: bool = False
    """A group of this incarnation was accepted: a slot it fails at may itself be the cause."""


@dataclass(slots=True)
class _PublishBackoff:
    """Back-off of a member that failed a publish."""

    failures: int
    not_before: float


@dataclass(slots=True)
class Membership:
    """All members, by id; a name has at most one. Times are logical seconds."""

    heartbeat_seconds: float
    members: dict[str, Member] = field(default_factory=dict)
    _expected: dict[str, float] = field(default_factory=dict)
    _backoffs: dict[str, _PublishBackoff] = field(default_factory=dict)

    @property
    def timeout_seconds(self) -> float:
        """Seconds without a request after which a member is lost."""
        return MISSED_HEARTBEATS * self.heartbeat_seconds

    def get(self, member_id: str, now: float) -> Member:
        """The member; records the request's time.

        Raises:
            UnknownMember: it must register again.
        """
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is not known here (any more); register again")
        member.last_seen = now
        return member

    def named(self, name: str) -> Member | None:
        return next((m for m in self.members.values() if m.name == name), None)

    def register(self, member_id: str, name: str, control_url: str, now: float) -> Member:
        """Add a new incarnation; it replaces an earlier one of the same name."""
        before = self.named(name)
        if before is not None:
            del self.members[before.member_id]
        self._expected.pop(name, None)
        member = Member(member_id, name, control_url, now, now)
        self.members[member_id] = member
        return member

    def expect(self, names: set[str], now: float) -> None:
        """Members that held leases before the coordinator restarted: keep them for as long as a silent member."""
        for name in names - {m.name for m in self.members.values()}:
            self._expected[name] = now

    def remove(self, member_id: str) -> Member | None:
        return self.members.pop(member_id, None)

    def report_version(self, member: Member, version: int, now: float) -> bool:
        """Set the version that the member reports; returns whether it changed.

        A lower version right after a committed publish is a message sent before it, not a loss of weights.
        """
        if version < member.version and now - member.version_set_at < self.heartbeat_seconds:
            return False
        changed = version != member.version or not member.version_reported
        member.version, member.version_reported = version, True
        return changed

    def set_version(self, member: Member, version: int, now: float) -> None:
        """Set the version that a committed publish gave the member; ends its back-off."""
        member.version, member.version_reported, member.version_set_at = version, True, now
        self._backoffs.pop(member.name, None)

    def failed_publish(self, name: str, now: float) -> None:
        """Count a failed publish: the next attempt waits, longer each time."""
        failures = self._backoffs[name].failures + 1 if name in self._backoffs else 1
        delay = min(_FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 16), _MAX_BACKOFF_SECONDS)
        self._backoffs[name] = _PublishBackoff(failures, now + delay)

    def publishable(self, now: float) -> list[Member]:
        """Members that weights may be sent to now, by name."""
        return sorted(
            (
                m
                for m in self.members.values()
                if m.healthy
                and m.version_reported
                and (m.name not in self._backoffs or self._backoffs[m.name].not_before <= now)
            ),
            key=lambda m: m.name,
        )

    def lost(self, now: float) -> list[str]:
        """Remove the members that have timed out; returns their names."""
        limit = now - self.timeout_seconds
        names = []
        for member in [m for m in self.members.values() if m.last_seen < limit]:
            del self.members[member.member_id]
            names.append(member.name)
        for name in [n for n, since in self._expected.items() if since < limit]:
            del self._expected[name]
            names.append(name)
        return names

    def backoff_over(self, before: float, now: float) -> bool:
        """Whether a member's back-off after a failed publish ended in (before, now]."""
        return any(before < t.not_before <= now for t in self._backoffs.values())
