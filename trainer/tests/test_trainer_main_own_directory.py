"""A whole run in which each process has a directory of its own, as pods without a shared volume: the coordinator's lasts, those of
preparation and trainer are lost with them. A real S3 server connects them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, S3Server
from trainer_run import Run, until

from scalerl_api.paths import RunPaths

pytestmark = pytest.mark.slow


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "server.log")
    yield server
    server.close()


class Pods(Run):
    """``paths`` is the coordinator's directory; ``node`` that of the trainer's present pod."""

    def __init__(self, processes: Any, root: Path, s3: S3Server, **changes: Any) -> None:
        self.s3, self.nodes = s3, 0
        super().__init__(
            processes,
            root,
            checkpoint__to=f"s3://{BUCKET}/run",
            storage__mountedBy="Coordinator",
            trainer__replicas=1,
            **changes,
        )
        shutil.rmtree(self.paths.base_model)
        self._program("prepare", root.with_name("prepare"))
        shutil.rmtree(root.with_name("prepare"))
        self._program("fetch_model", root, "--without-weights")

    def _environment(self, directory: Path) -> dict[str, str]:
        return {
            "SCALERL_DIR": str(directory),
            "SCALERL_RUN_FILE": str(self.paths.run_file),
            "SCALERL_OWN_DIRECTORY": "true",
            **self.s3.environ,
        }

    def _program(self, module: str, directory: Path, *arguments: str) -> None:
        directory.mkdir(exist_ok=True)
        environ = {
            "SCALERL_NAME": module,
            "SCALERL_COORDINATOR_URL": f"http://127.0.0.1:{self.port if hasattr(self, 'port') else 9}",
            "SCALERL_TOKEN_FILE": str(self.paths.token),
        }
        done = subprocess.run(
            [sys.executable, "-m", f"scalerl_trainer.{module}", *arguments],
            env=os.environ | environ | self._environment(directory),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    @property
    def node(self) -> RunPaths:
        return RunPaths(self.paths.root.with_name(f"node-{self.nodes}"))

    def start_trainer(self, only: set[int] | None = None) -> None:
        self.nodes += 1
        self._program("fetch_model", self.node.root)
        super().start_trainer(only)

    def _role(self, module: str, name: str, listen: int, *rest: Any, **environ: Any) -> Any:
        if name.startswith("trainer"):
            environ |= self._environment(self.node.root)
            name = f"{name}-node-{self.nodes}"
        return super()._role(module, name, listen, *rest, **environ)

    def lose_trainer(self) -> None:
        """Its node is gone, with the directory."""
        for rank in self.ranks:
            os.kill(rank.pid, signal.SIGKILL)
            rank.join(120)
        shutil.rmtree(self.node.root)

    def uploaded(self) -> int:
        status = self.status()
        return -1 if status is None or status.uploads is None else status.uploads.version

    def trainer_log(self) -> str:
        """Empty before the first line."""
        log = self.paths.logs / f"trainer-0-node-{self.nodes}.log"
        return log.read_text() if log.exists() else ""

    def stored(self) -> set[str]:
        """Folders of the run's prefix that are complete."""
        paths = {path.removeprefix("run/") for path in self.s3.paths() if path.startswith("run/")}
        return {path.rpartition("/")[0] for path in paths if path.endswith(("manifest.json", "files.json"))}

    def assert_exact(self, steps: int) -> None:
        """Each step is trained once, and each rollout is accounted for."""
        assert [row["step"] for row in self.rows()] == list(range(steps))
        status = self.status()
        assert status is not None
        counts, group = status.counts, self.spec.recipe.completions_per_prompt
        used = counts.trained + counts.filtered + counts.skipped
        assert counts.acknowledged == used + counts.queued
        assert used + counts.given_up == steps * self.spec.recipe.prompts_per_step * group


@pytest.fixture
def pods(processes: Any, tmp_path: Path, s3: S3Server) -> Iterator[Any]:
    made: list[Pods] = []

    def new(**changes: Any) -> Pods:
        made.append(Pods(processes, tmp_path / "coordinator", s3, **changes))
        return made[-1]

    yield new
    for run in made:
        for log in sorted(run.paths.logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-5000:]}")


def test_trainer_that_is_lost_with_its_directory_continues_from_the_store(pods: Any, s3: S3Server) -> None:
    """The second node's newest checkpoint is in no copy: its steps are trained again, from the coordinator's journal."""
    run = pods(budget__maxSteps=14, evaluation__everySteps=4, evaluation__holdSeconds=1)
    generator = run.start(seconds_per_group=0.1, slots=40)
    until(lambda: run.uploaded() >= 4 and (run.exported() or 0) >= 4, what="copies of checkpoint and model")
    s3.refuse(0)
    on_disk = run.uploaded() + 4
    run.permit(generator)
    until(lambda: f"checkpoint {on_disk} is on disk" in run.trainer_log(), what="a checkpoint without copy")
    until(lambda: "403 Forbidden" in run.status().uploads.problem, what="a failed copy")
    status = run.status()
    copied = status.uploads.version
    assert copied < on_disk
    best = status.exports.best
    run.lose_trainer()
    s3.refuse(float("inf"))

    run.start_trainer()
    until(lambda: "registered: version" in run.trainer_log(), what="the second trainer")
    assert f"registered: version {copied}," in run.trainer_log()
    assert run.wait_trainer() == [0]
    run.assert_exact(14)
    assert {"step-00000014", "model"} <= run.stored()
    assert run.uploaded() == 14
    exports = run.status().exports
    assert exports.last.version >= 12
    assert exports.last.uri == f"s3://{BUCKET}/run/hf/step-{exports.last.version:08d}"
    assert exports.best.reward >= best.reward
    objects = s3.objects()
    for model in (exports.best, exports.last):
        assert f"run/hf/step-{model.version:08d}/model.safetensors" in objects
    assert json.loads(objects["run/hf/exports.json"])["last"]["version"] == exports.last.version
    assert not list(run.paths.checkpoints.glob("step-*")), (
        "nothing of the trainer's is on the coordinator's volume"
    )
    assert not list(run.paths.base_model.glob("*.safetensors"))


def test_last_version_is_kept_until_it_is_copied(pods: Any, s3: S3Server) -> None:
    run = pods(budget__maxSteps=3)
    generator = run.start(slots=8)
    until(lambda: "step-00000002" in run.stored(), what="the first copy")
    s3.refuse(0)
    run.permit(generator)
    until(lambda: "checkpoint 3 is on disk" in run.trainer_log(), what="the last checkpoint")
    until(lambda: "checkpoint 3 was not copied" in run.trainer_log(), what="a failed copy")
    assert run.ranks[0].is_alive()
    s3.refuse(float("inf"))
    assert run.wait_trainer() == [0]
    assert run.uploaded() == 3
    run.assert_exact(3)
