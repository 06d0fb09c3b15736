"""The pool: correct scores, whatever completions do and whichever process dies."""

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scalerl_tasks import (
    Graded,
    GradingError,
    GradingPool,
    GymTask,
    Prompt,
    ReasoningGymSource,
    Verdict,
    VerifierConfig,
    VerifierError,
)
from scalerl_tasks.grading.fork_client import ForkServer, Grader
from scalerl_tasks.grading.protocol import Limits, Setup
from scalerl_tasks.python_function import PythonFunction

HALF = Prompt("half", "?", r"\frac{1}{2}")
FOUR = Prompt("four", "2 + 2 =", "4")
RIGHT, WRONG = Graded(Verdict(1.0)), Graded(Verdict(0.0))
TOWER = r"\boxed{9^{9^{9^{9}}}}"
# A task whose import is quick, and whose scorer multiplies whatever numbers it is given: minutes, holding the lock.
FACTORS = VerifierConfig("reasoning-gym", task=GymTask("prime_factorization", {}, seed=1, size=5))
PRIME = Prompt("prime", "Factorize 6", "2 × 3")
FOREVER = " × ".join(["9" * 4000] * 2000)


others: set[int] = set()
"""What tests of other files have left running in this process: fork servers of multiprocessing."""


@pytest.fixture(autouse=True)
def _before() -> None:
    others.clear()
    others.update(children())


def children(pid: int | None = None) -> set[int]:
    """All living descendants of a process that this test has started."""
    found: set[int] = set()
    todo = [pid or os.getpid()]
    while todo:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                new = set(map(int, (task / "children").read_text().split()))
                todo += new
                found |= new
    return found - others


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: set[int], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while left := {pid for pid in pids if alive(pid)}:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)


def graders() -> set[int]:
    """Graders are the children of the fork server, which is our child."""
    return set().union(*(children(pid) for pid in children()), set())


@pytest.fixture
def sent(monkeypatch):
    """Set once a grader was sent a request, for which the pool then waits."""
    event, send = asyncio.Event(), Grader.send
    monkeypatch.setattr(Grader, "send", lambda *given: (send(*given), event.set()))
    return event


def put_forward(monkeypatch):
    """Let more time than that of a completion pass for the event loop at once."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 400.0)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", ["exact", "number", "math-verify"])
async def test_score_group_keeps_order(name):
    completions = ["4", "5", "<answer>4</answer>", r"\boxed{4}", "<think>4</think>5"]
    async with GradingPool(VerifierConfig(name)) as pool:
        assert await pool.score_group(FOUR, completions) == [RIGHT, WRONG, RIGHT, RIGHT, WRONG]
        assert await pool.score_group(FOUR, []) == []
        inside = await pool.score_group(FOUR, ["4", "2+2 is 4</think>4", "5</think>"], in_thought=True)
        assert inside == [WRONG, RIGHT, WRONG]
        many = [[str((i + j) % 6) for j in range(i % 20)] for i in range(100)]
        results = await asyncio.gather(*(pool.score_group(FOUR, group) for group in many))
    assert results == [[RIGHT if text == "4" else WRONG for text in group] for group in many]


@pytest.mark.parametrize(
    ("name", "completions", "answered"),
    [
        ("exact", ["5", "<think>4", r"\boxed{4"], [True, False, False]),
        ("number", ["It is 5.", "I do not know", r"\boxed{four}"], [True, False, False]),
        ("math-verify", ["It is 5.", "<think>4", "<answer></answer>"], [True, False, False]),
    ],
)
async def test_score_group_tells_which_completions_have_an_answer(name, completions, answered):
    async with GradingPool(VerifierConfig(name)) as pool:
        found = await pool.score_group(FOUR, completions)
    assert [(grade.score, grade.verdict.answered) for grade in found] == [(0.0, one) for one in answered]


async def test_score_group_runs_task_scorers():
    """Among them one that evaluates its own problem text."""
    for name in ("gsm_symbolic", "bitwise_arithmetic", "calendar_arithmetic"):
        task = GymTask(name, {}, seed=1, size=5)
        source = ReasoningGymSource(task)
        async with GradingPool(VerifierConfig("reasoning-gym", task=task)) as pool:
            for i in range(5):
                good, bad = await pool.score_group(source[i], [source[i].answer, "certainly not"])
                assert good == RIGHT, name
                assert bad.score < 1, name
                assert bad.error is None, name


HOSTILE_MATH = [
    TOWER,
    "9**9**9**9",
    r"\boxed{99999999!}",
    r"\boxed{\sum_{k=1}^{10^{12}} k!}",
    r"\boxed{" + r"\frac{1}{1+" * 300 + "1" + "}" * 301,
    r"\boxed{" + r"\frac{" * 3000 + "1" + "}{2}" * 3000 + "}",
    "$" + "(" * 1500 + "1" + ")" * 1500 + "$",
    r"\boxed{" * 20_000,
    "$" * 50_000,
    "answer: $" * 20_000,
    "x" * 10_000_000,
    "7" * 10_000_000,
    "\0" * 100_000,
    "\ud800",
    "٣½Ⅷ",
    r"\boxed{\text{__import__('os').system('touch PWNED')}}",
    "__import__('os').system('touch PWNED')",
    r"$__import__('os').system('touch PWNED')$",
    "nan",
    r"\boxed{\infty}",
    r"\boxed{\frac{1}{0}}",
]


@pytest.mark.slow
async def test_score_group_survives_hostile_mathematics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Good ones between the bad ones: each must get its own verdict.
    completions = [text for bad in HOSTILE_MATH for text in (bad, r"\boxed{0.5}")]
    async with GradingPool(VerifierConfig("math-verify"), workers=2) as pool:
        graded = await pool.score_group(HALF, completions)
        assert pool.counts.graded == len(completions)
        assert pool.counts.timeouts == 0, "numbers that take too long to compute score 0 at once"
    assert [g.score for g in graded] == [0.0, 1.0] * len(HOSTILE_MATH)
    assert all(g.error is None for g in graded)
    assert not list(tmp_path.iterdir())


async def test_score_group_limits_memory():
    """A character outside the basic plane takes four bytes in every copy."""
    large = "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}" * 15_000_000
    pool = GradingPool(VerifierConfig("exact"), memory_bytes=128 << 20)
    async with pool:
        graded = await pool.score_group(FOUR, ["4", large, "4", "5"])
    assert [g.score for g in graded] == [1, 0, 1, 0]
    assert graded[1].error == "grading needed more than 134,217,728 bytes of memory"
    assert graded[2].error is None


async def test_score_group_refuses_completion_above_memory():
    large = "\N{GRINNING FACE}" * 15_000_000
    async with GradingPool(VerifierConfig("exact"), memory_bytes=64 << 20) as pool:
        graded = await pool.score_group(FOUR, ["4", large, "4"])
    assert [g.score for g in graded] == [1, 0, 1]
    assert graded[1].error == "grading needed more than 67,108,864 bytes of memory"


async def test_score_group_refuses_too_long_completion():
    async with GradingPool(VerifierConfig("exact")) as pool:
        graded = await pool.score_group(FOUR, ["x" * (16 << 20) + "x", "4"])
    assert graded[0].score == 0.0
    assert "16,777,217 characters is over the limit of 16,777,216" in str(graded[0].error)
    assert graded[1] == RIGHT


async def test_score_group_splits_large_group():
    async with GradingPool(VerifierConfig("number"), memory_bytes=64 << 20) as pool:
        graded = await pool.score_group(FOUR, [" " * 3_000_000 + str(i) for i in range(8)])
    assert [g.score for g in graded] == [float(i == 4) for i in range(8)]


async def test_pool_refuses_scorer_that_evaluates_code():
    config = VerifierConfig("reasoning-gym", task=GymTask("simple_integration", {}, seed=1, size=5))
    before = children()
    with pytest.raises(VerifierError, match="of task 'simple_integration' evaluates answers as Python code"):
        await GradingPool(config).start()
    wait_gone(children() - before)


async def test_audit_guard_refuses_evaluation_fallback(tmp_path):
    """string_insertion's scorer compares, and evaluates what does not compare equal."""
    task = GymTask("string_insertion", {}, seed=1, size=5)
    prompt = ReasoningGymSource(task)[0]
    target = tmp_path / "pwned"
    attack = f"[c for c in __import__('pathlib').Path({str(target)!r}).write_text('x') and 'a']"
    async with GradingPool(VerifierConfig("reasoning-gym", task=task)) as pool:
        good, bad, again = await pool.score_group(prompt, [prompt.answer, attack, prompt.answer])
    assert (good, again) == (RIGHT, RIGHT)
    assert bad == Graded(None, "grading tried to turn text into code, which is refused")
    assert not target.exists()


async def test_score_group_returns_verifier_errors():
    async with GradingPool(VerifierConfig("number")) as pool:
        graded = await pool.score_group(Prompt("1", "q", "no number"), ["4"])
    assert graded[0].score == 0
    assert "VerifierError: prompt 1: its answer 'no number' has no number" in str(graded[0].error)


async def test_score_group_raises_on_unpicklable_prompt():
    async with GradingPool(VerifierConfig("exact")) as pool:
        with pytest.raises((TypeError, AttributeError), match="pickle"):
            await pool.score_group(Prompt("1", "q", "4", metadata={"f": threading.Lock()}), ["4"])
        assert await pool.score_group(FOUR, ["4"]) == [RIGHT]
        # A process of an earlier pool may take a moment to exit.
        async with asyncio.timeout(120):
            while len(graders()) > 1:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.05)


async def test_hanging_group_does_not_block_others():
    async with GradingPool(FACTORS, workers=2, timeout_seconds=600) as pool:
        stuck = asyncio.create_task(pool.score_group(PRIME, [FOREVER, PRIME.answer]))
        await asyncio.sleep(0.2)
        for _ in range(5):
            assert await pool.score_group(PRIME, [PRIME.answer, "5"]) == [RIGHT, Graded(Verdict(0.01))]
        assert not stuck.done()
    with pytest.raises(GradingError, match="closed"):
        await stuck


async def test_score_group_reports_each_grade():
    at = []
    async with GradingPool(FACTORS, timeout_seconds=1.5) as pool:
        begun = time.monotonic()
        verdicts = await pool.score_group(
            PRIME, [PRIME.answer, FOREVER, "5"], on_graded=lambda: at.append(time.monotonic() - begun)
        )
    assert len(at) == len(verdicts) == 3
    assert at[1] - at[0] > 0.1


async def test_pool_is_notified_once_for_a_group(monkeypatch, tmp_path):
    """Waking it takes longer than grading most completions."""
    notices = []
    receive = Grader.data_received
    monkeypatch.setattr(Grader, "data_received", lambda *given: (notices.append(1), receive(*given)))
    (tmp_path / "r.py").write_text("import time\ndef own(completion): time.sleep(0.01); return 1.0\n")
    own = PythonFunction("own", path=str(tmp_path / "r.py"))
    async with GradingPool(VerifierConfig("python", python=own)) as pool:
        for _ in range(2):
            assert await pool.score_group(FOUR, ["4"] * 16) == [RIGHT] * 16
    assert len(notices) == 2


async def test_fork_that_fails_while_connecting_reads_no_other_file(monkeypatch):
    """The number of its pipe may be another file's when the connection's loss is reported."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection

    async def cancelled(*given, **named):
        transport, _ = await connect(*given, **named)
        transport.close()  # as asyncio does when it is cancelled here
        raise asyncio.CancelledError

    server = await ForkServer.start(Setup(FACTORS, Limits(30.0, 1 << 30)), 120.0)
    others = []
    try:
        monkeypatch.setattr(loop, "create_unix_connection", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await server.fork()
        for _ in range(4):  # they get the lowest free numbers
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.write(writer, b"theirs")
            others += [reader, writer]
        await asyncio.sleep(0.1)
        assert [os.read(reader, 99) for reader in others[::2]] == [b"theirs"] * 4
    finally:
        for end in others:
            os.close(end)
        await server.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_records_of_more_bytes_than_a_pipe_holds(tmp_path, whole):
    (tmp_path / "r.py").write_text(
        "def each(completion): raise ValueError(completion * 200)\ndef all_of(completions): return ['x' * 200] * len(completions)\n"
    )
    own = PythonFunction("all_of", signature="group") if whole else PythonFunction("each")
    own = dataclasses.replace(own, path=str(tmp_path / "r.py"))
    async with GradingPool(VerifierConfig("python", python=own)) as pool:
        graded = await pool.score_group(FOUR, ["4"] * 1000)
    assert len(graded) == 1000
    assert len({one.error for one in graded if one.error}) == 1
    assert pool.counts.errors == 1000


async def test_alarm_of_a_reward_during_a_write_loses_no_record(tmp_path):
    (tmp_path / "r.py").write_text(
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "def all_of(completions):\n    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)\n    return ['x' * 200] * len(completions)\n"
    )
    own = PythonFunction("all_of", path=str(tmp_path / "r.py"), signature="group")
    async with GradingPool(VerifierConfig("python", python=own)) as pool:
        graded = await pool.score_group(FOUR, ["4"] * 1000)
    assert {one.error for one in graded} == {graded[0].error}
    assert (len(graded), pool.counts.deaths, pool.counts.timeouts) == (1000, 0, 0)


async def test_group_is_scored_again_as_a_whole_when_its_grader_dies_between_records(tmp_path):
    """The pipe holds a part of them when it dies."""
    (tmp_path / "r.py").write_text(
        "import os, pathlib, threading\nfirst = pathlib.Path(__file__).with_name('first')\n"
        "def all_of(completions):\n    if first.exists(): return [len(completions) / 1000] * len(completions)\n"
        "    first.touch()\n    while first.exists(): pass\n    first.touch()\n"
        "    threading.Timer(0.2, os._exit, [1]).start()\n    return ['x' * 200] * len(completions)\n"
    )
    own = PythonFunction("all_of", path=str(tmp_path / "r.py"), signature="group")
    async with GradingPool(VerifierConfig("python", python=own)) as pool:
        scoring = asyncio.create_task(pool.score_group(FOUR, ["4"] * 1000))
        while not (tmp_path / "first").exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0)
        (tmp_path / "first").unlink()
        wait_gone(graders())  # without this event loop: the pipe stays full until the grader is dead
        assert await scoring == [RIGHT] * 1000
        assert pool.counts.deaths == 1


async def test_graders_found_dead_while_their_server_is_replaced_leave_no_descriptor():
    async with GradingPool(VerifierConfig("exact"), workers=4) as pool:
        counts = []
        for _ in range(2):
            await asyncio.gather(*(pool.score_group(FOUR, ["4"] * 4) for _ in range(8)))
            counts.append(descriptors())
            killed = children()
            (server,) = killed - graders()
            os.kill(server, signal.SIGKILL)
            wait_gone(killed)
            groups = []
            for _ in range(4):
                groups.append(asyncio.create_task(pool.score_group(FOUR, ["4"])))
                await asyncio.sleep(0.03)
            assert await asyncio.gather(*groups) == [[RIGHT]] * 4
    assert counts[-1] <= counts[0], counts


async def test_late_event_loop_is_not_a_timeout(tmp_path, monkeypatch, sent):
    (tmp_path / "r.py").write_text(
        "import pathlib\nnames = iter('abc' * 99)\n"
        "def own(completion): pathlib.Path(__file__).with_name(next(names)).touch(); return 1.0\n"
    )
    own = PythonFunction("own", path=str(tmp_path / "r.py"))
    async with GradingPool(VerifierConfig("python", python=own)) as pool:
        await pool.score_group(FOUR, ["4"])
        (pid,) = graders()
        os.kill(pid, signal.SIGSTOP)  # until the loop waits for it
        sent.clear()
        group = asyncio.create_task(pool.score_group(FOUR, ["4"] * 50))
        await sent.wait()
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 120
        while not (tmp_path / "c").exists():  # the record before it has been written
            assert time.monotonic() < deadline
            time.sleep(0.02)  # noqa: ASYNC251
        put_forward(monkeypatch)
        assert await group == [RIGHT] * 50
        assert pool.counts.timeouts == 0


async def test_pool_survives_cancelled_groups(monkeypatch, sent):
    async with GradingPool(FACTORS) as pool:
        groups = [asyncio.create_task(pool.score_group(PRIME, [FOREVER] * 100)) for _ in range(3)]
        await sent.wait()
        for group in groups:
            group.cancel()
        await asyncio.wait(groups)
        put_forward(monkeypatch)
        async with asyncio.timeout(120):  # once the time of a completion, and not 300 times
            assert await pool.score_group(PRIME, [PRIME.answer]) == [RIGHT]


@pytest.mark.slow
async def test_pool_survives_random_kills():
    """Graders and fork servers are killed while 200 groups are graded; verdicts stay right, and nothing leaks."""
    rng = random.Random(7)
    before = descriptors()
    async with GradingPool(VerifierConfig("number"), workers=3) as pool:
        await pool.score_group(FOUR, ["4"])
        held = descriptors()
        stop = asyncio.Event()
        kills = {"grader": 0, "server": 0}

        async def kill_at_random():
            graded = since = 0
            while not stop.is_set():
                await asyncio.sleep(rng.uniform(0.002, 0.03))
                # At most three kills without a verdict in between: more would be all starts of a slow machine.
                since = since + 1 if pool.counts.graded == graded else 0
                if since > 2:
                    continue
                graded = pool.counts.graded
                kind = "server" if rng.random() < 0.02 else "grader"
                victims = sorted(graders() if kind == "grader" else children() - graders())
                if victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(victims), signal.SIGKILL)
                    kills[kind] += 1

        killer = asyncio.create_task(kill_at_random())
        wrong = start = 0
        # 200 groups, and on a fast machine as many more as it takes until both kinds were killed.
        while start < 200 or kills["grader"] < 20 or kills["server"] < 1:
            start += 10
            groups = [[str(rng.randrange(3, 6)) + " " * 20_000 for _ in range(16)] for _ in range(10)]
            async with asyncio.timeout(120):
                results = await asyncio.gather(*(pool.score_group(FOUR, group) for group in groups))
            for group, graded in zip(groups, results, strict=True):
                assert len(graded) == 16, start
                for text, one in zip(group, graded, strict=True):
                    if one.error is None:
                        assert one.score == float(text.startswith("4"))
                    else:
                        assert one == Graded(None, "the grader died 2 times on this completion")
                        wrong += 1
            await asyncio.sleep(0.05)
        stop.set()
        await killer
        assert wrong <= kills["grader"] // 2
        assert await pool.score_group(FOUR, ["4", "5"]) == [RIGHT, WRONG]
        gone = children()
        async with asyncio.timeout(120):  # those that were killed last may take a moment to be reaped
            # A socket each of two more graders.
            while len(graders()) > 3 or descriptors() > held + 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    wait_gone(gone)
    assert children() == set()
    assert descriptors() == before


@pytest.mark.slow
async def test_pool_leaks_nothing_on_crashes():
    """200 groups, one in four with a completion that blows the memory, so that its grader is replaced."""
    before = descriptors()
    async with GradingPool(VerifierConfig("exact"), memory_bytes=64 << 20) as pool:
        await pool.score_group(FOUR, ["4"])
        held, large = descriptors(), "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}" * 9_000_000
        for i in range(200):
            graded = await pool.score_group(FOUR, ["4", large if i % 4 == 0 else "5", "4"])
            assert [g.score for g in graded] == [1, 0, 1]
            assert (graded[1].error is not None) == (i % 4 == 0)
        assert pool.counts.errors == 50
        assert descriptors() == held
        async with asyncio.timeout(120):  # the last one that was replaced may take a moment to be reaped
            while len(graders()) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert children() == set()
    assert descriptors() == before


async def test_pool_kills_stopped_grader(monkeypatch, sent):
    async with GradingPool(VerifierConfig("exact")) as pool:
        await pool.score_group(FOUR, ["4"])
        (pid,) = graders()
        os.kill(pid, signal.SIGSTOP)
        sent.clear()
        group = asyncio.create_task(pool.score_group(FOUR, ["4", "4"]))
        await sent.wait()
        put_forward(monkeypatch)
        graded = await group
        assert graded[0] == Graded(None, "grading took longer than 300 s and was killed")
        assert graded[1] == RIGHT
        wait_gone({pid})


async def test_completion_fails_after_two_grader_deaths():
    async with GradingPool(FACTORS, timeout_seconds=600) as pool:
        graded_first = asyncio.Event()
        group = asyncio.create_task(
            pool.score_group(PRIME, [PRIME.answer, FOREVER, PRIME.answer], on_graded=graded_first.set)
        )
        killed: set[int] = set()
        async with asyncio.timeout(120):
            await graded_first.wait()
            while len(killed) < 2:
                await asyncio.sleep(0.2)
                for pid in graders() - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            graded = await group
    assert graded == [RIGHT, Graded(None, "the grader died 2 times on this completion"), RIGHT]


async def test_pool_close_ends_and_refuses_groups():
    pool = GradingPool(FACTORS, timeout_seconds=600)
    await pool.start()
    groups = [asyncio.create_task(pool.score_group(PRIME, [FOREVER])) for _ in range(3)]
    async with asyncio.timeout(120):
        # The fork server, and the grader.
        while len(pids := children()) < 2:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)
    assert len(pids) == 2
    async with asyncio.timeout(120):
        await pool.aclose()
    wait_gone(pids)
    for group in groups:
        with pytest.raises(GradingError, match="closed"):
            await group
    with pytest.raises(GradingError, match="not running"):
        await pool.score_group(PRIME, ["1"])
    await pool.aclose()


async def test_pool_refuses_use_before_start():
    with pytest.raises(GradingError, match="async with"):
        await GradingPool(VerifierConfig("exact")).score_group(FOUR, ["4"])


async def test_pool_fails_without_fork_server(monkeypatch):
    """No scores are invented, and no group waits for ever."""
    async with GradingPool(VerifierConfig("exact"), back_off_seconds=0.001) as pool:
        assert await pool.score_group(FOUR, ["4"]) == [RIGHT]
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
        for pid in children():
            with contextlib.suppress(ProcessLookupError):  # a grader ends with its server
                os.kill(pid, signal.SIGKILL)
        groups = [asyncio.create_task(pool.score_group(FOUR, ["4"])) for _ in range(5)]
        for group in groups:
            async with asyncio.timeout(120):
                with pytest.raises(GradingError, match=r"no grader after 6 attempts: .* cannot be started"):
                    await group
        with pytest.raises(GradingError, match="no grader after 6 attempts"):
            await pool.score_group(FOUR, ["4"])


@pytest.mark.parametrize(
    "bad",
    [{"workers": 0}, {"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"memory_bytes": 1 << 20}],
)
def test_pool_refuses_bad_limits(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        GradingPool(VerifierConfig("exact"), **bad)


HANGING_PARENT = """
import asyncio, os, sys, time
from scalerl_tasks import GradingPool, GymTask, Prompt, VerifierConfig
factors = VerifierConfig("reasoning-gym", task=GymTask("prime_factorization", {}, seed=1, size=5))
forever = " × ".join(["9" * 4000] * 2000)
async def main():
    async with GradingPool(factors, workers=2, timeout_seconds=600) as pool:
        groups = [asyncio.create_task(pool.score_group(Prompt("1", "q", "2 × 3"), [forever])) for _ in "ab"]
        while pool.counts.forks < 2:
            await asyncio.sleep(0.01)
        heir = 0
        if sys.argv[1] == "parent with an heir":
            heir = os.fork()  # holds copies of all our sockets
            if heir == 0:
                time.sleep(3600)
                os._exit(0)
        print(heir, flush=True)
        await asyncio.gather(*groups)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["parent", "parent with an heir", "fork server"])
def test_graders_die_with_parents(victim):
    """Even while they are deep in C code that holds the interpreter's lock."""
    command = [sys.executable, "-c", HANGING_PARENT, victim]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        heir = 0
        try:
            assert parent.stdout is not None
            heir = int(parent.stdout.readline())
            time.sleep(0.3)
            deadline = time.monotonic() + 120
            while len(hanging := set().union(*map(children, children(parent.pid)))) < 2:
                assert time.monotonic() < deadline, hanging
                time.sleep(0.02)
            (server,) = {pid for pid in children(parent.pid) if children(pid)}
            assert len(hanging) == 2
            assert all(map(alive, hanging))
            os.kill(server if victim == "fork server" else parent.pid, signal.SIGKILL)
            wait_gone(hanging)
            if victim != "fork server":
                wait_gone({server})
        finally:
            parent.kill()
            if heir:
                os.kill(heir, signal.SIGKILL)


def test_pool_works_with_threads():
    stop = threading.Event()
    busy = [threading.Thread(target=stop.wait, daemon=True) for _ in range(8)]
    for thread in busy:
        thread.start()
    found = []

    async def grade():
        async with GradingPool(VerifierConfig("number"), workers=2) as pool:
            results = await asyncio.gather(*(pool.score_group(FOUR, ["4", "5"]) for _ in range(20)))
            found.extend(results)

    thread = threading.Thread(target=lambda: asyncio.run(grade()))
    thread.start()
    thread.join(120)
    stop.set()
    assert found == [[RIGHT, WRONG]] * 20


VERIFIER_WITH_PARTS = """
import scalerl_tasks.verifiers as v
from scalerl_tasks import Verdict

class Parts:
    name, part_names = "parts", ("outcome", "process")
    def score(self, prompt, completion):
        return eval_result[completion]
    def check(self, prompt): ...
    def samples(self):
        return [(v.Prompt("sample", "", ""), "good")]

eval_result = {
    "good": Verdict(0.5, {"process": -2.5, "outcome": 1}),
    "nan": Verdict(0.5, {"process": float("nan"), "outcome": 1}),
    "other": Verdict(0.5, {"process": 1}),
    "bare": True,
    "high": Verdict(1.5, {"process": 1, "outcome": 1}),
    "huge": 10**400,
    "none": None,
}
v._OPENERS["parts"] = Parts
v.VERIFIERS = tuple(v._OPENERS)
"""


async def test_parts_of_a_verdict_reach_the_caller(tmp_path, monkeypatch):
    """A verifier that the grading process registers at its start; its part names are known here once it has started."""
    (tmp_path / "sitecustomize.py").write_text(VERIFIER_WITH_PARTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with GradingPool(VerifierConfig("parts")) as pool:
        assert pool.part_names == ("outcome", "process")
        good, *bad = await pool.score_group(FOUR, ["good", "nan", "other", "bare", "high", "huge", "none"])
    assert good == Graded(Verdict(0.5, {"outcome": 1.0, "process": -2.5}))
    assert {g.verdict for g in bad} == {None}
    assert [g.error for g in bad[:4]] == [
        "the verifier gave nan as its part 'process', which is not finite",
        "the verifier gave the parts ['process'], and declares ['outcome', 'process']",
        "the verifier gave the parts [], and declares ['outcome', 'process']",
        "the verifier gave 1.5, which is not in [0, 1]",
    ]
    assert all(g.error for g in bad[4:])


COUNTS_OPENED_FILES = """
import sys
import scalerl_tasks.verifiers as v

opened = 0

def hook(event, arguments):
    global opened
    opened += event == "open"

class Counts:
    name = "counts"
    def score(self, prompt, completion):
        return min(1.0, opened / 1000)
    def check(self, prompt): ...
    def samples(self):
        return [(v.Prompt("sample", "", ""), "any")]

sys.addaudithook(hook)
v._OPENERS["counts"] = Counts
v.VERIFIERS = tuple(v._OPENERS)
"""


async def test_grader_opens_no_file_for_a_completion(tmp_path, monkeypatch):
    """That takes longer than the cheap verifiers do."""
    (tmp_path / "sitecustomize.py").write_text(COUNTS_OPENED_FILES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with GradingPool(VerifierConfig("counts")) as pool:
        first, *others = await pool.score_group(FOUR, ["any"] * 16)
    assert 0 < first.score < 1
    assert others == [first] * 15
