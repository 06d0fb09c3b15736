"""A whole run of the trainer's tests: two real ranks, a real coordinator, fake generators that receive real weights."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
import yaml
from engines_and_stages import Stage, trainer_of
from free_port import free_port

from scalerl_api import endpoints, wire
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.engine_files import SavedState
from scalerl_trainer.prepare import prepare

TOKEN = "secret"
http = httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all: ``httpx.get`` reads all certificates of this machine each time, 24 ms of a processor twenty times a second."""


def until(true: Callable[[], Any], seconds: float = 300.0, what: str = "it") -> None:
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
        root.mkdir(exist_ok=True)
        (root / "task.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": f"{2 * i}"}) + "\n" for i in range(60))
        )
        spec: dict[str, Any] = {
            "model": {
                "scratch": {"layers": 2, "hiddenSize": 32, "attentionHeads": 1, "intermediateSize": 48},
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
            # Long enough for a slow machine; no process that is killed or ends is waited for so long.
            "weightSync": {"bucket": "16Ki", "timeoutSeconds": 60, "probeLimit": "100"},
            "evaluation": {"everySteps": 100, "samplesPerPrompt": 1, "holdSeconds": 60},
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
        self.dies_at: dict[int, int] = {}
        """Supervised steps at which a rank dies, once mid-training has a checkpoint."""
        self.environ: dict[str, str] = {}
        """Further variables of all roles."""
        self.retry_seconds: float | None = None
        """Between attempts to write a checkpoint, in place of half a minute or two."""

    def _role(
        self,
        module: str,
        name: str,
        listen: int,
        largest_file: int | None = None,
        dies_at: int | None = None,
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
                "dies_at": dies_at,
                "retry_seconds": self.retry_seconds,
                "environ": {
                    "SCALERL_DIR": str(self.paths.root),
                    "SCALERL_NAME": name,
                    "SCALERL_COORDINATOR_URL": f"http://127.0.0.1:{self.port}",
                    "SCALERL_TOKEN_FILE": str(self.paths.token),
                    **self.environ,
                    **environ,
                },
            },
        )

    def start_coordinator(self) -> None:
        self.coordinator = self._role("scalerl_coordinator.main", "coordinator-0", self.port)

    def start_trainer(self, only: set[int] | None = None, **environ: str) -> None:
        """``only``: the other ranks are not started. ``environ``: further variables."""
        world = self.spec.trainer.replicas
        self.master = free_port()
        self.listens = [free_port() for _ in range(world)]
        self.ranks = [
            self._role(
                "scalerl_trainer.main",
                f"trainer-{rank}",
                self.listens[rank],
                largest_file=self.largest_file.get(rank),
                dies_at=self.dies_at.get(rank),
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.master),
                **environ,
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
        unusable: bool = False,
        slots: int | None = None,
    ) -> Path:
        """``slots``: see :meth:`permit`."""
        name = f"generator-{len(self.generators)}"
        directory = self.paths.root.with_name(f"{self.paths.root.name}-{name}")
        directory.mkdir()
        self.permit(directory, slots)
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
                    "unusable": unusable,
                },
            )
        )
        return directory

    def permit(self, directory: Path, slots: int | None = None) -> None:
        """Let the generator of ``directory`` answer the first ``slots`` of training only, so that the run goes no further before a
        test has done its part; None: all."""
        file = directory / "slots"
        if slots is None:
            file.unlink(missing_ok=True)
        else:
            file.with_suffix(".new").write_text(str(slots))
            file.with_suffix(".new").replace(file)

    def start(self, **generator: Any) -> Path:
        self.start_coordinator()
        directory = self.start_generator(**generator)
        self.start_trainer()
        return directory

    def reshape(self, replicas: int, stage: Stage) -> None:
        """Change ``spec.trainer`` between two starts."""
        manifest = yaml.safe_load(self.paths.run_file.read_text())
        manifest["spec"]["trainer"] |= {"replicas": replicas, **trainer_of(stage)}
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

    def wait_trainer(self, seconds: float = 240.0) -> list[int]:
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


def model_state(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by their transformers names."""
    saved = SavedState(directory)
    return {name: saved.whole(name) for name in saved.header.parameters}
