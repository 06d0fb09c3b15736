"""The shards of a step: which sequences each rank of the trainer gets, and with which content."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from scalerl_api import wire
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core, Refusal
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to assign to a rank."""

    group: int
    """Index of its group in the step."""
    sample: int
    """Index of its completion in the group."""
    tokens: int
    """Length of prompt plus completion."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What :func:`fill_shard` needs to build a rank's shard from the groups in the journal."""

    step: int
    groups: list[wire.GroupMeta]
    """All groups of the step, in slot order."""
    lease_ids: list[str]
    """The lease of each group, which is the key of its blob; "" for a slot that was given up."""
    items: list[Item]
    """The rank's sequences."""
    ambiguous: bool
    """As in :class:`~scalerl_api.wire.Shard`."""


def plan_shard(core: Core, request: wire.ShardRequest) -> ShardPlan:
    """Balance the sequences of a closed step over the ranks, by tokens; returns the plan of one rank. Raises Refusal."""
    state = core.state
    if not 0 <= request.rank < request.world_size:
        raise Refusal("bad-request", f"rank {request.rank} is outside 0..{request.world_size - 1}")
    if request.step < state.first_kept_step or not state.closed(request.step):
        raise Refusal(
            "not-ready",
            f"step {request.step} is not closed yet, or was deleted (the oldest kept step is {state.first_kept_step})",
        )
    groups = state.step_groups(request.step)
    items = [
        Item(at, sample, group.prompt_tokens + length)
        for at, group in enumerate(groups)
        if not group.filtered
        for sample, (length, trained) in enumerate(zip(group.lengths, group.trained_tokens, strict=True))
        if trained
    ]
    metas = [
        wire.GroupMeta(
            slot=slot,
            scores=g.scores,
            rewards=g.rewards,
            completion_tokens=g.lengths,
            filtered=g.filtered,
            ungraded=g.ungraded,
            masked_tokens=g.masked_tokens,
            unusable_tokens=g.unusable_tokens,
            returns=g.returns if state.known_identity.credit != "Episode" else [],
            recorded=core.settings.records(state.prompts[slot]),
        )
        for slot, g in zip(state.slots_of(request.step), groups, strict=True)
    ]
    shard = balance(items, request.world_size)[request.rank]
    lease_ids = [g.lease_id for g in groups]
    return ShardPlan(request.step, metas, lease_ids, shard, ambiguous=request.step <= state.lost)


def balance(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Assign sequences to ranks so that the ranks' token counts are nearly equal.

    Longest first, each sequence goes to the rank with the fewest tokens so far (Graham's LPT: the largest load is at most 4/3
    of the optimum). Ties are broken by index, so the result does not depend on the order of arrival. Each shard is sorted by
    group and sample.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    shards: list[list[Item]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for item in sorted(items, key=lambda i: (-i.tokens, i.group, i.sample)):
        load, rank = heapq.heappop(loads)
        shards[rank].append(item)
        heapq.heappush(loads, (load + item.tokens, rank))
    for shard in shards:
        shard.sort(key=lambda i: (i.group, i.sample))
    return shards


def fill_shard(plan: ShardPlan, groups: Mapping[str, r.StoredGroup]) -> wire.Shard:
    """The response to a shard request, with the sequences from ``groups``, the step's groups by lease id."""
    sequences = []
    for item in plan.items:
        group = groups[plan.lease_ids[item.group]]
        completion = group.completions[item.sample]
        sequences.append(
            wire.Sequence(
                group=item.group,
                sample=item.sample,
                prompt_token_ids=group.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                teacher_logprobs=completion.teacher_logprobs,
                versions=completion.versions,
                turns=completion.turns if plan.groups[item.group].returns else [],
                routed=completion.routed,
            )
        )
    return wire.Shard(step=plan.step, groups=plan.groups, sequences=sequences, ambiguous=plan.ambiguous)


class StepGroups:
    """Reads the groups of a step once for all ranks.

    Args:
        fail: called with an error after which the coordinator cannot continue; returns what its request gets.
    """

    def __init__(self, journal: Journal, fail: Callable[[BaseException], Exception]) -> None:
        self._journal = journal
        self._fail = fail
        self._by_step: dict[int, tuple[list[str], dict[str, r.StoredGroup]]] = {}
        self._lock = asyncio.Lock()

    def cached(self, step: int) -> dict[str, r.StoredGroup] | None:
        """The groups of a step by lease id, if they have been read and not been forgotten."""
        cached = self._by_step.get(step)
        return None if cached is None else cached[1]

    def clear(self) -> None:
        """Forget all groups: the state has changed."""
        self._by_step.clear()

    def forget(self, last: int) -> None:
        """Forget the groups of the steps up to ``last``, which have been trained."""
        for step in [step for step in self._by_step if step <= last]:
            del self._by_step[step]

    async def of_plan(self, plan: ShardPlan) -> dict[str, r.StoredGroup]:
        """The groups of a step by lease id, read once for all ranks and cached until the step's report: those of the step that is
        trained, and of the next."""
        async with self._lock:
            cached = self._by_step.get(plan.step)
            if cached is None or cached[0] != plan.lease_ids:
                self._by_step.pop(plan.step, None)
                if len(self._by_step) > 1:
                    del self._by_step[min(self._by_step)]
                try:
                    groups = await asyncio.to_thread(self.read, plan.lease_ids)
                except KeyError as problem:
                    raise Refusal(
                        "not-ready", f"step {plan.step} was deleted before it was read (group {problem})"
                    ) from None
                except (CorruptJournal, OSError) as problem:
                    raise self._fail(problem) from problem
                self._by_step[plan.step] = cached = (plan.lease_ids, groups)
            return cached[1]

    def read(self, lease_ids: list[str]) -> dict[str, r.StoredGroup]:
        """The groups of these leases; blocks. Raises KeyError, CorruptJournal, OSError."""
        wanted = [lease_id for lease_id in lease_ids if lease_id]
        blobs = self._journal.blobs.read(wanted)
        try:
            return {lease_id: r.decode_stored(blob) for lease_id, blob in zip(wanted, blobs, strict=True)}
        except msgspec.DecodeError as problem:
            raise CorruptJournal(
                str(self._journal.directory), 0, f"a group cannot be decoded: {problem}"
            ) from problem
