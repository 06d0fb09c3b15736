"""Members: registered generators, their weight versions, and when a member counts as lost.

Nothing here is journaled. After a restart of the coordinator, members register again within one or two heartbeats. Until
then the holders of open leases are expected (:meth:`Membership.expect`), with the timeout of a silent member.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

MISSED_HEARTBEATS = 4
"""A member is lost after this many missed heartbeats."""
_FIRST_BACKOFF_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 300.0


def new_member_id(name: str) -> str:
    """An id for one incarnation of a member.

    >>> name_of(new_member_id("generator-0"))
    'generator-0'
    """
    return f"{name}/{secrets.token_hex(4)}"


def name_of(member_id: str) -> str:
    """The name of a member, also of one that was registered before a restart of the coordinator."""
    return member_id.rpartition("/")[0]


class UnknownMember(Exception):
    """The member id is unknown. The member was lost, replaced or failed a publish, and must register again."""


@dataclass(slots=True)
class Member:
    """One incarnation of a generator."""

    member_id: str
    name: str
    control_url: str
    last_seen: float
    version: int = -1
    """Weight version; -1 without published weights."""
    version_reported: bool = False
    """Whether it has reported its version. Until then its version is unknown: it gets no weights and is not outdated."""
    version_set_at: float = float("-inf")
    """When a committed publish last set the version."""
    healthy: bool = True
    """Whether its vLLM server answers."""
    busy_seconds: float = 0.0
    """As last reported, since its registration."""
    generated_tokens: int = 0
    """As last reported, since its registration."""
    teacher_problem: str = ""
    reward_problem: str = ""
    environment_problem: str = ""
    """Why its groups wait for the teacher; empty if they do not."""
    generated_leases: frozenset[str] = frozenset()
    """Leases that it holds and whose completions are sampled."""
    proven: bool = False
    """Whether a group of this incarnation was accepted. If a proven member fails a slot, the slot may be the cause."""


@dataclass(slots=True)
class _PublishBackoff:
    """Back-off of a member that failed a publish."""

    failures: int
    not_before: float


@dataclass(slots=True)
class Membership:
    """All members. Times are logical seconds."""

    heartbeat_seconds: float
    members: dict[str, Member] = field(default_factory=dict)
    """Members by id. A name has at most one."""
    _expected: dict[str, float] = field(default_factory=dict)
    """Names of members that held leases before a restart, with the time of the restart."""
    _backoffs: dict[str, _PublishBackoff] = field(default_factory=dict)
    """Back-offs after failed publishes, by name."""

    @property
    def timeout_seconds(self) -> float:
        """Seconds without a request after which a member is lost."""
        return MISSED_HEARTBEATS * self.heartbeat_seconds

    def get(self, member_id: str, now: float) -> Member:
        """The member with this id. Records ``now`` as the time of its last request.

        Raises:
            UnknownMember: no member has this id.
        """
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is unknown; register again")
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
        member = Member(member_id, name, control_url, now)
        self.members[member_id] = member
        return member

    def expect(self, names: set[str], now: float) -> None:
        """Expect members that held leases before the coordinator restarted; they are lost after the timeout."""
        for name in names - {m.name for m in self.members.values()}:
            self._expected[name] = now

    def remove(self, member_id: str) -> Member | None:
        return self.members.pop(member_id, None)

    def report_version(self, member: Member, version: int, now: float) -> bool:
        """Set the version that the member reports; returns whether it changed.

        A lower version shortly after a committed publish is ignored: the member sent it before the publish.
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
        """Members to which weights may be sent now, by name."""
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
