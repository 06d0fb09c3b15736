"""Keeps unfinished completions of leases, for the next lease of their slot.

They are only in memory: after a restart of the coordinator, actors report all their tokens again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scalerl_api.wire import MASKED, Lease, Partial, PartialGroup, PromptRef, Split, VersionSpan
from scalerl_coordinator.leases import SlotKey, slot_key

MAX_BYTES = 2**28
"""Bound on the tokens and log-probabilities of all slots (32 million tokens). Reports beyond it are not stored."""
MAX_ANSWER_BYTES = 2**26
"""Bound on the tokens and log-probabilities in one response with leases."""
_MAX_IDLE = 2
"""Completions are dropped after this many consecutive leases without a new token, because they may be the cause."""

PartialKey = tuple[SlotKey, int]
"""Slot, and the evaluated version (-1 in training)."""


def partial_key(prompt: PromptRef, slot: int, policy_version: int) -> PartialKey:
    return slot_key(prompt, slot), policy_version if prompt.split is Split.HELD_OUT else -1


def _extended(completion: Partial, report: Partial) -> Partial:
    """``completion`` with its tokens from ``report.start`` on replaced by those of ``report``."""
    offset = 4 * report.start
    versions = [span for span in completion.versions if span.start < report.start]
    for span in report.versions:
        if not versions or versions[-1].version != span.version:
            versions.append(VersionSpan(span.version, report.start + span.start))
    return Partial(
        start=0,
        token_ids=completion.token_ids[:offset] + report.token_ids,
        logprobs=completion.logprobs[:offset] + report.logprobs,
        versions=versions,
        finish_reason=report.finish_reason,
        turns=report.turns,
    )


@dataclass(slots=True)
class _Group:
    lease_id: str
    temperature: float
    prompt_token_ids: bytes
    completions: list[Partial]
    leased_bytes: int = -1
    """``nbytes`` when the slot was last leased."""
    idle: int = 0
    """Number of consecutive leases that added no token."""

    @property
    def nbytes(self) -> int:
        return sum(2 * len(completion.token_ids) for completion in self.completions)

    @property
    def versions(self) -> set[int]:
        return {span.version for completion in self.completions for span in completion.versions} - {MASKED}


class PartialStore:
    """Unfinished completions by slot."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[PartialKey, _Group] = {}
        self.nbytes = 0
        """Bytes of all tokens and log-probabilities."""

    def put(self, key: PartialKey, report: PartialGroup) -> Literal["stored", "missing", "full"]:
        """Add the tokens that a lease reports. The caller has checked the values.

        Returns:
            ``missing`` if earlier tokens, which the report continues, are not stored; ``full`` if the bound is reached, in
            which case the stored tokens stay; else ``stored``.
        """
        group = self._groups.get(key)
        if group is None or group.lease_id != report.lease_id:
            nothing = Partial(start=0, token_ids=b"", logprobs=b"", versions=[])
            group = _Group(report.lease_id, 0.0, b"", [nothing] * len(report.completions))
        if any(
            4 * p.start > len(c.token_ids) for p, c in zip(report.completions, group.completions, strict=True)
        ):
            return "missing"
        before = self._groups.get(key)
        size = sum(8 * p.start + 2 * len(p.token_ids) for p in report.completions)
        if self.nbytes - (before.nbytes if before else 0) + size > self._max_bytes:
            return "full"
        self.drop(key)
        group.temperature, group.prompt_token_ids = report.temperature, report.prompt_token_ids
        group.completions = [
            _extended(*pair) for pair in zip(group.completions, report.completions, strict=True)
        ]
        self._add(key, group)
        return "stored"

    def take(self, key: PartialKey, lease: Lease, versions: range, max_bytes: int) -> PartialGroup | None:
        """The completions that ``lease`` may continue: of weight ``versions`` and at most ``max_bytes``; else None.

        The store keeps them for the new lease. Completions with versions newer than ``versions``, or too large for this
        response, stay stored until this lease reports, since another lease may continue them. Completions that no lease may
        continue are dropped.
        """
        group = self._groups.get(key)
        if group is None:
            return None
        sampled = group.versions or {lease.policy_version}
        if max(sampled) >= versions.stop or group.nbytes > max_bytes:
            return None
        self.drop(key)
        group.idle = group.idle + 1 if group.nbytes == group.leased_bytes else 0
        if (
            group.idle == _MAX_IDLE
            or min(sampled) < versions.start
            or (group.temperature, len(group.completions)) != (lease.temperature, lease.completions)
        ):
            return None
        group.lease_id, group.leased_bytes = lease.lease_id, group.nbytes
        self._add(key, group)
        return PartialGroup(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            temperature=group.temperature,
            prompt_token_ids=group.prompt_token_ids,
            completions=group.completions,
        )

    def drop(self, key: PartialKey) -> None:
        group = self._groups.pop(key, None)
        if group is not None:
            self.nbytes -= group.nbytes

    def retain(self, is_wanted: Callable[[PartialKey], bool]) -> None:
        """Drop all groups whose key is not wanted."""
        for key in [key for key in self._groups if not is_wanted(key)]:
            self.drop(key)

    def _add(self, key: PartialKey, group: _Group) -> None:
        self._groups[key] = group
        self.nbytes += group.nbytes
