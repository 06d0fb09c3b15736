"""Kill -9 of each role at random moments, bad items in the data: the run continues, and every slot is accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bad_items.sitecustomize import is_clamped
from faults import ROLES, Watch, kill_one
from journal_audit import JournalCopy, audit
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
from small_processes import is_running, wait_until

from scalerl_coordinator.leases import MAX_FAILURES

pytestmark = pytest.mark.timeout(1800)

FIFTY_KILLS = {"coordinator": 17, "actor": 17, "trainer rank": 10, "server": 6}
VERIFIER = "verifier"
"""Is stopped rather than killed: it hangs with the next completion that it is given."""

COMPLETIONS = 4
STALENESS = 4
BAD_ITEMS = Path(__file__).with_name("bad_items")


def hang_a_verifier(run: LocalRun, dice: random.Random) -> None:
    graders: list[str] = []
    with contextlib.suppress(OSError):
        for server in run.find("scalerl_tasks.grading.fork_server"):
            graders += Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        if graders:
            os.kill(int(dice.choice(graders)), signal.SIGSTOP)


def prompts_some_too_long(path: Path) -> Path:
    """300 prompts, and three that leave no room for a completion. Answers are random bits: a short warm start brings about groups
    that differ in reward."""
    bits = random.Random(0)
    sums = [f"{a}+{b}" for a in range(10, 40) for b in range(10, 20)]
    rows: list[dict[str, str]] = [{"prompt": f"{s}=", "answer": str(bits.randrange(2))} for s in sums]
    rows += [{"prompt": "+".join([str(i)] * 15), "answer": "0"} for i in range(10, 13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_with_faults(
    tmp: Path, victims: Counter[str], *, steps: int, steps_between: int, seconds: int
) -> None:
    """Four kinds of bad items all the way, and each of ``victims`` at a random moment, at least ``steps_between`` steps
    after the one before. Then everything is counted."""
    seed = int(os.environ.get("FAULT_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"FAULT_SEED={seed}")
    dice = random.Random(seed)
    order = list(victims.elements())
    dice.shuffle(order)
    faulty = set(range(7, steps, 15))
    spec = small_spec(
        task__jsonl__path=str(prompts_some_too_long(tmp / "data.jsonl")),
        task__verifier__timeoutSeconds=2,
        recipe__completionsPerPrompt=COMPLETIONS,
        recipe__offPolicy__pipeline__maxStalenessSteps=STALENESS,
        checkpoint__everySteps=4,
        budget__maxSteps=steps,
        budget__maxSeconds=seconds,
    )
    path = os.pathsep.join(filter(None, (str(BAD_ITEMS), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "FAULTY_STEPS": ",".join(map(str, sorted(faulty)))}
    begun = time.monotonic()
    with start_run(tmp, spec, environment=environment) as run:
        watch = Watch(run, JournalCopy(run.directory, tmp / "journal"))
        watch.until(lambda: run.step() >= 2, START_SECONDS, "two steps")
        for number, victim in enumerate(order):
            wanted = min(2 + number * steps_between, steps - 2)
            watch.until(
                lambda n=wanted: run.step() >= n, 300, f"step {wanted}, before the {victim} is killed"
            )
            watch.assert_rollouts_add_up()
            time.sleep(dice.uniform(0, 1))
            if victim == VERIFIER:
                hang_a_verifier(run, dice)
                continue
            kill_one(run, ROLES[victim], dice)
            watch.waiting.append((victim, time.monotonic(), run.step()))
            print(f"{time.monotonic() - begun:.0f} s, step {run.step()}: killed the {victim}", flush=True)
        watch.until(lambda: run.step() >= steps, 900, f"step {steps}")
        assert run.finish(120) == 0, run.tail()
        watch.journal.update()
    print(f"{time.monotonic() - begun:.0f} s in all. {watch.report()}")

    summary, written = run.summary(), run.metrics()
    counts = summary["counts"]
    print(counts)
    assert (summary["stop_reason"], summary["steps"]) == ("maxSteps", steps)
    assert summary["max_staleness_steps"] <= STALENESS
    assert_counts_add_up(summary, spec)
    assert [row["step"] for row in written] == list(range(steps))
    assert_nothing_left(run.directory)
    check_journal(watch.journal, counts, written, faulty, victims)


def check_journal(
    journal: JournalCopy,
    counts: dict[str, int],
    written: list[dict[str, Any]],
    faulty: set[int],
    victims: Counter[str],
) -> None:
    """The journal, metrics.jsonl and the summary count the same, and each bad item has cost what it should."""
    found = audit(journal, COMPLETIONS, is_clamped)
    print(
        f"fates: {dict(found.fates)}; issued at most {max(found.issues.values())} times: {found.issues.most_common(3)}"
    )
    every = len(written) * small_spec()["spec"]["recipe"]["promptsPerStep"] * COMPLETIONS
    assert sum(found.fates.values()) == every
    assert found.open == []
    for fate in ("trained", "filtered", "skipped", "given_up"):
        assert found.fates[fate] == counts[fate], fate
    assert (found.too_long, found.ungraded, found.masked_tokens) == tuple(
        counts[name] for name in ("too_long", "ungraded", "masked_tokens")
    )
    by_row = Counter[str]()
    for row in written:
        filtered = COMPLETIONS * (row["filtered_groups"] - row["given_up_groups"])
        by_row["filtered"] += filtered
        by_row["given_up"] += COMPLETIONS * row["given_up_groups"]
        by_row["skipped" if row["skipped"] else "trained"] += row["rollouts"] - filtered
    assert +by_row == +found.fates

    # A prompt without room is given up, and nothing else is.
    assert counts["too_long"] == counts["given_up"] > 0
    # A token without a log-probability is masked, and costs nothing else.
    assert found.masked_tokens == sum(row["masked_tokens"] for row in written) == found.clamped > 0
    # A verifier that hangs leaves one completion without a verdict.
    assert sum(row["grading_errors"] for row in written) == counts["ungraded"]
    # A loss that is not a number costs its step, once.
    assert found.skipped_steps == [row["step"] for row in written if row["skipped"]]
    assert found.skipped_steps
    assert set(found.skipped_steps) <= faulty

    # Nothing is issued for ever: a place that comes back is given up after so many failures, or its holder was killed.
    killed = sum(victims[role] for role in ("actor", "server", "coordinator"))
    assert max(found.returned.values(), default=0) <= MAX_FAILURES
    assert max(found.expired.values(), default=0) <= killed
    for place, times in found.issues.items():
        assert times <= 1 + found.returned[place] + found.expired[place], place
    assert counts["invalid"] == counts["timed_out_leases"] == 0


def test_run_survives_kill_9_of_every_role(tmp_path: Path) -> None:
    """Each role once, in random order, at random moments (some fall inside a publish: updates take most of a step)."""
    run_with_faults(tmp_path, Counter([*ROLES, VERIFIER]), steps=50, steps_between=5, seconds=1500)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_run_survives_fifty_kills_with_bad_items(tmp_path: Path) -> None:
    """The run ends at its budget, and every slot and every lease is accounted for."""
    victims = Counter(FIFTY_KILLS | {VERIFIER: 10})
    run_with_faults(tmp_path, victims, steps=90, steps_between=1, seconds=3300)


@pytest.mark.full
def test_resume_after_kill_9_of_everything_trains_the_same_prompts(tmp_path: Path) -> None:
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
def test_kill_9_of_the_command_leaves_no_process(tmp_path: Path) -> None:
    with start_run(tmp_path, small_spec()) as run:
        engines: list[int] = []

        def engine_is_there() -> bool:
            engines[:] = [pid for server in run.find("vllm_server") for pid in engine_of(server)]
            return bool(engines)

        run.until(engine_is_there, 120, "vLLM's engine, a grandchild")
        assert set(engines) <= {p.pid for p in processes_of(run.directory)}  # nothing below is blind to it
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(timeout=120)
        assert_nothing_left(run.directory)
        wait_until(lambda: not any(is_running(pid) for pid in engines))


def test_second_ctrl_c_ends_everything_now(tmp_path: Path) -> None:
    with start_run(tmp_path, small_spec(budget__maxSteps=10000)) as run:
        run.until(lambda: run.find("vllm_server"), START_SECONDS, "a vLLM process")
        run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            run.process.send_signal(signal.SIGINT)
        # On a loaded machine the second one may come when the process has ended all and is exiting: a shell shows 130 too.
        assert run.finish(40) in (130, -signal.SIGINT)
        assert_nothing_left(run.directory)
