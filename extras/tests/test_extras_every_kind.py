"""The example package, installed: one of each kind of plugin, used where a run uses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typing_extensions import get_protocol_members

from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_api.plugins import problems
from scalerl_api.recipe import RecipeSpec
from scalerl_api.registry import Kind, PluginError, entry_point, installed, make
from scalerl_api.schedule import ScheduleSpec
from scalerl_api.source import EvaluationTaskSpec
from scalerl_api.spec import RunSpec
from scalerl_coordinator.scheduling import Generator, OpenSlot, SchedulerInput, SchedulingPolicy
from scalerl_coordinator.tracking.sink import Sink
from scalerl_coordinator.tracking.tracker_process import follow, open_sink
from scalerl_coordinator.training_leases import policy_of
from scalerl_generator.server.server_options import ServerProblem, parse, vllm_arguments
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.runtime import Runtime
from scalerl_lifecycle.workloads import Role, expand
from scalerl_tasks import Prompt, open_grading_pool, open_source, task_problems
from scalerl_tasks.open_graders import grading_digest, open_episodes
from scalerl_trainer.algo.losses import TokenBatch, is_token_local
from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.checks import PrepareError, check_plugins

ROOT = Path(__file__).parents[2]
NAMES = {
    Kind.SOURCE: "countdown",
    Kind.VERIFIER: "countdown",
    Kind.ENVIRONMENT: "guess",
    Kind.LOSS: "windowed",
    Kind.DRAFTER: "repeats",
    Kind.SCHEDULE: "newest-first",
    Kind.TRACKER: "json-lines",
    Kind.RUNTIME: "rehearsal",
    Kind.COMMAND: "countdown",
}
SPEC: dict[str, Any] = {
    "model": {"scratch": {}, "dtype": "float32", "contextTokens": 16384},
    "task": {
        "plugin": {"name": "countdown", "parameters": {"size": 300}},
        "verifier": {"name": "countdown"},
        "heldOut": {"size": 20},
    },
    "recipe": {
        "loss": {"plugin": {"name": "windowed", "parameters": {"gap": "0.5"}}},
        "maxCompletionTokens": 32,
    },
    "generator": {"speculation": {"history": {"drafter": {"name": "repeats"}}}},
    "schedule": {"plugin": {"name": "newest-first"}},
    "trackers": {"plugin": {"name": "json-lines", "parameters": {"file": "own.jsonl"}}},
    "budget": {"maxSteps": 2},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the example package to."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(ROOT / "examples" / "plugin", tmp_path_factory.mktemp("source") / "plugin")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", folder, source], check=True, timeout=390, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def on_the_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(SPEC | changes)


def test_example_package_has_one_of_each_kind() -> None:
    assert set(NAMES) == set(Kind)
    assert all(name in installed(kind) for kind, name in NAMES.items())
    assert problems(spec(), load=True) == []


async def test_source_and_verifier_of_the_example() -> None:
    task = spec().task
    source = open_source(task)
    async with open_grading_pool(task) as grader:
        (right, wrong) = await grader.score_group(source[3], [source[3].answer, "1"])
    assert (len(source), right.score, wrong.score) == (300, 1.0, 0.0)


async def test_environment_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "below 9?", "answer": "5"}\n')
    section = {
        "jsonl": {"path": "data.jsonl"},
        "environment": {"name": "guess", "parameters": {"hint": False}},
    }
    task = EvaluationTaskSpec.model_validate(section)
    async with open_grading_pool(task, directory=tmp_path) as pool:
        episodes = open_episodes(task, pool)
        assert episodes is not None
        found = await episodes.steps(Prompt("p", "below 9?", "5"), [["4"], ["4", "x"], ["4", "x", "5"]])
    assert [[message.content for message in one.messages] for one in found] == [
        ["no"],
        ["That is no number."],
        [],
    ]
    assert [one.score for one in found] == [0.0, 0.0, 1.0]
    assert grading_digest(task, tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"name": "gess"},
            "did you mean 'guess'? (built in: retry, tools, nim, server; installed: guess, textarena)",
        ),
        ({"parameters": {"hnit": True}}, "unexpected keyword argument 'hnit'"),
    ],
)
def test_wrong_environment_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "5"}}\n' for n in range(9)))
    environment = {"name": "guess"} | changes
    task = {"jsonl": {"path": "data.jsonl"}, "heldOut": {"size": 3}, "environment": environment}
    (problem,) = task_problems(spec(task=task), tmp_path)
    assert problem.field.startswith("task.environment.")
    assert says in problem.text
    assert bool(problems(spec(task=task))) == ("name" in changes)


def test_loss_of_the_example() -> None:
    loss = make_loss(spec().recipe)
    assert is_token_local(loss)
    logprobs_n = torch.tensor([-1.0, -1.0], requires_grad=True)
    one_n = torch.ones(2)
    tokens = TokenBatch(logprobs_n, torch.tensor([-1.2, -1.9]), 3 * one_n, one_n, torch.zeros(2).long())
    out = loss(tokens)
    out.loss.backward()
    assert logprobs_n.grad is not None
    assert (logprobs_n.grad.tolist(), out.sums["windowed_out"].item()) == ([-3.0, 0.0], 1.0)


def test_loss_of_a_plugin_replaces_that_of_the_preset() -> None:
    recipe = RecipeSpec.model_validate({"preset": "dapo", "loss": {"plugin": {"name": "windowed"}}})
    assert (recipe.loss.name, recipe.loss.ppo_clip) == ("plugin", None)


def test_schedule_of_the_example() -> None:
    policy = policy_of(spec().schedule)
    slots = [OpenSlot(slot, 0) for slot in range(4)]
    assigned = policy.assign(SchedulerInput(slots, [Generator("a", 2), Generator("b", 1)]))
    assert {name: [one.slot for one in given] for name, given in assigned.items()} == {"a": [3, 2], "b": [1]}
    assert policy_of(ScheduleSpec()).assign(SchedulerInput([], [])) == {}


def test_tracker_of_the_example(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.metrics.write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.0}\n')
    run = SimpleNamespace(spec=spec())
    follow(paths, open_sink("plugin", run, paths), lambda step: None, lambda seconds: True)  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 1.5), (1, 1.0)]


def test_drafter_of_the_example_counts_what_it_drafts() -> None:
    drafter = make(Kind.DRAFTER, "repeats", {}, 2, 1000, 4)
    slot = drafter.begin(0, np.array([1, 2, 3, 9], np.int32))
    text = np.zeros((1, 16), np.int32)

    def propose(tokens: list[int]) -> tuple[list[int], int, int]:
        text[0, : len(tokens)] = tokens
        one = np.array([0], np.int32)
        draft_sd, drafted_s, accepted, verified = drafter.propose(
            one + slot, one, text, one + len(tokens), one + 4, 0.5
        )
        return draft_sd[slot, : drafted_s[slot]].tolist(), accepted, verified

    assert propose([1, 2, 3, 9, 1, 2]) == ([3, 9, 1, 2], 0, 0)
    assert propose([1, 2, 3, 9, 1, 2, 3, 9, 7]) == ([], 2, 4)
    assert drafter.take_tally(slot).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_drafter_reaches_the_server() -> None:
    """From the spec through the plan's command to vLLM's own configuration."""
    run = load_run(ROOT / "examples" / "tiny" / "run.yaml")
    run = run.model_copy(update={"spec": run.spec.model_copy(update={"generator": spec().generator})})
    (generator,) = (one for one in plan(run).workloads if one.role is Role.GENERATOR)
    argv = next(c.argv for c in generator.containers if "--drafter" in c.argv)
    options = parse(
        ["--model", "m", "--port", "1", *(expand(a, {}) for a in argv[argv.index("--max-draft-tokens") :])]
    )
    given = vllm_arguments(options, True)
    config = json.loads(given[given.index("--additional-config") + 1])
    assert config["scalerl_drafter"] == {"name": "repeats", "parameters": {}}
    with pytest.raises(ServerProblem, match="did you mean 'repeats'"):
        parse(["--model", "m", "--port", "1", "--drafter", '{"name": "repeat", "parameters": {}}'])


def scalerl(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scalerl_cli.main", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=390, cwd=folder, env=dict(os.environ)
    )


def write_run(folder: Path, **changes: Any) -> Path:
    file = folder / "run.yaml"
    manifest = {"apiVersion": "scalerl.dev/v1alpha1", "kind": "ScaleRLRun", "metadata": {"name": "own"}}
    file.write_text(yaml.safe_dump(manifest | {"spec": SPEC | changes}))
    return file


def test_runtime_of_the_example_goes_through_the_phases(tmp_path: Path) -> None:
    done = scalerl("run", write_run(tmp_path), "--runtime", "rehearsal", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    roles = [line.partition(":")[0] for line in done.stdout.splitlines() if ": python" in line]
    assert roles == ["prepare", "coordinator", "generator", "trainer"]
    assert done.stdout.splitlines()[-1].startswith("Completed")


def test_command_of_the_example(tmp_path: Path) -> None:
    done = scalerl("countdown", 2, folder=tmp_path)
    assert (done.returncode, done.stdout.count("Problem ")) == (0, 2), done.stderr


def test_command_that_is_broken_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[scalerl.commands]\nbad = no_package_at_all:add\nends = sys:exit\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = scalerl("simulate", "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "the command bad (no_package_at_all:add): ModuleNotFoundError" in done.stderr
    assert "the command ends (sys:exit): SystemExit" in done.stderr


def test_names_that_are_wrong_have_one_message_with_what_is_installed(tmp_path: Path) -> None:
    changes = {"schedule": {"plugin": {"name": "newest"}}, "trackers": {"plugin": {"name": "json"}}}
    done = scalerl("validate", "--any-machine", write_run(tmp_path, **changes), folder=tmp_path)
    assert done.returncode == 2
    for field, kind in (("schedule.plugin", "schedules"), ("trackers.plugin", "trackers")):
        (line,) = (one for one in done.stderr.splitlines() if f"spec.{field}: " in one)
        assert f"no installed package has it in the entry points scalerl.{kind}" in line
        assert "(installed: " in line
    refused = scalerl("run", write_run(tmp_path), "--runtime", "slurm", folder=tmp_path)
    assert (refused.returncode, "(installed: rehearsal)" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipe": {"loss": {"plugin": {"name": "windowed", "parameters": {"gapp": 1}}}}}, "it takes gap"),
        (
            {"recipe": {"loss": {"plugin": {"name": "windowed", "parameters": {"gap": "x"}}}}},
            "could not convert",
        ),
        ({"recipe": {"loss": {"plugin": {"name": "window"}}}}, "did you mean 'windowed'"),
        ({"trackers": {"plugin": {"name": "json-lines", "parameters": {"path": "a"}}}}, "it takes file"),
    ],
)
def test_preparation_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PrepareError, match=says):
        check_plugins(spec(**changes), one_machine=True)
    assert says in str(problems(spec(**changes), load=True))


def test_preparation_on_a_cluster_checks_what_its_image_needs() -> None:
    check_plugins(spec(trackers={"plugin": {"name": "only-beside-the-coordinator"}}), one_machine=False)
    with pytest.raises(PrepareError, match=r"spec\.recipe\.loss\.plugin: "):
        check_plugins(spec(recipe={"loss": {"plugin": {"name": "none"}}}), one_machine=False)


def test_floats_and_other_objects_are_no_parameters() -> None:
    for value, says in ((0.5, "floats are not allowed"), ([{"a": 0.5}], "floats are not allowed")):
        with pytest.raises(ValueError, match=says):
            spec(schedule={"plugin": {"name": "newest-first", "parameters": {"a": value}}})
    with pytest.raises(PluginError, match="no installed package"):
        entry_point(Kind.LOSS, "countdown")


@pytest.mark.parametrize(
    ("kind", "interface"), [("schedule", SchedulingPolicy), ("tracker", Sink), ("runtime", Runtime)]
)
def test_page_names_the_attributes_of_the_interface(kind: str, interface: Any) -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {kind} |"))
    assert set(re.findall(r"`(\w+)", row.split("|")[4].split("): ")[1])) == get_protocol_members(interface)
