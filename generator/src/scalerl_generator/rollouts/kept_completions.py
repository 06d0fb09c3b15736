"""Completions that a lost server left unfinished, until their prompt is leased again."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl_api.wire import MASKED, Lease, PromptRef, Split
from scalerl_generator.rollouts.partial_completion import PartialCompletion

_Key = tuple[PromptRef, int, str, int, int, float, int | None]


class KeptCompletions:
    """Unfinished completions of leases that were released when the server was lost.

    The coordinator issues such slots again first. If this actor gets one of them, it continues the kept completions.

    Args:
        max_sequences: maximum number of kept completions; the oldest groups are dropped first.
        max_staleness_steps: of the recipe; the coordinator would reject a group with an older token.
    """

    def __init__(self, *, max_sequences: int, max_staleness_steps: int) -> None:
        self._max_sequences, self._max_staleness_steps = max_sequences, max_staleness_steps
        self._groups: dict[_Key, list[PartialCompletion]] = {}

    def put(self, lease: Lease, completions: list[PartialCompletion]) -> None:
        """Keep the completions of a lease that was not completed."""
        for completion in completions:
            completion.forget_reports()  # in the meantime another actor may report tokens for the slot
        self._groups.pop(_key(lease), None)
        self._groups[_key(lease)] = completions
        while sum(len(group) for group in self._groups.values()) > self._max_sequences:
            del self._groups[next(iter(self._groups))]

    def take(self, lease: Lease) -> list[PartialCompletion] | None:
        """The kept completions of the same slot, prompt and settings, if they can still be trained on; else None."""
        kept = self._groups.pop(_key(lease), None)
        return kept if kept is not None and are_usable(kept, lease, self._max_staleness_steps) else None


def are_usable(completions: Sequence[PartialCompletion], lease: Lease, max_staleness_steps: int) -> bool:
    """Whether the versions of completions of an earlier lease of the slot allow ``lease`` to continue them."""
    sampled = {span.version for c in completions for span in c.weight_versions} - {MASKED}
    if not sampled:
        return True
    if lease.split is Split.HELD_OUT:
        return min(sampled) > lease.lost_version
    return lease.policy_version <= min(sampled) + max_staleness_steps


def _key(lease: Lease) -> _Key:
    # Evaluations of different versions have the same slots.
    evaluated_version = lease.policy_version if lease.split is Split.HELD_OUT else None
    return (
        *(lease.prompt, lease.slot, lease.prompt_id),
        *(lease.completions, lease.max_tokens, lease.temperature),
        evaluated_version,
    )
