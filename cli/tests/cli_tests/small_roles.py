"""``scalerl run`` on small real processes that keep the roles' contract: no model, no vLLM.

    python small_roles.py run|compare FILE ...  the command itself, on a plan of these roles
    python small_roles.py prepare|coordinator|trainer|actor

The coordinator trains a step every ``STEP_SECONDS`` once the trainer is there; all state lies in files of
the run's directory, so that any of them may be killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

STEP_SECONDS = 0.02
COUNT_KEYS = [
    "acknowledged",
    "trained",
    "filtered",
    "queued",
    "leased",
    "late",
    "stale",
    "invalid",
    "duplicate",
    "expired_leases",
]


def command() -> int:
    from scalerl_api.spec import ScaleRLRun
    from scalerl_cli import inputs
    from scalerl_cli.main import main
    from scalerl_lifecycle.role_containers import plan
    from scalerl_lifecycle.workloads import Plan, Probe, Role, Workload

    def small(workload: Workload) -> Workload:
        containers = []
        for container in workload.containers:
            name = container.name if workload.role is Role.GENERATOR else str(workload.role)
            argv = ("python", __file__, name)
            health = None
            if workload.role is Role.COORDINATOR:
                health = Probe("/healthz", "http", 0.05, 1.0, 200)
            containers.append(replace(container, argv=argv, startup=health, liveness=None, readiness=health))
        return replace(workload, containers=tuple(containers))

    def planner(run: ScaleRLRun) -> Plan:
        made = plan(run)
        return replace(made, workloads=tuple(small(w) for w in made.workloads))

    # There is no vLLM among these roles, so it does not matter which build is installed.
    inputs.vllm_problem = lambda spec: None  # type: ignore[assignment]
    return main(planner=planner)


def behaviour(role: str) -> str:
    """What a test wants of a role: ``SMALL_<ROLE>`` in the environment."""
    return os.environ.get(f"SMALL_{role.upper()}", "")


def prepare(root: Path) -> None:
    if behaviour("prepare") == "bad-input":
        print("first line\n" * 30 + "spec.model.hub.name: no such model; check the name", file=sys.stderr)
        sys.exit(2)
    if behaviour("prepare") == "crash":
        print("\n".join(f"line {i}" for i in range(50)), file=sys.stderr)
        sys.exit(1)
    if behaviour("prepare") == "slow":
        time.sleep(600)
    (root / "model").mkdir(exist_ok=True)


def trainer(root: Path) -> None:
    if behaviour("trainer") == "mid-training":
        signal.signal(signal.SIGTERM, lambda *_: (root / "stopped").touch())
        (root / "mid-training").touch()
        while not ((root / "stop").exists() or (root / "stopped").exists()):
            time.sleep(0.01)
        with (root / "saved").open("a") as file:
            file.write("saved\n")
        return
    deadline = time.monotonic() + 30
    while (root / "stop").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # a real one takes as long to start; a resume takes the stop back meanwhile
    if behaviour("trainer") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (root / "trainer-up").write_text(str(os.getpid()))
    while not (root / "stop").exists() or behaviour("trainer") == "stubborn":
        time.sleep(0.01)
    time.sleep(0.2)
    (root / "checkpoints").mkdir(exist_ok=True)
    (root / "checkpoints" / "last").write_text("whole")
    (root / "finished").touch()


def sleeper(root: Path) -> None:
    while not (root / "finished").exists():
        time.sleep(0.02)


def coordinator(root: Path) -> None:
    import http.server
    import re
    import threading

    import msgspec

    from scalerl_api import endpoints
    from scalerl_api.wire import (
        Ack,
        Counts,
        DecisionLine,
        DecisionLines,
        EvaluationPoint,
        Mismatch,
        Phase,
        Status,
        Stop,
    )
    from scalerl_coordinator.decisions import DecisionLog

    found = re.search(r"maxSteps: (\d+)", (root / "run.yaml").read_text())
    limit = int(found[1]) if found else 10**9
    token = Path(os.environ["SCALERL_TOKEN_FILE"]).read_text().strip()
    started = time.monotonic()
    log = DecisionLog(root / "decisions.jsonl")

    def reward(version: int) -> float:
        if behaviour("coordinator") != "flattens":
            return min(0.9, 0.3 + version / 500)
        # Half of the gain at version 30, an evaluation's noise of about .004.
        return 0.2 + 0.4 / (1 + (30 / max(version, 1e-9)) ** 2) + 0.004 * (version * 7919 % 101 / 50 - 1)

    def point(version: int) -> EvaluationPoint:
        return EvaluationPoint(
            version=version,
            work_tokens=version * 1000,
            reward=reward(version),
            standard_error=0.02,
            samples=128,
            prompts=32,
            set_digest="x",
            mixed_versions=False,
            truncated_fraction=0.3 if behaviour("coordinator") == "cuts-off" and version >= 100 else 0.0,
            mean_tokens=6.0,
            wall_seconds=version * STEP_SECONDS,
            device_seconds=3 * version * STEP_SECONDS,
        )

    def step() -> int:
        return int((root / "step").read_text()) if (root / "step").exists() else 0

    waits = "seed: 7" in (root / "run.yaml").read_text() and behaviour("coordinator_waits_for")

    def train() -> None:
        while True:
            time.sleep(STEP_SECONDS)
            if waits and step() >= 10 and not Path(waits).exists():
                continue
            if (root / "trainer-up").exists() and not (root / "stop").exists():
                (root / "step.new").write_text(str(step() + 1))
                (root / "step.new").rename(root / "step")
                if step() >= limit:
                    (root / "stop").write_text("maxSteps")

    def status() -> Status:
        finished, stop = (root / "finished").exists(), (root / "stop").exists()
        up = (root / "trainer-up").exists()
        phase = Phase.FINISHED if finished else Phase.FINISHING if stop else Phase.RUNNING
        counts = dict.fromkeys(COUNT_KEYS, 0) | {"acknowledged": 4 * step(), "trained": 4 * step()}
        counts |= {"leased": int(up)}
        points = [point(v) for v in range(0, step() + 1, 10)]
        csv = "curve.csv" if behaviour("coordinator") == "curve" else "unseen.csv"
        (root / f"{csv}.new").write_text(
            "compute,reward,samples,standard_error,version,wall_seconds,device_seconds,mean_tokens,"
            "truncated_fraction,mixed_versions\n"
            + "".join(
                f"{p.work_tokens},{p.reward},{p.samples},{p.standard_error},{p.version},1,3,6,0,False\n"
                for p in points
            )
        )
        (root / f"{csv}.new").rename(root / csv)  # a coordinator that is killed leaves no half of it
        wall = time.monotonic() - started
        # Generators hold weights in mid-training if the trainer was killed before the run's first checkpoint.
        up = up or behaviour("coordinator") == "holds-weights"
        return Status(
            phase=phase if up else Phase.WAITING,
            waiting_for="" if up else "the trainer",
            step=step(),
            published_version=step(),
            stop_reason=(root / "stop").read_text() if stop else "",
            counts=Counts(**counts),
            members=[],
            points=points,
            last_step_stats={},
            wall_seconds=wall,
            device_seconds=3 * wall,
            tokens_generated=1000 * step(),
            tokens_trained=900 * step(),
            generator_busy_fraction=0.5,
            trainer_busy_fraction=0.6,
            max_staleness_steps=3,
            mean_staleness_steps=1.5,
            mismatch=[Mismatch(source="sampled", positions="all", kl=0.001, recent_kl=0.001, tokens=9)],
            checkpoint_failures=step() // 20 if behaviour("trainer") == "full-disk" else 0,
            supervised_steps=int((root / "mid-training").exists()),
            grading_errors=step() if behaviour("trainer") == "full-disk" else 0,
            learning_problem="nothing is learned" * (step() % 40 >= 20) * (behaviour("trainer") == "flat"),
        )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in ("/healthz", "/readyz"):
                self.answer(200, b"")
            elif self.headers["authorization"] != f"Bearer {token}":
                self.answer(401, b"")
            elif self.path.startswith(endpoints.DECISIONS):
                content, size = log.read(int(self.path.rpartition("=")[2]))
                self.answer(200, msgspec.msgpack.encode(DecisionLines(content=content, size=size)))
            else:
                self.answer(200, msgspec.msgpack.encode(status()))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == endpoints.DECISIONS:
                decided = msgspec.msgpack.decode(body, type=DecisionLine)
                log.append(decided.offset, decided.line)
                return self.answer(200, msgspec.msgpack.encode(Ack()))
            reason = msgspec.msgpack.decode(body, type=Stop).reason
            if not reason:
                (root / "stop").unlink(missing_ok=True)
            elif not (root / "stop").exists():
                (root / "stop").write_text(reason)
            return self.answer(200, msgspec.msgpack.encode(Ack()))

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=train, daemon=True).start()
    port = int(os.environ["SCALERL_PORT_HTTP"])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] in ("run", "compare"):
        sys.exit(command())
    roles = {
        "prepare": prepare,
        "coordinator": coordinator,
        "trainer": trainer,
        "actor": sleeper,
        "server": sleeper,
    }
    roles[sys.argv[1]](Path(os.environ["SCALERL_DIR"]))
