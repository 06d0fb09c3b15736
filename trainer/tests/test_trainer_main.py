"""Whole runs, and faults: two real ranks, a real coordinator, fake generators that receive real weights."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import yaml
from free_port import free_port
from safetensors.torch import load_file

from scalerl_api import endpoints, wire
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoint import MANIFEST, STAGE, Manifest
from scalerl_trainer.errors import ModelError
from scalerl_trainer.prepare import prepare
from scalerl_trainer.reference import load_reference
from scalerl_trainer.saved_state import SavedState

TOKEN = "secret"
http = httpx.Client(trust_env=False, timeout=5, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all: ``httpx.get`` reads all certificates of this machine each time, 24 ms of a processor twenty times a second."""
pytestmark = pytest.mark.slow


def until(true: Callable[[], Any], seconds: float = 120.0, what: str = "it") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class Run:
    """A run directory and the processes of its roles."""

    def __init__(self, processes: Any, root: Path, **changes: Any) -> None:
        self._processes = processes
        self.paths = RunPaths(root)
        root.mkdir()
        (root / "task.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": f"{2 * i}"}) + "\n" for i in range(60))
        )
        spec: dict[str, Any] = {
            "model": {
                "scratch": {"layers": 2, "hiddenSize": 32, "attentionHeads": 2, "intermediateSize": 48},
                "dtype": "float32",
                "contextTokens": 32,
            },
            "task": {
                "jsonl": {"path": str(root / "task.jsonl")},
                "verifier": {"name": "exact"},
                "heldOut": {"size": 2},
            },
            "recipe": {
                "promptsPerStep": 4,
                "completionsPerPrompt": 3,
                "maxCompletionTokens": 8,
                "offPolicy": {"pipeline": {"maxStalenessSteps": 2}},
                "optimizer": {"learningRate": "1e-3", "warmupSteps": 0},
            },
            "trainer": {"replicas": 2, "zeroStage": 1, "cpuThreads": 1},
            "weightSync": {"bucket": "16Ki", "timeoutSeconds": 8, "probeSequences": 2},
            "evaluation": {"everySteps": 100, "samplesPerPrompt": 1, "holdSeconds": 5},
            "checkpoint": {"everySteps": 2, "keep": 2},
            "budget": {"maxSteps": 6},
        }
        for path, value in changes.items():
            section, _, name = path.partition("__")
            if name:
                spec.setdefault(section, {})[name] = value
            else:
                spec[section] = value(spec[section])
        manifest = {
            "apiVersion": "scalerl.dev/v1alpha1",
            "kind": "ScaleRLRun",
            "metadata": {"name": "t"},
            "spec": spec,
        }
        self.paths.run_file.write_text(yaml.safe_dump(manifest))
        self.paths.token.write_text(TOKEN)
        self.paths.logs.mkdir()
        self.spec = parse_run(self.paths.run_file.read_text(), "run.yaml").spec
        prepare(self.paths, self.spec, one_machine=True)
        self.port = free_port()
        self.coordinator: Any = None
        self.ranks: list[Any] = []
        self.generators: list[Any] = []
        self.largest_file: dict[int, int] = {}

    def _role(
        self,
        module: str,
        name: str,
        listen: int,
        largest_file: int | None = None,
        command: tuple[str, ...] = (),
        **environ: str,
    ) -> Any:
        return self._processes.run(
            "role_process.py",
            ROLE={
                "module": module,
                "argv": [*command, "--listen", f"127.0.0.1:{listen}"],
                "log": str(self.paths.logs / f"{name}.log"),
                "largest_file": largest_file,
                "environ": {
                    "SCALERL_DIR": str(self.paths.root),
                    "SCALERL_NAME": name,
                    "SCALERL_COORDINATOR_URL": f"http://127.0.0.1:{self.port}",
                    "SCALERL_TOKEN_FILE": str(self.paths.token),
                    **environ,
                },
            },
        )

    def start_coordinator(self) -> None:
        self.coordinator = self._role("scalerl_coordinator.main", "coordinator-0", self.port)

    def start_trainer(self, only: set[int] | None = None) -> None:
        """``only``: the other ranks are not started."""
        world = self.spec.trainer.replicas
        master = free_port()
        self.listens = [free_port() for _ in range(world)]
        self.ranks = [
            self._role(
                "scalerl_trainer.main",
                f"trainer-{rank}",
                self.listens[rank],
                largest_file=self.largest_file.get(rank),
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(master),
            )
            for rank in (range(world) if only is None else sorted(only))
        ]

    def start_pod(self) -> None:
        """All ranks as one pod's."""
        world = str(self.spec.trainer.replicas)
        self.listens = [free_port()]
        pod = self._role(
            "scalerl_trainer.launch",
            "trainer-pod",
            self.listens[0],
            command=(sys.executable, "-m", "scalerl_trainer.main"),
            NODE_RANK="0",
            LOCAL_WORLD_SIZE=world,
            WORLD_SIZE=world,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
        self.ranks = [pod]

    def start_generator(
        self,
        *faults: dict[str, Any],
        seconds_per_group: float = 0.0,
        logprob: float | None = None,
        bad_slots: tuple[int, ...] = (),
        skip_held_out: bool = False,
    ) -> Path:
        name = f"generator-{len(self.generators)}"
        directory = self.paths.root / name
        directory.mkdir()
        vocabulary = json.loads((self.paths.base_model / "config.json").read_text())["vocab_size"]
        self.generators.append(
            self._processes.run(
                "generator_process.py",
                GENERATOR={
                    "actor": {"directory": directory, "token": TOKEN, "faults": list(faults)},
                    "name": name,
                    "coordinator": f"http://127.0.0.1:{self.port}",
                    "run_file": str(self.paths.run_file),
                    "vocabulary": vocabulary,
                    "seconds_per_group": seconds_per_group,
                    "logprob": logprob,
                    "bad_slots": bad_slots,
                    "skip_held_out": skip_held_out,
                },
            )
        )
        return directory

    def start(self, **generator: Any) -> Path:
        self.start_coordinator()
        directory = self.start_generator(**generator)
        self.start_trainer()
        return directory

    def reshape(self, replicas: int, zero_stage: int) -> None:
        """Change ``spec.trainer`` between two starts."""
        manifest = yaml.safe_load(self.paths.run_file.read_text())
        manifest["spec"]["trainer"] |= {"replicas": replicas, "zeroStage": zero_stage}
        self.paths.run_file.write_text(yaml.safe_dump(manifest))
        self.spec = parse_run(self.paths.run_file.read_text(), "run.yaml").spec

    def status(self) -> wire.Status | None:
        headers = {"authorization": f"Bearer {TOKEN}", wire.WIRE_HEADER: str(wire.WIRE_VERSION)}
        try:
            answer = http.get(f"http://127.0.0.1:{self.port}{endpoints.STATUS}", headers=headers)
        except httpx.HTTPError:
            return None
        return msgspec.msgpack.decode(answer.content, type=wire.Status) if answer.status_code == 200 else None

    def exported(self) -> int | None:
        """The last exported version by the status."""
        status = self.status()
        last = status.exports.last if status is not None and status.exports is not None else None
        return None if last is None else last.version

    def stop(self, reason: str) -> None:
        headers = {"authorization": f"Bearer {TOKEN}", wire.WIRE_HEADER: str(wire.WIRE_VERSION)}
        body = msgspec.msgpack.encode(wire.Stop(reason=reason))
        url = f"http://127.0.0.1:{self.port}{endpoints.STOP}"
        http.post(url, headers=headers, content=body).raise_for_status()

    def step(self) -> int:
        status = self.status()
        return status.step if status else -1

    def wait_trainer(self, seconds: float = 120.0) -> list[int]:
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.1, deadline - time.monotonic()))
            assert not rank.is_alive(), (
                f"a rank is still there after {seconds} s\n{self.log(sorted(self.paths.logs.glob('trainer-*.log'))[0].stem)[-4000:]}"
            )
        return [rank.exitcode for rank in self.ranks]

    def log(self, name: str) -> str:
        return (self.paths.logs / f"{name}.log").read_text()

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]

    def checkpoints(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in self.paths.checkpoints.glob("step-*"))


@pytest.fixture
def new_run(processes: Any, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def new(**changes: Any) -> Run:
        made.append(Run(processes, tmp_path / f"run{len(made)}", **changes))
        return made[-1]

    yield new
    for run in made:
        for log in sorted(run.paths.logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-5000:]}")


def model_state(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by their transformers names."""
    saved = SavedState(directory)
    return {name: saved.whole(name) for name in saved.header.parameters}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_whole_run(new_run: Any, zero_stage: int) -> None:
    run = new_run(trainer__zeroStage=zero_stage)
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.step, status.published_version) == (wire.Phase.FINISHED, 6, 6)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert run.checkpoints() == [4, 6]
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(6))
    for name in (
        "loss",
        "grad_norm",
        "entropy",
        "ratio_max",
        "reward_mean",
        "staleness_max",
        "shard_seconds",
    ):
        assert name in rows[-1], f"{name} is missing from {sorted(rows[-1])}"
    assert all(row["staleness_max"] <= 2 for row in rows)
    versions = sorted(int(p.stem[1:]) for p in directory.glob("v*.pt"))
    assert versions == list(range(7)), "every version was published"
    last = torch.load(directory / "v6.pt")
    trained = model_state(run.paths.checkpoint(6))
    assert all(torch.equal(last[name], trained[name]) for name in last)
    until(lambda: run.exported() == 6)  # the status is a tick behind the volume
    status = run.status()
    assert status is not None
    exports = status.exports
    assert exports is not None
    assert exports.last is not None
    assert (exports.failures, exports.problem) == (0, "")
    exported = load_file(run.paths.root / exports.last.path / "model.safetensors")
    assert exported.keys() == last.keys()
    assert all(torch.equal(last[name], exported[name]) for name in last)
    shapes = {name: tuple(tensor.shape) for name, tensor in last.items()}
    first = torch.load(directory / "v0.pt")
    assert shapes == {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert not torch.equal(last["model.embed_tokens.weight"], first["model.embed_tokens.weight"])


def test_ppo_off_policy_publishes_between_batches(new_run: Any) -> None:
    """Of six steps in batches of four: the first weights, those after four, and the last, which are evaluated."""
    run = new_run(recipe__offPolicy={"ppo": {"stepsPerBatch": 4}}, recipe__length={"overlong": {}})
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    assert sorted(int(p.stem[1:]) for p in directory.glob("v*.pt")) == [0, 4, 6]
    assert [row["staleness_max"] for row in run.rows()] == [0, 1, 2, 3, 0, 1]


def test_zero_stages_publish_the_same_weights(new_run: Any) -> None:
    """One update from the same data: ZeRO-3's gathered weights are ZeRO-1's."""
    taken = []
    for zero_stage in (1, 3):
        run = new_run(
            trainer__zeroStage=zero_stage,
            budget__maxSteps=1,
            recipe__offPolicy={"pipeline": {"maxStalenessSteps": 0}},
            weightSync__probeSequences=0,
        )
        directory = run.start()
        assert run.wait_trainer() == [0, 0]
        status = run.status()
        assert status is not None
        assert status.mismatch_kl("sampled") is not None
        assert status.mismatch_kl("probe") is None, "none was asked for"
        taken.append(torch.load(directory / "v1.pt"))
    assert taken[0].keys() == taken[1].keys()
    for name in taken[0]:
        torch.testing.assert_close(taken[0][name], taken[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("replicas", "zero_stage"), [(2, 1), (1, 3)])
def test_sigterm_writes_checkpoint_and_next_trainer_resumes(
    new_run: Any, replicas: int, zero_stage: int
) -> None:
    """Also where that has another number of ranks and another stage."""
    run = new_run(budget__maxSteps=9, checkpoint__everySteps=100)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    step = run.step()
    assert run.checkpoints() == [step], "of the very step it was stopped at"
    run.reshape(replicas, zero_stage)
    run.start_trainer()
    assert run.wait_trainer() == [0] * replicas
    assert f"registered: version {step}," in run.log("trainer-0")
    assert run.step() == 9


def test_ranks_of_one_pod_fail_and_checkpoint_together(new_run: Any) -> None:
    """A killed rank ends the pod with its exit code; the next pod resumes; SIGTERM to the pod writes a checkpoint."""
    run = new_run(budget__maxSteps=1000, checkpoint__everySteps=2)
    run.start_coordinator()
    run.start_generator(seconds_per_group=0.1)
    run.start_pod()
    until(lambda: run.step() >= 3 and answers(run.listens[0]), what="step 3")
    children = Path(f"/proc/{run.ranks[0].pid}/task/{run.ranks[0].pid}/children").read_text().split()
    ranks = {pid: environ_of(pid)["RANK"] for pid in children if "RANK" in environ_of(pid)}
    assert sorted(ranks.values()) == ["0", "1"]
    os.kill(int(next(pid for pid, rank in ranks.items() if rank == "1")), signal.SIGKILL)
    assert run.wait_trainer() == [128 + signal.SIGKILL]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert "rank 1 was killed by SIGKILL" in run.log("trainer-pod").splitlines()[-1]

    run.start_pod()
    at = run.step()
    until(lambda: run.step() >= at + 2, what="two more steps")
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0]
    assert run.checkpoints()[-1] == run.step(), "of the very step at which it was stopped"
    assert re.search(r"^\[rank 0\] .* INFO scalerl_trainer", run.log("trainer-pod"), re.MULTILINE)


def environ_of(pid: str) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.parametrize(
    ("come", "told"), [({0}, 0), ({1}, 0), ({0, 2}, 0), ({0, 2}, 1)], ids=["0", "1", "0 of 0,2", "2 of 0,2"]
)
def test_sigterm_ends_rendezvous(new_run: Any, come: set[int], told: int) -> None:
    """Rank 1, or 0 and 2, never join. One of the waiting ranks gets SIGTERM; the others exit with it."""
    run = new_run(trainer__replicas=3)
    run.start_trainer(come)
    for rank in come:
        until(lambda listen=run.listens[rank]: answers(listen), what=f"rank {rank}")
    time.sleep(1.0)
    os.kill(run.ranks[told].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0] * len(come)


def test_sigterm_without_coordinator_keeps_last_checkpoint(new_run: Any) -> None:
    """A checkpoint needs the coordinator's state; the steps since the last one are repeated."""
    run = new_run(budget__maxSteps=6)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3 and run.checkpoints(), what="a checkpoint")
    run.coordinator.kill()
    run.coordinator.join()
    saved = run.checkpoints()
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    run.wait_trainer()  # long before the time for which a coordinator is waited for
    assert set(saved) <= set(run.checkpoints())
    newest = run.checkpoints()[-1]
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {newest}," in run.log("trainer-0")
    assert [row["step"] for row in run.rows()] == list(range(6))


def supervised(run: Run) -> list[dict[str, Any]]:
    """Rows of ``mid-training.jsonl``, without its evaluations."""
    file = run.paths.supervised_metrics
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def mix_of(task: dict[str, Any]) -> dict[str, Any]:
    """Of the same problems twice, with another prompt and other held-out ones."""
    other = {"prompt": {"template": "{prompt} "}, "heldOut": {"size": 2, "seed": 1}}
    return {"mix": [task | {"name": "a", "weight": "0.7"}, task | other | {"name": "b", "weight": "0.3"}]}


@pytest.mark.parametrize(("stage", "task"), [(0, dict), (1, dict), (3, dict), (1, mix_of)])
def test_killed_mid_training_resumes_as_if_undisturbed(
    new_run: Any, stage: int, task: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Weights bit for bit, and tokens: nothing is repeated, skipped or counted twice."""
    settings = {
        "task": task,
        "trainer__zeroStage": stage,
        "checkpoint__everySteps": 4,
        "warmStart__steps": 120,
        "warmStart__batchSize": 6,
        "warmStart__learningRate": "1e-2",
    }
    undisturbed, killed = new_run(**settings), new_run(**settings)
    for run in (undisturbed, killed):
        run.start_coordinator()
        run.start_trainer()
        if run is killed:
            at = random.randint(5, 100)
            until(lambda: len(supervised(killed)) >= at, what=f"supervised step {at}")  # noqa: B023
            os.kill(killed.ranks[at % 2].pid, signal.SIGKILL)
            killed.wait_trainer()
            assert killed.checkpoints() == []
            killed.start_trainer()
        until(lambda: run.checkpoints() == [0], what="the end of mid-training")  # noqa: B023
        until(lambda: not run.paths.mid_training.root.exists(), what="its checkpoints removed")  # noqa: B023
    assert "mid-training continues after step" in killed.log("trainer-0")
    expected, found = (model_state(run.paths.checkpoint(0)) for run in (undisturbed, killed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    rows = [
        [(row["step"], row["loss"], row["tokens"]) for row in supervised(r)] for r in (undisturbed, killed)
    ]
    assert rows[0] == rows[1]
    assert [step for step, *_ in rows[0]] == list(range(120))
    evaluated = [json.loads(line) for line in killed.paths.supervised_metrics.read_text().splitlines()]
    before, after = (row for row in evaluated if "held_out_loss" in row)
    assert (before["step"], after["step"]) == (0, 120)
    assert after["held_out_loss"] < before["held_out_loss"]
    meters = [run.status() for run in (undisturbed, killed)]
    assert all(meter is not None for meter in meters)
    assert [(m.supervised_steps, m.supervised_tokens) for m in meters] == [(120, rows[0][-1][2])] * 2
    # The meter counts the evaluations and checkpoints between the steps, too.
    assert meters[0].wall_seconds > sum(row["seconds"] for row in supervised(undisturbed))
    assert all(m.wall_seconds > 0 and m.device_seconds == pytest.approx(2 * m.wall_seconds) for m in meters)

    for rank in killed.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert killed.wait_trainer() == [0, 0]
    killed.start_trainer()
    until(lambda: killed.log("trainer-0").count("registered: version 0") >= 2, what="the next start")
    assert killed.log("trainer-0").count("mid-training: 120 steps") == 1, "a finished one is not repeated"


def test_sigterm_in_mid_training_saves_it(new_run: Any) -> None:
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=100_000)
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 50, what="step 50")
    os.kill(run.ranks[1].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    (saved,) = run.paths.mid_training.checkpoints.glob("step-*")
    assert int(saved.name[5:]) >= 50
    status = run.status()
    assert status is not None
    assert status.supervised_steps == int(saved.name[5:]), "the last report is of the state that is saved"
    assert status.supervised_tokens == supervised(run)[-1]["tokens"]
    for rank in (0, 1):
        assert "of mid-training; the next start continues there" in run.log(f"trainer-{rank}")
    assert run.checkpoints() == []


def test_split_run_has_one_meter(new_run: Any) -> None:
    """Tokens of both stages count once, also if the trainer is killed in the first, and it and the coordinator in the second."""
    run = new_run(
        warmStart__batchSize=6,
        checkpoint__everySteps=4,
        budget__maxSteps=10_000,
        budget__maxComputeTokens=1600,
        budget__split={"beta": "0.5"},
    )
    run.start(seconds_per_group=0.05)
    meter: list[float] = []
    saved: list[int] = []

    def read() -> wire.Status:
        until(lambda: run.status() is not None, what="the coordinator")
        status = run.status()
        assert status is not None
        meter.append(status.wall_seconds)
        return status

    until(lambda: len(supervised(run)) >= 15, what="supervised step 15")
    saved.append(supervised(run)[7]["tokens"])
    os.kill(run.ranks[0].pid, signal.SIGKILL)
    run.wait_trainer()
    assert read().compute_tokens <= 800
    run.start_trainer()
    until(lambda: run.step() >= 5, what="step 5 of RL")
    first = read().supervised_tokens
    assert first == supervised(run)[-1]["tokens"]
    assert supervised(run)[-2]["tokens"] < 800 <= first, (
        "mid-training ends with the step that reaches its share"
    )
    assert saved[0] < first
    assert read().compute_tokens > first
    run.coordinator.kill()
    run.coordinator.join()
    os.kill(run.ranks[1].pid, signal.SIGKILL)
    run.start_coordinator()
    run.wait_trainer()  # the leader first gets an answer to the request that it repeats
    assert read().compute_tokens > first, "the journal has both stages"
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = read()
    assert (status.phase, status.stop_reason) == (wire.Phase.FINISHED, "maxComputeTokens")
    assert status.supervised_tokens == first, "mid-training is not repeated"
    tokens = [row["completion_tokens"] for row in run.rows()]
    assert [row["step"] for row in run.rows()] == list(range(status.step))
    assert status.compute_tokens == pytest.approx(first + 4 / 3 * sum(tokens))
    assert first + 4 / 3 * sum(tokens[:-1]) < 1600 <= status.compute_tokens
    # A coordinator that is killed loses what it has not written yet.
    assert all(later > earlier - 2 for earlier, later in pairwise(meter))
    assert meter[-1] > meter[1]


def stop_trainer(run: Run) -> None:
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]


def test_damaged_mid_training_checkpoints(new_run: Any) -> None:
    """The newest good one is used; without one, or with another model, the exit code says that a restart does not help."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=4)
    folder = run.paths.mid_training.checkpoints
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 12, what="step 12")
    stop_trainer(run)
    before, newest = sorted(folder.glob("step-*"))

    other = new_run(
        model__scratch={**run.spec.model.scratch.model_dump(by_alias=True), "intermediateSize": 64}
    )
    run.paths.base_model.rename(run.paths.root / "own-model")
    shutil.copytree(other.paths.base_model, run.paths.base_model)
    run.start_trainer()
    assert run.wait_trainer(60) == [2, 2]
    message = f"{newest} is of another model: "
    assert message in run.log("trainer-0")
    assert "restore model.*, or start a new run" in run.log("trainer-0")
    shutil.rmtree(run.paths.base_model)
    (run.paths.root / "own-model").rename(run.paths.base_model)

    shard = newest / "rank-00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    run.start_trainer()
    expected = f"mid-training continues after step {int(before.name[5:])},"
    until(lambda: expected in run.log("trainer-0"), what=expected)
    assert f"checkpoint {int(newest.name[5:])} is damaged and is not used: {shard} has" in run.log(
        "trainer-0"
    )
    until(lambda: len(list(folder.glob("step-*"))) == 2, what="the next checkpoint")
    stop_trainer(run)

    for good in folder.glob("step-*"):
        (good / "rank-00000.safetensors").unlink()
    for _ in range(2):
        run.start_trainer()
        assert run.wait_trainer(60) == [2, 2]
        last = run.log("trainer-0").splitlines()[-1]
        assert f"{folder}: all checkpoints are damaged: damaged-step-" in last
        assert f"or remove {run.paths.mid_training.root} to begin mid-training again" in last
    shutil.rmtree(run.paths.mid_training.root)
    run.start_trainer()
    until(lambda: any(folder.glob("step-*")), what="a new mid-training")
    assert supervised(run)[0]["step"] == 0


def test_mid_training_checkpoint_without_its_state(new_run: Any) -> None:
    """As of a release that kept the stage's state in another file, or otherwise."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=4)
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 5, what="step 5")
    stop_trainer(run)
    newest = max(run.paths.mid_training.checkpoints.glob("step-*"))
    manifest = Manifest.decode((newest / MANIFEST).read_bytes())
    (newest / STAGE).unlink()
    kept = [record for record in manifest.files if record.path != STAGE]
    (newest / MANIFEST).write_bytes(msgspec.structs.replace(manifest, files=kept).encode())
    run.start_trainer()
    assert run.wait_trainer(60) == [2, 2]
    last = run.log("trainer-0").splitlines()[-1]
    assert f"{newest / STAGE} cannot be read: " in last
    assert f"remove {run.paths.mid_training.root} to begin mid-training again" in last


def test_directory_of_release_without_mid_training_checkpoints(new_run: Any) -> None:
    """A run that has trained resumes without its files of mid-training; one that has not begins it."""
    run = new_run(budget__maxSteps=9, checkpoint__everySteps=3, warmStart__steps=3, warmStart__batchSize=4)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 4, what="step 4")
    stop_trainer(run)
    stopped = run.step()
    run.paths.supervised_metrics.unlink()
    run.paths.warm_started_weights.unlink()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {stopped}," in run.log("trainer-0")
    assert run.step() == 9
    assert not supervised(run)

    killed = new_run(
        budget__maxSteps=1, warmStart__steps=60, warmStart__batchSize=4, checkpoint__everySteps=9
    )
    killed.start()
    until(lambda: len(supervised(killed)) >= 9, what="step 9")
    os.kill(killed.ranks[0].pid, signal.SIGKILL)
    killed.wait_trainer(30)
    shutil.rmtree(killed.paths.mid_training.root, ignore_errors=True)
    killed.paths.supervised_metrics.unlink()
    killed.start_trainer()
    assert killed.wait_trainer() == [0, 0]
    assert [row["step"] for row in supervised(killed)] == list(range(60))


def test_stop_ends_mid_training(new_run: Any) -> None:
    """The run's budget is used up by supervised steps alone: the last evaluation follows."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4)
    run.start()
    until(lambda: (status := run.status()) is not None and status.supervised_steps > 0, what="a report")
    run.stop("maxSeconds")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.step, len(status.points)) == (wire.Phase.FINISHED, 0, 1)
    assert status.points[0].device_seconds >= 2 * sum(row["seconds"] for row in supervised(run)) * 0.5


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_others_and_training_resumes(new_run: Any, victim: int) -> None:
    run = new_run(budget__maxSteps=8)
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 3)
    os.kill(run.ranks[victim].pid, signal.SIGKILL)
    codes = run.wait_trainer()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert status.step == 8
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(8))


def test_generator_killed_in_publish_does_not_stop_training(new_run: Any) -> None:
    run = new_run()
    run.start_coordinator()
    survivor = run.start_generator(seconds_per_group=0.05)
    run.start_generator({"at": "receive", "how": "kill", "version": 2, "bucket": 1})
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert run.step() == 6
    assert (survivor / "v6.pt").exists()
    assert "gave up publishing version" in run.log("trainer-0")


@pytest.mark.parametrize(("victim", "zero_stage"), [("trainer-0", 1), ("trainer-1", 3), ("coordinator", 1)])
def test_trainer_killed_in_publish_loses_no_step(new_run: Any, victim: str, zero_stage: int) -> None:
    run = new_run(trainer__zeroStage=zero_stage)
    target = run.paths.root / "victim"
    run.start_coordinator()
    fault = {"at": "receive", "how": "shoot", "victim": str(target), "version": 2, "bucket": 1, "times": 1}
    directory = run.start_generator(fault, seconds_per_group=0.05)
    run.start_trainer()
    process = run.coordinator if victim == "coordinator" else run.ranks[int(victim[-1])]
    target.write_text(str(process.pid))
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    if victim == "coordinator":
        run.start_coordinator()
    else:
        assert sorted(run.wait_trainer()) == [-signal.SIGKILL, 1]
        run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.step, status.published_version) == (6, 6)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(6))
    assert (directory / "v6.pt").exists()


def test_interrupted_run_checkpoints_before_evaluation(new_run: Any) -> None:
    run = new_run(evaluation__everySteps=1, evaluation__holdSeconds=300, checkpoint__everySteps=100)
    run.start(skip_held_out=True)
    until(lambda: run.step() >= 1)
    run.stop("interrupted")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.published_version) == (wire.Phase.FINISHED, 0)
    assert run.checkpoints() == [status.step] == [1]


def test_stopped_run_exports_last_model(new_run: Any) -> None:
    run = new_run(checkpoint__everySteps=100, budget__maxSteps=1000)
    directory = run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 2)
    run.stop("enough")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert 2 <= status.step < 1000
    assert status.points[-1].version == status.step
    until(lambda: run.exported() == status.step)  # the status is a tick behind the volume
    status = run.status()
    assert status is not None
    assert status.exports is not None
    assert status.exports.last is not None
    exported = load_file(run.paths.root / status.exports.last.path / "model.safetensors")
    last = torch.load(directory / f"v{status.step}.pt")
    assert all(torch.equal(last[name], exported[name]) for name in last)


def test_unfinished_evaluation_is_not_polled_every_round(new_run: Any) -> None:
    run = new_run(evaluation__holdSeconds=1)
    run.start(skip_held_out=True)
    until(lambda: run.paths.metrics.exists() and len(run.rows()) == 6, what="the last step")
    metrics = http.get(f"http://127.0.0.1:{run.port}{endpoints.METRICS}").text
    asked = re.search(r'requests_total\{code="200",path="/v1/status"\} (\S+)', metrics)
    assert asked is not None
    assert float(asked[1]) <= 3, "for each version that is exported, and once more when nothing is known"
    assert run.exported() is None, "no evaluation, so neither best nor last"


def test_last_version_checkpointed_before_evaluation(new_run: Any) -> None:
    run = new_run(
        evaluation__everySteps=1,
        evaluation__holdSeconds=300,
        checkpoint__everySteps=100,
        budget__maxSteps=1,
    )
    run.start(skip_held_out=True)
    until(lambda: run.checkpoints() == [1], what="the last checkpoint")
    assert all(rank.is_alive() for rank in run.ranks), "they wait for an evaluation that does not come"


def test_best_checkpoint_kept_once_autoscaling_is_on(new_run: Any) -> None:
    """An edit of ``spec.autoscaling.mode`` restarts nothing."""
    run = new_run(evaluation__everySteps=3, checkpoint__everySteps=1, checkpoint__keep=1, budget__maxSteps=60)
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 4)
    assert len(run.checkpoints()) <= 2, "one, and what is being written"
    manifest = yaml.safe_load(run.paths.run_file.read_text())
    manifest["spec"]["autoscaling"] = {"mode": "Advisory"}
    aside = run.paths.run_file.with_suffix(".new")
    aside.write_text(yaml.safe_dump(manifest))
    aside.replace(run.paths.run_file)
    until(lambda: run.checkpoints()[-1] - run.checkpoints()[0] >= 2, what="a checkpoint of the best")


def test_lost_checkpoints_do_not_restart_run(new_run: Any) -> None:
    run = new_run()
    run.start()
    assert run.wait_trainer() == [0, 0]
    shutil.rmtree(run.paths.checkpoints)
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    assert "checkpoints-lost" in run.log("trainer-0")
    assert run.step() == 6


def test_coordinator_restart(new_run: Any) -> None:
    run = new_run()
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 2)
    os.kill(run.coordinator.pid, signal.SIGKILL)
    time.sleep(1)
    run.start_coordinator()
    assert run.wait_trainer() == [0, 0]
    assert run.step() == 6


def test_unacknowledged_checkpoint_does_not_stop_training(new_run: Any) -> None:
    """Its metrics.jsonl cannot be written for a while: the trainer continues, and retries the report."""
    run = new_run(budget__maxSteps=12)
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 1)
    aside = run.paths.metrics.with_name("aside")
    run.paths.metrics.rename(aside)
    run.paths.metrics.mkdir()
    until(lambda: "did not acknowledge it" in run.log("trainer-0"), what="a refused commit")
    refused_at = run.step()
    until(lambda: run.step() >= refused_at + 2, what="training")
    run.paths.metrics.rmdir()
    aside.rename(run.paths.metrics)
    assert run.wait_trainer() == [0, 0]
    assert [row["step"] for row in run.rows()] == list(range(12))
    assert run.log("trainer-0").count("registered: ") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_fails_checkpoints_only(new_run: Any, rank: int) -> None:
    """One rank cannot write files of more than 32 KiB: the other must neither hang nor keep its half."""
    run = new_run(budget__maxSteps=5)
    run.largest_file = {rank: 32 << 10}
    run.start()
    assert run.wait_trainer() == [1, 0], "all steps are trained, but their result could not be saved"
    assert run.step() == 5
    assert run.rows()[-1]["checkpoint_failures"] == 2
    assert "failed, keeping the last one" in run.log("trainer-0")
    assert run.paths.checkpoints.is_dir()
    left = [p for p in run.paths.checkpoints.iterdir() if p != run.paths.exports]
    assert left == [], "neither a checkpoint nor a part of one"
    status = run.status()
    assert status is not None
    if rank == 0:  # which exports
        assert status.exports is not None
        assert status.exports.last is None
        assert status.exports.failures >= 3
        assert "File too large" in status.exports.problem


def test_warm_start_checkpointed_before_first_step(new_run: Any) -> None:
    run = new_run(budget__maxSteps=1, warmStart__steps=3, warmStart__batchSize=4)
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    assert "mid-training: 3 steps" in run.log("trainer-0")
    assert run.checkpoints() == [0, 1]
    published = torch.load(directory / "v0.pt")
    saved = model_state(run.paths.checkpoint(0))
    assert all(torch.equal(published[name], saved[name]) for name in published)


@pytest.mark.parametrize("stage", [1, 3])
def test_kl_reference_is_the_warm_started_model(new_run: Any, stage: int) -> None:
    """Also after a restart: neither the prepared model nor the resumed weights."""
    run = new_run(
        budget__maxSteps=9,
        checkpoint__everySteps=100,
        trainer__zeroStage=stage,
        recipe__kl={"penalty": {"coefficient": "0.1"}},
        warmStart__steps=3,
        warmStart__batchSize=4,
        warmStart__learningRate="1e-2",
    )
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    stopped = run.step()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    kl = [row["reference_kl"] for row in run.rows()]
    assert len(kl) == 9
    assert kl[0] == pytest.approx(0, abs=1e-9)
    # Of the resumed weights it would be 0 again, of the prepared model much more.
    assert 1e-5 < kl[stopped] < 5 * kl[stopped - 1]
    weights = dict(load_reference(run.paths, run.spec).named_parameters())
    start = load_file(run.paths.base_model / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in weights)

    run.paths.warm_started_weights.unlink()
    with pytest.raises(ModelError, match="weights after the warm start, cannot be read"):
        load_reference(run.paths, run.spec)


@pytest.mark.parametrize("before", [{"penalty": {"coefficient": "0.1"}}, {"none": {}}])
def test_edited_kl_coefficient_keeps_the_warm_started_reference(new_run: Any, before: dict[str, Any]) -> None:
    """Of a run that warm-started earlier; also where the edit adds the penalty."""
    run = new_run(
        budget__maxSteps=8,
        recipe__kl=before,
        warmStart__steps=3,
        warmStart__batchSize=4,
        warmStart__learningRate="1e-2",
    )
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 4)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    stopped, reference = run.step(), run.paths.warm_started_weights.read_bytes()
    manifest = yaml.safe_load(run.paths.run_file.read_text())
    manifest["spec"]["recipe"]["kl"] = {"penalty": {"coefficient": "1000"}}
    run.paths.run_file.write_text(yaml.safe_dump(manifest))
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert run.paths.warm_started_weights.read_bytes() == reference
    assert run.log("trainer-0").count("mid-training: 3 steps") == 1
    rows = run.rows()
    assert [("reference_kl" in row) for row in rows] == [
        ("penalty" in before) or i >= stopped for i in range(8)
    ]
    after = rows[stopped]
    # Of another reference, the resumed weights, it would be 0.
    assert after["reference_kl"] > 1e-6
    assert after["loss"] == pytest.approx(1000 * after["reference_kl"], rel=0.5)


def test_kl_penalty_added_to_a_warm_started_run_of_an_earlier_release(new_run: Any) -> None:
    """That release did not keep the weights after the warm start: refused, until the penalty is taken out again."""
    run = new_run(budget__maxSteps=5, warmStart__steps=3, warmStart__batchSize=4)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 1, what="step 1")
    stop_trainer(run)
    run.paths.warm_started_weights.unlink()
    stopped, manifest = run.step(), yaml.safe_load(run.paths.run_file.read_text())

    def resume(kl: dict[str, Any]) -> list[int]:
        manifest["spec"]["recipe"]["kl"] = kl
        run.paths.run_file.write_text(yaml.safe_dump(manifest))
        run.start_trainer()
        return run.wait_trainer()

    assert resume({"penalty": {"coefficient": "0.1"}}) == [2, 2]
    last = run.log("trainer-0").splitlines()[-1]
    assert f"recipe.kl.penalty with a warmStart: {run.paths.warm_started_weights}" in last
    assert "set recipe.kl to {none: {}}" in last
    assert run.step() == stopped
    assert resume({"none": {}}) == [0, 0]
    assert run.step() == 5


def test_damaged_checkpoint_is_quarantined(new_run: Any) -> None:
    run = new_run(budget__maxSteps=8)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    before, newest = run.checkpoints()
    file = run.paths.checkpoint(newest) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"checkpoint {newest} is damaged" in run.log("trainer-0")
    assert f"registered: version {before}," in run.log("trainer-0")
    assert run.step() == 8
    assert [row["step"] for row in run.rows()] == list(range(8))


def test_bad_batch_is_skipped(new_run: Any) -> None:
    run = new_run()
    directory = run.start(bad_slots=(8, 9, 10, 11))
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.step, status.skipped_steps) == (6, 1)
    assert "100.0 % of tokens have a ratio beyond 10" in status.last_skip_reason
    counts = status.counts
    assert counts.acknowledged == counts.trained + counts.filtered + counts.skipped + counts.queued
    assert counts.skipped == 4 * 3
    assert [row["skipped"] for row in run.rows()] == [0, 0, 1, 0, 0, 0]
    assert run.rows()[2]["trained_tokens"] == 0
    assert "skipped step 2, weights and optimizer are unchanged: " in run.log("trainer-0")
    before, skipped, after = (torch.load(directory / f"v{version}.pt") for version in (2, 3, 4))
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(skipped[name], after[name]) for name in before)


def test_three_consecutive_skipped_steps_diverge(new_run: Any) -> None:
    """The generator's log-probabilities are of no policy the trainer knows. The count survives a restart of the trainer."""
    run = new_run(checkpoint__everySteps=1)
    run.start(logprob=-60.0)
    assert run.wait_trainer() == [3, 3]
    assert "BROKEN: 3 consecutive steps were skipped, the last one (step 2) because 100.0 %" in run.log(
        "trainer-0"
    )
    assert run.step() == 3
    assert run.checkpoints()[-1] < 3
    run.start_trainer()
    assert run.wait_trainer() == [3, 3]
    assert run.step() == 3, "one more in that row is enough"
    status = run.status()
    assert status is not None
    assert (status.counts.trained, status.counts.skipped) == (0, 3 * 4 * 3)


def test_bad_input_exits_with_2(new_run: Any) -> None:
    """A task that changes after it was checked: a solution that fits no micro-batch."""
    run = new_run(warmStart__steps=3, warmStart__batchSize=60, trainer__microBatchTokens=64)
    rows = [{"prompt": f"{i}+{i}=", "answer": "1", "solution": "1 2 3 " * 30} for i in range(60)]
    (run.paths.root / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    assert "warmStart: " in run.log("trainer-0")
    assert "microBatchTokens" in run.log("trainer-0")
