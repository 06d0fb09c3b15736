"""One undisturbed run, as `make run` but shorter, and the same run interrupted, killed and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scalerl_api.curve import curve_figures
from scalerl_generator.vllm_client import VllmClient

SUMMARY_KEYS = {
    "steps",
    "first_reward",
    "last_reward",
    "wall_seconds",
    "device_hours",
    "tokens_generated",
    "tokens_trained",
    "generator_busy_fraction",
    "trainer_busy_fraction",
    "max_staleness_steps",
    "sampled_kl",
    "probe_kl",
    "ratio_kl",
    "mismatch_by_position",
    "stop_reason",
}
STEPS = 20
# Unfiltered: of an untrained policy's few fresh groups all may score alike, and then no fresh token is measured.
RUN = small_spec(
    warmStart__steps=40,
    trainer__replicas=1,  # two ranks: test_local_faults.py, test_local_lora.py
    recipe__offPolicy__pipeline__maxStalenessSteps=3,
    recipe__zeroVarianceFilter=False,
    budget__maxSteps=STEPS,
    trackers__tensorBoard={},
)

pytestmark = pytest.mark.timeout(1800)


def path_without_compilers(tmp: Path) -> str:
    """A PATH with what a bare Linux has, and no compiler, linker or ninja."""
    folder = tmp / "bin"
    folder.mkdir()
    for tool in (
        "sh",
        "bash",
        "env",
        "uname",
        "cat",
        "ls",
        "git",
        "make",
        "lscpu",
        "which",
        "ldconfig",
        "id",
        "stat",
    ):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return str(folder)


dice = random.Random(5)
ASKED = [[dice.randrange(3, 13) for _ in range(4 + n)] for n in range(16)]
"""Token ids; the answers to each are its log-probabilities after the first, and the greedy continuation."""


def ask_generator(run: LocalRun) -> list[dict[str, Any]]:
    """What the run's generator answers once it holds the last version: graders that stand still hold up the evaluation
    after which it would be gone."""
    server = run.server()
    port = re.search(r"--port (\d+)", server.command)
    environ = Path(f"/proc/{server.pid}/environ").read_text()
    token_file = re.search(r"\bSCALERL_TOKEN_FILE=([^\0]+)", environ)
    assert port is not None
    assert token_file is not None
    token = Path(token_file[1]).read_text().strip()
    graders = [p.pid for p in run.find("scalerl_tasks.grading.fork_server")]
    graders += [int(c) for g in graders for c in Path(f"/proc/{g}/task/{g}/children").read_text().split()]
    assert len(graders) > 1

    async def ask() -> list[dict[str, Any]]:
        async with VllmClient(f"http://127.0.0.1:{port[1]}", token) as client:

            async def version() -> str:
                info = await client.call("GET", "/weight_info", None, 10)
                return str(json.loads(info)["weight_version"])

            while await version() != str(STEPS):
                assert run.process.poll() is None, run.tail()
                await asyncio.sleep(0.02)
            answers = []
            for ids in ASKED:
                (greedy,) = await client.generate(ids, n=1, max_tokens=6, temperature=0.0)
                logprobs = (await client.prompt_logprobs(ids)).tolist()
                answers.append({"logprobs": logprobs, "greedy": greedy.token_ids.tolist()})
            return answers

    while run.step() < STEPS:
        assert run.process.poll() is None, run.tail()
        time.sleep(0.01)
    for pid in graders:
        os.kill(pid, signal.SIGSTOP)
    try:
        return asyncio.run(ask())
    finally:
        for pid in graders:
            os.kill(pid, signal.SIGCONT)


def assert_events_are_metrics(run: LocalRun) -> None:
    """What TensorBoard shows is what the run's metrics.jsonl and curve.csv hold, in the precision of its events."""
    read = EventAccumulator(str(run.directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = [(event.step, tag, event.value) for tag in read.Tags()["scalars"] for event in read.Scalars(tag)]
    held = [(r["step"], name, float(np.float32(value))) for r in run.metrics() for name, value in r.items()]
    for row in curve_figures((run.directory / "curve.csv").read_text()):
        held += [(row["version"], f"held_out/{n}", float(np.float32(value))) for n, value in row.items()]
        over_compute = round(row["device_seconds"]), "held_out/reward_over_device_seconds"
        held.append((*over_compute, float(np.float32(row["reward"]))))
    assert sorted(shown) == sorted(held)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Its generator's last answers are in ``answers.json`` beside its directory."""
    tmp = tmp_path_factory.mktemp("undisturbed")
    environment = {"PATH": path_without_compilers(tmp), "CC": "", "CXX": ""}
    with start_run(tmp, RUN, environment=environment) as run:
        run.until(lambda: run.step() >= STEPS - 1, 700, "the last step but one")
        answers = ask_generator(run)
        code = run.finish(300)
        assert code == 0, run.tail()
    assert_nothing_left(run.directory)
    (tmp / "answers.json").write_text(json.dumps(answers))
    return run


def test_run_reaches_its_budget_without_a_compiler(finished: LocalRun) -> None:
    summary = finished.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 20
    assert summary["stop_reason"] == "maxSteps"
    assert summary["tokens_trained"] > 0
    assert_counts_add_up(summary, RUN)


def test_run_bounds_staleness_and_mismatch(finished: LocalRun) -> None:
    summary = finished.summary()
    assert 0 <= summary["max_staleness_steps"] <= 3
    for source in ("sampled", "probe"):
        assert 0 <= summary[f"{source}_kl"] < 0.01
        assert summary["mismatch_by_position"][source].keys() == {"0_256"}


def test_run_writes_its_results(finished: LocalRun) -> None:
    for name in ("curve.png", "curve.csv", "metrics.jsonl", "summary.json", "run.yaml"):
        assert (finished.directory / name).stat().st_size > 0, name
    assert [row["version"] for row in finished.curve()] == ["0", "10", "20"]
    assert [row["step"] for row in finished.metrics()] == list(range(20))
    assert [p.name for p in sorted((finished.directory / "checkpoints").glob("[!.]*"))] == [
        "hf",
        "step-00000015",
        "step-00000020",
    ]
    assert (finished.directory / "checkpoints/hf/step-00000020/model.safetensors").stat().st_size > 0
    assert_events_are_metrics(finished)
    names = {p.name for p in (finished.directory / "logs").iterdir()}
    assert any(n.startswith("coordinator") for n in names)


def test_export_of_the_last_checkpoint_equals_the_runs_export(finished: LocalRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scalerl_cli.main", "export", str(finished.directory)]
    subprocess.run([*command, "--to", str(tmp_path / "out")], check=True, timeout=400, env=os.environ)
    made = finished.directory / f"checkpoints/hf/step-{STEPS:08d}"
    assert {p.name for p in made.iterdir()} == {p.name for p in (tmp_path / "out").iterdir()}
    for file in made.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_plain_vllm_with_the_export_answers_as_the_generator(finished: LocalRun, tmp_path: Path) -> None:
    """``vllm serve`` of it, too: the same engine behind another front."""
    (tmp_path / "asked.json").write_text(json.dumps(ASKED))
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("plain_vllm.py"))),
            *(str(finished.directory / f"checkpoints/hf/step-{STEPS:08d}"), str(tmp_path / "asked.json")),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    expected = json.loads((finished.directory.parent / "answers.json").read_text())
    found = json.loads(done.stdout.splitlines()[-1])
    assert [f["greedy"] for f in found] == [e["greedy"] for e in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], rtol=0, atol=1e-5)


def test_plot_redraws_the_curve(finished: LocalRun) -> None:
    picture = finished.directory / "curve.png"
    picture.unlink()
    command = [sys.executable, "-m", "scalerl_cli.main", "plot", str(finished.directory)]
    subprocess.run(command, check=True, timeout=400, env=os.environ)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_run_refuses_a_used_directory(finished: LocalRun) -> None:
    with start_run(finished.directory.parent, RUN) as again:
        assert again.finish(300) == 2
    assert "--resume" in again.output.read_text()


def test_run_trains_the_same_prompts_after_interrupt_kill_and_resume(
    finished: LocalRun, tmp_path: Path
) -> None:
    with start_run(tmp_path, RUN) as first:
        first.until(lambda: first.step() >= 3, START_SECONDS, "three steps")
        first.process.send_signal(signal.SIGINT)
        assert first.finish(300) == 130, first.tail()
    interrupted = first.summary()
    assert interrupted["stop_reason"] == "interrupted"
    assert 3 <= interrupted["steps"] < 20
    assert_counts_add_up(interrupted, RUN, complete=False)
    assert (first.directory / f"checkpoints/step-{interrupted['steps']:08d}").is_dir()
    assert_nothing_left(first.directory)

    with start_run(tmp_path, RUN, "--resume") as second:
        engines: list[int] = []

        def engine_is_there() -> bool:
            engines[:] = [pid for server in second.find("vllm_server") for pid in engine_of(server)]
            return bool(engines)

        # A step more than its checkpoint has, which is trained again.
        second.until(lambda: second.step() > interrupted["steps"], START_SECONDS, "a step more")
        second.until(engine_is_there, 120, "vLLM's engine, a grandchild")
        assert set(engines) <= {p.pid for p in processes_of(second.directory)}  # nothing below is blind to it
        second.process.kill()
        second.process.wait(timeout=120)
        assert_nothing_left(second.directory)
        wait_until(lambda: not any(is_running(pid) for pid in engines))

    with start_run(tmp_path, RUN, "--resume") as third:
        assert third.finish(700) == 0, third.tail()
    assert "resumed after: interrupted" in second.output.read_text()
    summary = third.summary()
    assert (summary["stop_reason"], summary["steps"]) == ("maxSteps", 20)
    assert_counts_add_up(summary, RUN)
    # Each step once: what was trained before is neither lost nor trained again.
    assert [row["step"] for row in third.metrics()] == list(range(20))
    assert [row["prompts_crc32"] for row in third.metrics()] == [
        row["prompts_crc32"] for row in finished.metrics()
    ]
    assert [row["version"] for row in third.curve()] == ["0", "10", "20"]
    assert_events_are_metrics(third)
    assert_nothing_left(third.directory)


def test_completed_run_goes_on_with_a_raised_budget(finished: LocalRun, tmp_path: Path) -> None:
    """From its last checkpoint, on the prompts of the steps that follow; each step is trained once."""
    ignored = shutil.ignore_patterns("lock", "token")
    shutil.copytree(finished.directory, tmp_path / "run", ignore=ignored)
    more = STEPS + 4
    raised = {**RUN, "spec": {**RUN["spec"], "budget": {**RUN["spec"]["budget"], "maxSteps": more}}}
    with start_run(tmp_path, raised, "--resume") as again:
        assert again.finish(700) == 0, again.tail()
    summary = again.summary()
    assert (summary["stop_reason"], summary["steps"]) == ("maxSteps", more)
    assert_counts_add_up(summary, raised)
    rows = again.metrics()
    assert [row["step"] for row in rows] == list(range(more))
    assert [row["prompts_crc32"] for row in rows[:STEPS]] == [
        row["prompts_crc32"] for row in finished.metrics()
    ]


def test_fork_continues_a_checkpoint_of_another_run(finished: LocalRun, tmp_path: Path) -> None:
    """On the prompts of the steps that follow, with the source's curve, and its own time and device-hours."""
    step, rate = 15, "2e-4"
    source, directory = finished.directory, tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    command = [
        sys.executable,
        "-m",
        "scalerl_cli.main",
        "fork",
        str(source),
        "--step",
        str(step),
        "--name",
        "other",
    ]
    command += ["--out", str(directory), "--set", f"recipe.optimizer.learningRate={rate}"]
    made = subprocess.run(command, check=True, timeout=120, env=os.environ, capture_output=True, text=True)
    assert f"scalerl run {directory / 'run.yaml'} --resume --dir {directory}" in made.stdout
    spec = yaml.safe_load((directory / "run.yaml").read_text())
    assert spec["spec"]["from"] == {"run": RUN["metadata"]["name"], "step": step}
    with start_run(tmp_path, spec, "--resume") as fork:
        assert fork.finish(700) == 0, fork.tail()
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    summary, rows, original = fork.summary(), fork.metrics(), finished.metrics()
    assert (summary["run"], summary["stop_reason"], summary["steps"]) == ("other", "maxSteps", STEPS)
    assert (summary["forked_from"], summary["forked_step"]) == (RUN["metadata"]["name"], step)
    assert_counts_add_up(summary, spec)
    assert rows[:step] == original[:step]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["prompts_crc32"] for row in rows] == [row["prompts_crc32"] for row in original]
    assert (
        {row["learning_rate"] for row in rows[step:]}
        == {float(rate)}
        != {row["learning_rate"] for row in original}
    )
    assert fork.curve()[:2] == finished.curve()[:2]
    assert [row["version"] for row in fork.curve()] == ["0", "10", "20"]
    # The curve counts on from the source's; the run's own use begins with the fork.
    totals = [row["device_seconds"] for row in rows]
    assert totals == sorted(totals)
    assert 0 < summary["device_hours"] * 3600 < totals[-1]
    assert summary["wall_seconds"] < rows[-1]["wall_seconds"]
    assert_events_are_metrics(fork)
    assert_nothing_left(fork.directory)
