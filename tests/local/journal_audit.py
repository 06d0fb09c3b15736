"""Counts the outcome of every slot and lease from a run's journal, independently of the coordinator's counters."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from scalerl_api import wire
from scalerl_api.paths import RunPaths
from scalerl_coordinator import frames
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.transitions import apply

Place = tuple[str, int, int]
"""Split, version that is measured (training: -1), slot or held-out prompt."""


class JournalCopy:
    """Hard links to the journal's segments: the coordinator removes the ones that it does not need any more."""

    def __init__(self, run: Path, into: Path) -> None:
        self._journal, self._into = RunPaths(run).journal, into
        into.mkdir()

    def update(self) -> None:
        # On a cluster each attempt of the coordinator has a folder of its own, with a copy of the segment that it continues.
        folders = sorted(self._journal.glob("journal-*")) or [self._journal]
        for segment in folders[-1].glob("segment-*"):
            kept, new = self._into / segment.name, self._into.with_name("new")
            if not (kept.exists() and kept.samefile(segment)):
                os.link(segment, new)
                new.replace(kept)

    def frames(self) -> Iterator[frames.Frame]:
        segments = sorted(self._into.iterdir())
        numbers = [int(segment.name.rpartition("-")[2]) for segment in segments]
        assert numbers == list(range(1, len(numbers) + 1)), numbers
        for number, segment in zip(numbers, segments, strict=True):
            data = memoryview(segment.read_bytes())
            yield from frames.read_segment(data, segment.name, number, last=number == numbers[-1])


@dataclass
class Audit:
    """Rollouts are those of training slots.

    fates: rollouts of all closed slots: trained, filtered, skipped, given_up; refilled is a part of filtered.
    prompts: of every slot, each prompt that it had, in order.
    accepted: of every slot, the group of each of these prompts, in order.
    too_long, ungraded, masked_tokens: as in the summary's counts.
    clamped: accepted groups of a prompt that gets a token without a log-probability.
    skipped_steps: of the line of versions that the run ended with.
    issues: leases by place. expired: of these, how many went with their holder. returned: how many ended otherwise
        without a group.
    open: places that were still waited for at the end.
    """

    fates: Counter[str] = field(default_factory=Counter)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    accepted: dict[int, list[r.GroupAccepted]] = field(default_factory=lambda: defaultdict(list))
    too_long: int = 0
    ungraded: int = 0
    masked_tokens: int = 0
    clamped: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    issues: Counter[Place] = field(default_factory=Counter)
    expired: Counter[Place] = field(default_factory=Counter)
    returned: Counter[Place] = field(default_factory=Counter)
    open: list[Place] = field(default_factory=list)


def audit(
    journal: JournalCopy, completions: int, is_clamped: Callable[[Sequence[int]], bool] = lambda ids: False
) -> Audit:
    """Count; asserts that each lease ends once, each slot is filled once, and a slot that is issued again has its prompt.

    is_clamped: whether vLLM gave the first token of this prompt's first completion no log-probability.
    """
    found, state = Audit(), CoordinatorState()
    leases: dict[str, Place] = {}
    ended: set[str] = set()
    groups: dict[int, r.GroupAccepted | r.GivenUp] = {}
    steps: dict[int, str] = {}
    for frame in journal.frames():
        record = r.decode(frame.header)
        match record:
            case r.LeasesIssued():
                for slot, prompt in record.new_slots:
                    assert found.prompts.setdefault(slot, [prompt.index]) == [prompt.index]
                for issue in record.issues:
                    lease_id = state.lease_id(issue.number)
                    assert lease_id not in leases, f"{lease_id} was given out twice"
                    version = issue.policy_version if issue.prompt.split is wire.Split.HELD_OUT else -1
                    leases[lease_id] = (issue.prompt.split.value, version, issue.slot)
                    found.issues[leases[lease_id]] += 1
                    if issue.prompt.split is wire.Split.TRAIN:
                        prompts = found.prompts.setdefault(issue.slot, [issue.prompt.index])
                        assert prompts[-1] == issue.prompt.index, (
                            f"slot {issue.slot} was issued with another prompt"
                        )
            case r.LeaseClosed():
                assert record.lease_id not in ended
                ended.add(record.lease_id)
                lost = record.reason is r.CloseReason.EXPIRED
                (found.expired if lost else found.returned)[leases[record.lease_id]] += 1
            case r.GroupAccepted():
                assert record.slot not in groups, f"slot {record.slot} was filled twice"
                assert leases[record.lease_id] == ("train", -1, record.slot)
                ended.add(record.lease_id)
                found.accepted[record.slot].append(record)
                if record.next_prompt is not None:
                    found.prompts[record.slot].append(record.next_prompt.index)
                    found.fates.update({"filtered": len(record.lengths), "refilled": len(record.lengths)})
                else:
                    groups[record.slot] = record
                    group = msgspec.msgpack.decode(frame.blob, type=wire.Group)
                    assert group.prompt.index == found.prompts[record.slot][-1]
                    _tokens(found, record, group, is_clamped)
            case r.EvaluationAccepted():
                ended.add(record.lease_id)
            case r.GivenUp() if record.split is wire.Split.TRAIN:
                assert record.slot not in groups, f"slot {record.slot} was filled twice"
                groups[record.slot] = record
            case r.StepTrained():
                steps[record.step] = "trained"
            case r.StepSkipped():
                steps[record.step] = "skipped"
            case r.Restored():
                raise AssertionError("the journal was lost")
        apply(state, record)
    for slot, group in groups.items():
        if isinstance(group, r.GivenUp):
            found.fates["given_up"] += completions
            found.too_long += completions * (group.cause is r.GiveUpReason.TOO_LONG)
            continue
        graded = {score for at, score in enumerate(group.scores) if at not in group.ungraded}
        fate = steps[state.step_of(slot)] if len(graded) > 1 else "filtered"
        found.fates[fate] += len(group.lengths)
        found.ungraded += len(group.ungraded)
        found.masked_tokens += sum(group.masked_tokens)
    found.skipped_steps = sorted(step for step, how in steps.items() if how == "skipped")
    found.open = [leases[lease_id] for lease_id in state.leases] + [
        ("train", -1, slot) for slot in state.open_slots
    ]
    dropped = {i for i in leases.keys() - ended - state.leases.keys() if leases[i][0] == "train"}
    assert not dropped, f"no record says how these leases ended: {dropped}"
    return found


def _tokens(
    found: Audit, record: r.GroupAccepted, group: wire.Group, is_clamped: Callable[[Sequence[int]], bool]
) -> None:
    """The journaled tokens are those of the record, and a masked one is where it was put in."""
    assert [len(c.token_ids) // 4 for c in group.completions] == record.lengths
    clamped = is_clamped(np.frombuffer(group.prompt_token_ids, dtype=np.int32).tolist())
    found.clamped += clamped
    masked = [sum(span.version == wire.MASKED for span in c.versions) for c in group.completions]
    assert masked == [int(clamped), *[0] * (len(masked) - 1)]
    assert (record.masked_tokens or [0] * len(masked)) == masked
