"""Kill -9 of every role at random moments: the run goes on, and every acknowledged rollout is accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import (
    START_SECONDS,
    LocalRun,
    assert_counts_add_up,
    assert_nothing_left,
    engine_of,
    processes_of,
    small_spec,
    start_run,
)

pytestmark = pytest.mark.timeout(900)

ROLES = {
    "server": "scalerl_generator.vllm_server",
    "actor": "scalerl_generator.actor",
    "trainer rank": "scalerl_trainer.main",
    "coordinator": "scalerl_coordinator.main",
}


def kill_one(run: LocalRun, part: str, dice: random.Random) -> None:
    run.until(lambda: run.find(part), 120, f"a process of {part}")
    os.kill(dice.choice(run.find(part)).pid, signal.SIGKILL)


def test_every_role_may_die_at_any_moment(tmp_path: Path) -> None:
    """Each role once, in random order, at random moments (some fall inside a publish: updates take most of a step)."""
    seed = int.from_bytes(os.urandom(4), "big")
    dice = random.Random(seed)
    print(f"seed {seed}")
    spec = small_spec(
        budget__maxSteps=60, checkpoint__everySteps=4, recipe__maxStalenessSteps=4, budget__maxSeconds=800
    )
    order = list(ROLES)
    dice.shuffle(order)
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 3, START_SECONDS, "three steps")
        for role in order:
            before = run.step()
            kill_one(run, ROLES[role], dice)
            run.until(
                lambda b=before: run.step() >= min(b + 3, 60), 240, f"progress after the {role} was killed"
            )
            time.sleep(dice.uniform(0, 2))
        code = run.finish(400)
        assert code == 0, run.tail()
    summary = run.summary()
    assert summary["steps"] == 60
    assert summary["max_staleness_steps"] <= 4
    assert_counts_add_up(summary, spec)
    assert [row["step"] for row in run.metrics()] == list(range(60))
    assert_nothing_left(run.directory)


KILLS = {"coordinator": 15, "actor": 14, "grader": 12, "trainer rank": 6, "server": 3}
"""Fifty; a grader is stopped rather than killed: it hangs with the next completion that it is given."""


def hang_a_grader(run: LocalRun, dice: random.Random) -> None:
    graders: list[str] = []
    with contextlib.suppress(OSError):
        for server in run.find("scalerl_tasks.grading.fork_server"):
            graders += Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        if graders:
            os.kill(int(dice.choice(graders)), signal.SIGSTOP)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fifty_kills_with_bad_items_among_the_good(tmp_path: Path) -> None:
    """The run ends at its budget, the counts add up, and each prompt without room is given up once."""
    seed = int.from_bytes(os.urandom(4), "big")
    dice = random.Random(seed)
    print(f"seed {seed}")
    sums = [f"{a}+{b}" for a in range(10, 40) for b in range(10, 20)]
    rows = [{"prompt": f"{s}=", "answer": f"{sum(map(int, s.split('+'))):03}"} for s in sums]
    rows += [{"prompt": "+".join([str(i)] * 15), "answer": "000"} for i in range(10, 13)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = 80
    spec = small_spec(
        task__jsonl__path=str(data),
        task__verifier__timeoutSeconds=2,
        budget__maxSteps=steps,
        budget__maxSeconds=3000,
        checkpoint__everySteps=4,
        recipe__maxStalenessSteps=4,
    )
    victims = [name for name, count in KILLS.items() for _ in range(count)]
    dice.shuffle(victims)
    begun = time.monotonic()
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 2, START_SECONDS, "two steps")
        for number, victim in enumerate(victims):
            run.until(lambda n=number: run.step() >= n, 300, f"step {number}, after the {victim} was killed")
            time.sleep(dice.uniform(0, 1))
            if victim == "grader":
                hang_a_grader(run, dice)
            else:
                kill_one(run, ROLES[victim], dice)
        code = run.finish(900)
        assert code == 0, run.tail()
    summary = run.summary()
    counts = summary["counts"]
    print(f"{len(victims)} kills in {time.monotonic() - begun:.0f} s: {counts}")
    assert summary["steps"] == steps
    assert_counts_add_up(summary, spec)
    assert counts["given_up"] == counts["too_long"]
    assert counts["invalid"] == 0
    written = run.metrics()
    assert [row["step"] for row in written] == list(range(steps))
    assert 4 * sum(row["given_up_groups"] for row in written) == counts["given_up"] > 0
    assert sum(row["grading_errors"] for row in written) == counts["ungraded"]
    assert_nothing_left(run.directory)


@pytest.mark.full
def test_kill_everything_and_resume_trains_the_same_prompts(tmp_path: Path) -> None:
    spec = small_spec(budget__maxSteps=16, checkpoint__everySteps=4)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with start_run(tmp_path / "a", spec) as undisturbed:
        assert undisturbed.finish(400) == 0, undisturbed.tail()
    with start_run(tmp_path / "b", spec) as first:
        first.until(lambda: first.step() >= 6, START_SECONDS, "six steps")
        first.kill_everything()
    assert_nothing_left(first.directory)
    with start_run(tmp_path / "b", spec, "--resume") as second:
        assert second.finish(400) == 0, second.tail()
    assert [row["prompts_crc32"] for row in second.metrics()] == [
        row["prompts_crc32"] for row in undisturbed.metrics()
    ]
    assert_counts_add_up(second.summary(), spec)


@pytest.mark.full
def test_parent_killed_leaves_no_orphan(tmp_path: Path) -> None:
    with start_run(tmp_path, small_spec()) as run:
        engines: list[int] = []

        def engine_is_there() -> bool:
            engines[:] = [pid for server in run.find("vllm_server") for pid in engine_of(server)]
            return bool(engines)

        run.until(engine_is_there, 120, "vLLM's engine, a grandchild")
        assert set(engines) <= {p.pid for p in processes_of(run.directory)}  # nothing below is blind to it
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(timeout=10)
        assert_nothing_left(run.directory)
        assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


def test_second_ctrl_c_exits_now(tmp_path: Path) -> None:
    with start_run(tmp_path, small_spec(budget__maxSteps=10000)) as run:
        run.until(lambda: run.find("vllm_server"), 60, "a vLLM process")
        run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            run.process.send_signal(signal.SIGINT)
        assert run.finish(15) == 130
        assert_nothing_left(run.directory)
