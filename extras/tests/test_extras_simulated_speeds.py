"""How fast the generators of a trace are: against a server that is computed token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from scalerl_api import trace
from scalerl_extras.simulation import speeds
from scalerl_extras.simulation.speeds import fit_decode
from scalerl_extras.simulation.trace_file import RunTrace, read_trace
from scalerl_extras.simulation.workload import DecodeSpeed


def token_by_token(
    leases: list[tuple[float, list[int]]], base: float, per_sequence: float, pauses: list[tuple[float, float]]
) -> list[float]:
    """Ends of groups that a server of 8 sequences gets at these times: of each decoding step, all that run get a token."""
    waiting = [(at, group, n) for group, (at, lengths) in enumerate(leases) for n in lengths]
    running: list[list[int]] = []
    ends, now = [0.0] * len(leases), 0.0
    while waiting or running:
        while waiting and waiting[0][0] <= now and len(running) < 8:
            _, group, tokens = waiting.pop(0)
            running.append([group, tokens])
        if not running:
            now = waiting[0][0]
            continue
        now += base + per_sequence * len(running)
        now = next((end for begin, end in pauses if begin <= now < end), now)
        for one in running:
            one[1] -= 1
            if not one[1]:
                ends[one[0]] = now
        running = [one for one in running if one[1]]
    return ends


def served(
    name: str,
    base: float,
    per_sequence: float,
    groups: int = 60,
    pauses: list[tuple[float, float]] | None = None,
    longest: int = 150,
) -> list[trace.GroupLine]:
    """Groups of 4 at a server of 8, and now and then two groups more than it holds."""
    rng = random.Random(name)
    leases, now = [], 0.0
    for number in range(groups):
        leases.append((now, [rng.randint(1, 150) for _ in range(3)] + [longest if number % 5 == 0 else 150]))
        now += (base + 6 * per_sequence) * (250 if number % 4 == 3 else 10)
    ends = token_by_token(leases, base, per_sequence, pauses or [])
    return [
        trace.GroupLine(
            t=end,
            slot=slot,
            step=0,
            prompt=slot,
            generator=name,
            leased=at,
            seconds=end - at,
            prompt_tokens=3,
            lengths=lengths,
        )
        for slot, ((at, lengths), end) in enumerate(zip(leases, ends, strict=True))
    ]


def trace_of(
    groups: list[trace.GroupLine],
    steps: Sequence[trace.StepLine] = (),
    publishes: Sequence[trace.PublishLine] = (),
) -> RunTrace:
    settings = trace.RunLine(
        t=0.0,
        format=1,
        prompts_per_step=60,
        completions_per_prompt=4,
        max_completion_tokens=150,
        max_staleness_steps=0,
        concurrency=8,
    )
    return RunTrace(settings, [], groups, list(steps), list(publishes), 1, 0)


def assert_speed(found: DecodeSpeed, base: float, per_sequence: float) -> None:
    """A sequence begins between two steps of the server, and at any time in the simulation: it waits half a step less."""
    assert found.base == pytest.approx(base, rel=0.05)
    assert found.per_sequence == pytest.approx(per_sequence, rel=0.15)
    assert found.seconds(8) == pytest.approx(base + 8 * per_sequence, rel=0.01)


@pytest.mark.parametrize(("base", "per_sequence"), [(8e-3, 1e-4), (2e-3, 1e-3)])
def test_speeds_are_found_where_sequences_queue(base: float, per_sequence: float) -> None:
    assert_speed(fit_decode(trace_of(served("g", base, per_sequence))), base, per_sequence)


def test_speeds_are_fitted_on_part_of_a_long_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two generators; of one alone, the first and the last groups: in the middle it is another machine."""
    monkeypatch.setattr(speeds, "_SEQUENCES", 240)  # it ends, and begins again, within a burst
    both = served("a", 8e-3, 1e-3, 200, longest=400) + served("b", 8e-3, 1e-3, 200, longest=400)
    assert_speed(fit_decode(trace_of(both)), 8e-3, 1e-3)
    one = served("a", 8e-3, 1e-3, 200)
    one[80:120] = [msgspec.structs.replace(line, seconds=line.seconds / 9) for line in one[80:120]]
    assert_speed(fit_decode(trace_of(one)), 8e-3, 1e-3)


def test_publishes_pause_generators_unless_held() -> None:
    """Every fourth publish is held for 4 s, and every fifth version is published again to a member that joins."""
    steps, publishes, pauses = [], [], []
    for step in range(12):
        reported = 5.0 * step + 2
        end = reported + (4.5 if step % 4 == 0 else 0.5)
        steps.append(trace.StepLine(t=reported, step=step, busy_seconds=1.0, trained_tokens=9))
        publishes.append(trace.PublishLine(t=end, version=step + 1))
        if step % 5 == 0:
            publishes.append(trace.PublishLine(t=end + 4, version=step + 1))
        pauses.append((end - 0.5, end))
    groups = served("g", 8e-3, 2e-3, pauses=pauses)
    assert_speed(fit_decode(trace_of(groups, steps, publishes)), 8e-3, 2e-3)


def test_groups_that_were_not_trained_were_generated_too(tmp_path: Path) -> None:
    """Refilled groups, and those of a step that has not ended."""
    groups = served("g", 8e-3, 1e-3)
    for n, line in enumerate(groups):
        changed = {"refilled": True} if n % 4 == 1 else {"step": 1 if n % 4 == 2 else 0}
        groups[n] = msgspec.structs.replace(line, slot=n, **changed)
    settings = trace_of([]).settings
    lines = [
        msgspec.structs.replace(settings, prompts_per_step=30),
        *groups,
        groups[0],  # written twice
        trace.StepLine(t=99.0, step=0, busy_seconds=1.0, trained_tokens=9),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace.encode(line) + b"\n" for line in lines))
    run = read_trace(path)
    assert (len(run.groups), len(run.generated), run.refilled) == (30, 60, 15)
    assert_speed(fit_decode(run), 8e-3, 1e-3)


def test_drafts_that_are_never_accepted_have_their_cost() -> None:
    """Half of the groups have two drafted tokens in each step."""
    groups = []
    for n in range(40):
        running, drafted = 4 * (1 + n % 3 // 2), 2 * (n % 2)
        seconds = 100 * (8e-3 + 1e-3 * running + 5e-4 * running * drafted)
        for twin in range(running // 4):
            groups.append(
                trace.GroupLine(
                    t=10.0 * n + seconds,
                    slot=len(groups),
                    step=0,
                    prompt=twin,
                    generator="g",
                    leased=10.0 * n,
                    seconds=seconds,
                    prompt_tokens=3,
                    lengths=[100] * 4,
                    drafted_tokens=400 * drafted,
                    accepted_tokens=0,
                )
            )
    found = fit_decode(trace_of(groups))
    assert (found.base, found.per_sequence) == (pytest.approx(8e-3, rel=0.01), pytest.approx(1e-3, rel=0.01))
    assert found.per_draft == pytest.approx(5e-4, rel=0.01)


def test_zero_durations_are_ignored_for_speeds() -> None:
    groups = [msgspec.structs.replace(line, seconds=5e-324) for line in served("g", 8e-3, 1e-3)]
    assert fit_decode(trace_of(groups)) == DecodeSpeed(0.0, 0.0)


def test_groups_ended_before_their_lease_are_ignored() -> None:
    """The run's time steps back where the coordinator loses its last records."""
    groups = served("g", 8e-3, 1e-3)
    groups[-1] = msgspec.structs.replace(groups[-1], leased=groups[-1].t + 50)
    assert_speed(fit_decode(trace_of(groups)), 8e-3, 1e-3)
