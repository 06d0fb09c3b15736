"""The work queue: none lost, never two at once for a key, never hot."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_tests.virtual_time import run
from scalerl_operator.kube.errors import Unreachable
from scalerl_operator.kube.work_queue import MIN_AFTER_FAILURE_SECONDS, Key, WorkQueue

A: Key = ("team", "a")
B: Key = ("team", "b")


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Work:
    """A handler that takes time, fails or asks for another pass as the test sets it, and notes its passes."""

    seconds: Callable[[], float] = lambda: 0.0
    outcome: Callable[[Key], float | None] = lambda key: None
    begun: list[tuple[Key, float]] = field(default_factory=list)
    active: set[Key] = field(default_factory=set)
    most_at_once: int = 0

    async def __call__(self, key: Key) -> float | None:
        assert key not in self.active, f"{key} is in work twice"
        self.active.add(key)
        self.most_at_once = max(self.most_at_once, len(self.active))
        self.begun.append((key, now()))
        try:
            await asyncio.sleep(self.seconds())
            return self.outcome(key)
        finally:
            self.active.remove(key)

    def times(self, key: Key) -> list[float]:
        return [at for one, at in self.begun if one == key]


def queue(handler: Callable[[Key], Awaitable[float | None]], **options: object) -> WorkQueue:
    made = WorkQueue(handler, rng=random.Random(7), **options)  # type: ignore[arg-type]
    made.release()
    return made


WAKES = st.lists(st.tuples(st.floats(0, 3), st.sampled_from([A, B, ("other", "a")])), max_size=30)


@settings(max_examples=150, deadline=None)
@given(wakes=WAKES, seed=st.integers(0, 2**32), workers=st.integers(1, 3))
def test_no_wake_up_is_lost_and_no_key_runs_twice(
    wakes: list[tuple[float, Key]], seed: int, workers: int
) -> None:
    chance = random.Random(seed)

    def outcome(key: Key) -> float | None:
        what = chance.random()
        if what < 0.2:
            raise RuntimeError("by chance")
        return chance.choice([0.0, 1.0, 10.0]) if what < 0.4 else None

    async def scenario() -> None:
        work = Work(lambda: chance.choice([0.0, 0.1, 2.0]), outcome)
        one = queue(work, workers=workers)
        asked: list[tuple[Key, float]] = []
        for pause, key in wakes:
            await asyncio.sleep(pause)
            one.wake(key)
            asked.append((key, now()))
        await asyncio.sleep(600)
        for key, at in asked:
            assert any(begun >= at for begun in work.times(key)), f"the wake-up of {key} at {at} was lost"
        assert work.most_at_once <= workers
        await one.drain(10)

    run(scenario())


@settings(max_examples=60, deadline=None)
@given(pauses=st.lists(st.floats(0.01, 5), min_size=1, max_size=80))
def test_failing_key_respects_its_floor_when_woken(pauses: list[float]) -> None:
    async def scenario() -> None:
        def fail(key: Key) -> float | None:
            raise RuntimeError("always")

        work = Work(outcome=fail)
        one = queue(work)
        for pause in pauses:
            one.wake(A)
            await asyncio.sleep(pause)
        times = work.times(A)
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        for row, gap in enumerate(gaps):
            assert gap >= min(MIN_AFTER_FAILURE_SECONDS, 0.75 * 2**row) - 1e-6
        await one.drain(10)

    run(scenario())


def test_wake_that_respects_the_backoff_does_not_advance_a_failed_key() -> None:
    async def scenario() -> None:
        fails = True

        def outcome(key: Key) -> float | None:
            if fails:
                raise RuntimeError("always")
            return 30.0

        work = Work(lambda: 0.1, outcome)
        one = queue(work)
        one.wake(A, respect_backoff=True)
        for _ in range(600):
            await asyncio.sleep(1.0)
            one.wake(A, respect_backoff=True)
        assert 10 <= len(work.begun) <= 20, "about one a minute in the end"
        fails = False
        await asyncio.sleep(61.0)
        before = len(work.begun)
        one.wake(A, respect_backoff=True)
        await asyncio.sleep(1.0)
        assert len(work.begun) == before + 1
        await one.drain(1)

    run(scenario())


@pytest.mark.parametrize("respects", [(True, True), (True, False), (False, True)])
def test_wake_in_work_that_fails_shortens_the_backoff_unless_all_respect_it(
    respects: tuple[bool, bool],
) -> None:
    async def scenario() -> None:
        def outcome(key: Key) -> float | None:
            raise RuntimeError("always")

        sixth = asyncio.Event()  # its back-off is 24 s or more

        def seconds() -> float:
            if len(work.begun) == 6:
                sixth.set()
            return 1.0

        work = Work(seconds, outcome)
        one = queue(work)
        one.wake(A)
        await sixth.wait()
        for respect in respects:
            one.wake(A, respect_backoff=respect)
        await asyncio.sleep(MIN_AFTER_FAILURE_SECONDS + 2.0)
        assert len(work.begun) == (6 if all(respects) else 7)
        await one.drain(1)

    run(scenario())


def test_key_woken_in_work_runs_once_more() -> None:
    async def scenario() -> None:
        work = Work(seconds=lambda: 1.0)
        one = queue(work)
        one.wake(A)
        await asyncio.sleep(0.5)
        for _ in range(5):
            one.wake(A)
        await asyncio.sleep(10)
        assert work.times(A) == pytest.approx([1000.0, 1001.0], abs=1e-3)

    run(scenario())


def test_handler_delay_is_kept_and_advanced_by_a_wake() -> None:
    async def scenario() -> None:
        work = Work(outcome=lambda key: 30.0)
        one = queue(work)
        one.wake(A)
        await asyncio.sleep(40)
        one.wake(A)
        await asyncio.sleep(6)
        assert work.times(A) == pytest.approx([1000.0, 1030.0, 1040.0], abs=1e-3)
        await one.drain(1)

    run(scenario())


def test_zero_delay_is_no_busy_loop() -> None:
    async def scenario() -> None:
        work = Work(outcome=lambda key: 0.0)
        one = queue(work)
        one.wake(A)
        await asyncio.sleep(10)
        assert 50 <= len(work.begun) <= 101
        await one.drain(1)

    run(scenario())


def test_back_off_doubles_to_its_ceiling_and_resets() -> None:
    async def scenario() -> None:
        failing = True

        def outcome(key: Key) -> float | None:
            if failing:
                raise RuntimeError("not yet")
            return None

        work = Work(outcome=outcome)
        one = queue(work)
        one.wake(A)
        await asyncio.sleep(400)
        times = work.times(A)
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        for gap, whole in zip(gaps, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=False):
            assert 0.75 * whole - 1e-3 <= gap <= whole + 1e-3
        assert one.failing() == 1
        failing = False
        await asyncio.sleep(61)
        assert one.failing() == 0
        passes = len(work.begun)
        await asyncio.sleep(500)
        assert len(work.begun) == passes

    run(scenario())


class _Patient(RuntimeError):
    longest_wait = 600.0


def test_error_raises_no_ceiling() -> None:
    async def scenario() -> None:
        def outcome(key: Key) -> float | None:
            raise _Patient("later")

        work = Work(outcome=outcome)
        queue(work).wake(A)
        await asyncio.sleep(600)
        times = work.times(A)
        assert max(later - sooner for sooner, later in itertools.pairwise(times)) <= 60.0

    run(scenario())


def test_unreachable_server_is_retried_within_15_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        def outcome(key: Key) -> float | None:
            if key == A:
                raise Unreachable("busy", retry_after=40.0)
            raise Unreachable("refused")

        work = Work(outcome=outcome)
        one = queue(work)
        one.wake(A)
        one.wake(B)
        await asyncio.sleep(121)
        assert work.times(A) == pytest.approx([1000, 1040, 1080, 1120], abs=0.01)
        later = [at for at in work.times(B) if at > 1060]
        assert len(later) >= 4
        await one.drain(1)

    run(scenario())
    assert "team/b: Unreachable: refused" in caplog.text
    assert "Traceback" not in caplog.text


def test_endless_pass_is_stopped_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        work = Work(seconds=lambda: 10_000.0)
        one = queue(work, limit=30.0)
        one.wake(A)
        await asyncio.sleep(35)
        assert len(work.times(A)) == 2
        await one.halt()

    run(scenario())
    assert "took longer than 30 s" in caplog.text
    assert "Traceback" in caplog.text


def test_queue_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        WorkQueue(Work(), workers=0)


def test_held_queue_gathers_until_released() -> None:
    async def scenario() -> None:
        work = Work()
        one = WorkQueue(work)
        for key in (A, B, A):
            one.wake(key)
        await asyncio.sleep(5)
        assert not work.begun
        assert one.depth() == 2
        one.release()
        await asyncio.sleep(1)
        assert [key for key, _ in work.begun] == [A, B]
        assert one.depth() == one.in_work() == 0

    run(scenario())


def test_halt_cancels_and_keeps_keys_due() -> None:
    async def scenario() -> None:
        work = Work(seconds=lambda: 50.0)
        one = queue(work)
        one.wake(A)
        await asyncio.sleep(1)
        one.wake(B)  # its task exists, but has not had a turn yet
        began = now()
        await one.halt()
        assert now() - began < 0.1
        assert not work.active
        assert one.in_work() == 0
        assert one.depth() == 2
        one.release()
        await asyncio.sleep(1)
        assert work.active == {A, B}
        await one.halt()

    run(scenario())


def test_drain_waits_for_passes_and_returns_late_keys() -> None:
    async def scenario() -> None:
        finished: list[str] = []
        seconds = {A: 2.0, B: 100.0}

        async def handler(key: Key) -> float | None:
            await asyncio.sleep(seconds[key])
            finished.append(key[1])
            return 0.5

        one = queue(handler)
        one.wake(A)
        one.wake(B)
        await asyncio.sleep(0.1)
        drained = asyncio.create_task(one.drain(5))
        await asyncio.sleep(0)
        one.wake(("team", "c"))
        assert await drained == [B]
        await asyncio.sleep(200)
        assert finished == ["a"]

    run(scenario())


def test_observer_is_called_with_every_pass_and_its_result() -> None:
    class Observer:
        def __init__(self) -> None:
            self.coordinator_report: list[tuple[str, str]] = []

        def finished(self, key: Key, result: str, seconds: float) -> None:
            assert seconds >= 0
            self.coordinator_report.append((key[1], result))

    async def scenario() -> None:
        def outcome(key: Key) -> float | None:
            if key == B:
                raise RuntimeError("no")
            return None

        observer = Observer()
        one = queue(Work(seconds=lambda: 1.0, outcome=outcome), on_pass=observer.finished, workers=1)
        one.wake(A)
        one.wake(B)
        await asyncio.sleep(2.5)
        one.wake(A)
        await asyncio.sleep(0.1)
        await one.halt()
        assert observer.coordinator_report == [("a", "ok"), ("b", "error"), ("a", "cancelled")]

    run(scenario())
