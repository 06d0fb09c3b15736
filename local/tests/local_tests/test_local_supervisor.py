"""The local runtime on real, small processes."""

# ruff: noqa: ASYNC221, ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from local_runs import Harness, workload
from small_processes import eventually, script

from scalerl_lifecycle.workloads import Container, Lifetime, Probe, Resources, Role, Workload
from scalerl_local.devices import VISIBLE, NotEnoughDevices
from scalerl_local.run_view import UnitState

SLEEP = ("-c", "import time; time.sleep(600)")
NOTE = """
    # Writes one line of what it was given, then does what its arguments say.
    import json, os, sys, time
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SCALERL_NAME", "SCALERL_DIR",
            "SCALERL_COORDINATOR_URL", "SCALERL_TOKEN_FILE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
            "SCALERL_PORT_HTTP")
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({k: os.environ.get(k) for k in keys} | {"pid": os.getpid()}) + "\\n")
    exec(sys.argv[2])
"""


def notes(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


async def test_prepare_completes_before_anything_else_starts(tmp_path: Path) -> None:
    done = tmp_path / "done"
    check = f"import os, sys; sys.exit(0 if os.path.exists({str(done)!r}) else 7)"
    harness = Harness(
        tmp_path,
        workload(Role.PREPARE, Lifetime.ONCE, "-c", f"import time; time.sleep(.3); open({str(done)!r}, 'w')"),
        workload(Role.TRAINER, Lifetime.GANG, "-c", check),
        workload(Role.COORDINATOR, Lifetime.SERVICE, *SLEEP),
    )
    assert await asyncio.wait_for(harness.run(), 120) is None
    assert harness.events == []
    assert [u.state for u in harness.runtime.statuses()] == [UnitState.DONE] * 3


async def test_crashed_service_restarts_with_back_off_on_the_same_port(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    argv = (script(tmp_path, "note", NOTE), str(path), "time.sleep(600)")
    harness = Harness(
        tmp_path,
        workload(Role.COORDINATOR, Lifetime.SERVICE, *argv, ports=("http",)),
    )

    async def scenario() -> None:
        for n in range(1, 4):
            await eventually(lambda n=n: len(notes(path)) == n)
            os.kill(int(notes(path)[-1]["pid"]), signal.SIGKILL)
        await eventually(lambda: len(notes(path)) == 4)

    await harness.while_running(scenario)
    assert len({n["SCALERL_PORT_HTTP"] for n in notes(path)}) == 1
    assert notes(path)[0]["SCALERL_COORDINATOR_URL"].endswith(":" + notes(path)[0]["SCALERL_PORT_HTTP"])
    delays = [e.text.rsplit(" in ", 1)[1] for e in harness.events]
    assert delays == ["0.05 s", "0.1 s", "0.2 s"]
    assert "killed by SIGKILL" in harness.events[0].text
    assert harness.log("coordinator-0").count("--- ") == 4


async def test_restart_quotes_the_last_line_of_the_log(tmp_path: Path) -> None:
    fail = "import sys; print('2026-01-01 00:00:00,000 ERROR a.b cannot load: no such layer', file=sys.stderr); sys.exit(1)"
    harness = Harness(tmp_path, workload(Role.COORDINATOR, Lifetime.SERVICE, "-c", fail))

    async def scenario() -> None:
        await eventually(lambda: bool(harness.events))

    await harness.while_running(scenario)
    assert "coordinator-0 exited with code 1" in harness.events[0].text
    assert ": cannot load: no such layer; restarting in 0.05 s" in harness.events[0].text


async def test_gang_restarts_as_a_whole_with_a_new_master_port(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    argv = (script(tmp_path, "note", NOTE), str(path), "time.sleep(600)")
    harness = Harness(tmp_path, workload(Role.TRAINER, Lifetime.GANG, *argv, replicas=3))

    async def scenario() -> None:
        await eventually(lambda: len(notes(path)) == 3)
        os.kill(int(notes(path)[1]["pid"]), signal.SIGKILL)
        await eventually(lambda: len(notes(path)) == 6)

    await harness.while_running(scenario)
    first, second = notes(path)[:3], notes(path)[3:]
    for gang in (first, second):
        assert sorted(n["RANK"] for n in gang) == ["0", "1", "2"]
        assert {n["WORLD_SIZE"] for n in gang} == {"3"}
        assert {n["LOCAL_RANK"] for n in gang} == {"0"}
        assert len({n["MASTER_PORT"] for n in gang}) == 1
        assert sorted(n["SCALERL_NAME"] for n in gang) == ["trainer-0", "trainer-1", "trainer-2"]
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    alive = [n for n in notes(path) if Path(f"/proc/{n['pid']}").exists()]
    assert alive == []


async def test_gang_restarts_if_a_rank_exited_early(tmp_path: Path) -> None:
    path, answers = tmp_path / "notes", [False, True]
    argv = (script(tmp_path, "note", NOTE), str(path), "time.sleep(.3 * int(os.environ['RANK']))")
    harness = Harness(
        tmp_path, workload(Role.TRAINER, Lifetime.GANG, *argv, replicas=2), is_complete=lambda: answers.pop(0)
    )
    assert await asyncio.wait_for(harness.run(), 120) is None
    assert len(notes(path)) == 4
    assert answers == []


async def test_server_and_actor_restart_separately(tmp_path: Path) -> None:
    note = script(tmp_path, "note", NOTE)
    both = tuple(
        Container(name, ("python", "-S", note, str(tmp_path / name), "time.sleep(600)"))
        for name in ("server", "actor")
    )
    harness = Harness(tmp_path, Workload(Role.GENERATOR, Lifetime.SERVICE, both, replicas=2))

    async def scenario() -> None:
        await eventually(lambda: len(notes(tmp_path / "server")) == 2 and len(notes(tmp_path / "actor")) == 2)
        os.kill(int(notes(tmp_path / "server")[0]["pid"]), signal.SIGKILL)
        await eventually(lambda: len(notes(tmp_path / "server")) == 3)

    await harness.while_running(scenario)
    assert len(notes(tmp_path / "actor")) == 2
    assert sorted(p.name for p in harness.directory.paths.logs.iterdir()) == [
        "generator-0-actor.log",
        "generator-0-server.log",
        "generator-1-actor.log",
        "generator-1-server.log",
    ]


@pytest.mark.parametrize(
    ("code", "starts", "bad_input", "words"),
    [
        ("print('bad value'); sys.exit(2)", 1, True, "its input is wrong"),
        ("sys.exit(1)", 4, False, "4 times in a row before it was ready"),
    ],
)
async def test_role_that_fails_for_good_ends_the_run(
    tmp_path: Path, code: str, starts: int, bad_input: bool, words: str
) -> None:
    path = tmp_path / "notes"
    argv = (script(tmp_path, "note", NOTE), str(path), code)
    harness = Harness(
        tmp_path,
        workload(Role.PREPARE, Lifetime.ONCE, *argv),
        workload(Role.COORDINATOR, Lifetime.SERVICE, *SLEEP),
    )
    failure = await asyncio.wait_for(harness.run(), 120)
    assert failure is not None
    assert (failure.role, failure.bad_input) == (Role.PREPARE, bad_input)
    assert words in failure.reason
    assert failure.log.endswith("logs/prepare.log")
    assert len(notes(path)) == starts
    assert not (harness.directory.paths.logs / "coordinator-0.log").exists()


async def test_role_that_fails_before_it_is_needed_does_not_end_the_run(tmp_path: Path) -> None:
    """A vLLM server that cannot load the model, during mid-training."""
    path = tmp_path / "notes"
    argv = (script(tmp_path, "note", NOTE), str(path), "sys.exit(2)")
    harness = Harness(
        tmp_path,
        workload(Role.GENERATOR, Lifetime.SERVICE, *argv),
        workload(Role.TRAINER, Lifetime.GANG, *SLEEP),
        spec={"warmStart": {"steps": 1}},
    )
    harness.coordinator.changes = {"published_version": -1, "checkpoint_version": -1}
    task = asyncio.create_task(harness.run())
    await eventually(lambda: harness.events)
    assert "its input is wrong" in harness.events[0].text
    await asyncio.sleep(0.5)
    assert (len(notes(path)), task.done()) == (1, False)
    harness.coordinator.changes = {"published_version": -1, "checkpoint_version": 0}
    failure = await asyncio.wait_for(task, 120)
    assert failure is not None
    assert (failure.role, failure.bad_input, len(notes(path))) == (Role.GENERATOR, True, 1)


async def test_full_volume_of_logs_ends_no_role(tmp_path: Path) -> None:
    """Mounting takes root, which CI has."""
    code = "import logging, os; logging.basicConfig(); [logging.error('x' * 4096) for _ in range(99)]; os._exit(0)"
    harness = Harness(tmp_path, workload(Role.TRAINER, Lifetime.GANG, "-c", code))
    logs = harness.directory.paths.logs
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(logs)], check=True)
    try:
        with contextlib.suppress(OSError), (logs / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert await asyncio.wait_for(harness.run(), 120) is None
        assert not [event for event in harness.events if event.is_problem]
    finally:
        subprocess.run(["umount", "--lazy", str(logs)], check=True)


SERVER = """
    import http.server, os, signal, sys, time
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            ok = not os.path.exists(sys.argv[1] + self.path.replace("/", "-"))
            self.send_response(200 if ok else 503); self.end_headers()
        def log_message(self, *arguments): pass
    server = http.server.HTTPServer(("127.0.0.1", int(os.environ["SCALERL_PORT_HTTP"])), Handler)
    if sys.argv[2:]:  # it answers no more once it is stopped, and takes its time to end
        signal.signal(signal.SIGTERM, lambda *_: (server.socket.close(), time.sleep(600)))
    server.serve_forever()
"""


async def test_probes_set_readiness_and_restart(tmp_path: Path) -> None:
    switch = tmp_path / "bad"
    Path(f"{switch}-readyz").touch()
    health = Probe("/healthz", "http", 0.05, 120.0, 2)
    harness = Harness(
        tmp_path,
        workload(
            Role.COORDINATOR,
            Lifetime.SERVICE,
            script(tmp_path, "server", SERVER),
            str(switch),
            ports=("http",),
            startup=Probe("/healthz", "http", 0.05, 120.0, 2400),
            liveness=health,
            readiness=Probe("/readyz", "http", 0.05, 120.0, 1),
        ),
    )
    status = harness.runtime.units[0].status

    async def scenario() -> None:
        await asyncio.sleep(0.5)
        assert status.state is UnitState.STARTING
        Path(f"{switch}-readyz").unlink()
        await eventually(lambda: status.state is UnitState.READY)
        Path(f"{switch}-healthz").touch()
        await eventually(lambda: status.restarts == 1)
        Path(f"{switch}-healthz").unlink()
        await eventually(lambda: status.state is UnitState.READY)

    await harness.while_running(scenario)
    assert [e.text.partition(" after ")[0] for e in harness.events] == [
        "coordinator-0 does not answer its liveness probe",
        "coordinator-0 stopped answering its liveness probe",
    ]


async def test_probe_that_fails_during_a_stop_is_no_problem(tmp_path: Path) -> None:
    probe = Probe("/healthz", "http", 0.02, 120.0, 1)
    server = workload(
        Role.COORDINATOR,
        Lifetime.SERVICE,
        *(script(tmp_path, "server", SERVER), str(tmp_path / "bad"), "stays"),
        ports=("http",),
        startup=Probe("/healthz", "http", 0.05, 120.0, 2400),
        liveness=probe,
        readiness=probe,
    )
    harness = Harness(tmp_path, server, grace_seconds=0.5)
    status = harness.runtime.units[0].status

    async def scenario() -> None:
        await eventually(lambda: status.state is UnitState.READY)

    await harness.while_running(scenario)
    assert harness.events == []


async def test_failing_startup_probe_ends_the_run(tmp_path: Path) -> None:
    never = Probe("/healthz", "http", 0.02, 0.1, 3)
    harness = Harness(
        tmp_path, workload(Role.COORDINATOR, Lifetime.SERVICE, *SLEEP, ports=("http",), startup=never)
    )
    failure = await asyncio.wait_for(harness.run(), 120)
    assert failure is not None
    assert "startup probe before it was ready" in failure.reason


async def test_devices_are_disjoint_and_hidden_from_cpu_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "notes"
    argv = (script(tmp_path, "note", NOTE), str(path), "time.sleep(600)")
    harness = Harness(
        tmp_path,
        workload(Role.COORDINATOR, Lifetime.SERVICE, *argv, resources=Resources(cpu_threads=1)),
        workload(Role.GENERATOR, Lifetime.SERVICE, *argv, resources=Resources(devices=2)),
        workload(Role.TRAINER, Lifetime.GANG, *argv, replicas=2, resources=Resources(devices=1)),
    )

    async def scenario() -> None:
        await eventually(lambda: len(notes(path)) == 4)

    await harness.while_running(scenario)
    given = {n["SCALERL_NAME"]: n for n in notes(path)}
    assert {name: n["CUDA_VISIBLE_DEVICES"] for name, n in given.items()} == {
        "coordinator-0": "",
        "generator-0": "4,5",
        "trainer-0": "6",
        "trainer-1": "7",
    }
    assert given["coordinator-0"]["OMP_NUM_THREADS"] == "1"
    assert given["generator-0"]["OMP_NUM_THREADS"] is None
    assert int(given["trainer-0"]["OMP_NUM_THREADS"]) >= 1


def test_runtime_refuses_a_plan_with_too_few_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    with pytest.raises(NotEnoughDevices, match=r"2 devices asked for \(spec.trainer: 2 × 1\), 1 found"):
        Harness(
            tmp_path,
            workload(Role.TRAINER, Lifetime.GANG, *SLEEP, replicas=2, resources=Resources(devices=1)),
        )


async def test_kill_ends_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    up = tmp_path / "up"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(up)!r}, 'w'); time.sleep(600)"
    harness = Harness(tmp_path, workload(Role.COORDINATOR, Lifetime.SERVICE, "-c", code), grace_seconds=600.0)
    task = asyncio.create_task(harness.run())
    await eventually(up.exists)
    harness.stop()
    await asyncio.sleep(0.3)
    assert not task.done()
    harness.kill()
    await asyncio.wait_for(task, 120)


async def test_start_failure_names_the_log(tmp_path: Path) -> None:
    harness = Harness(tmp_path, workload(Role.PREPARE, Lifetime.ONCE, *SLEEP))
    harness.directory.paths.logs.rmdir()
    failure = await asyncio.wait_for(harness.run(), 120)
    assert failure is not None
    assert "prepare.log" in failure.reason


async def test_environment_server_is_a_process_that_gets_where_to_listen_alone(tmp_path: Path) -> None:
    """Generators get its address; its restarts are reported, and its exit codes, such as uvicorn's 3, end no run."""
    path = tmp_path / "notes"
    keep = script(
        tmp_path,
        "keep",
        "import json, os, sys, time\nopen(sys.argv[1], 'a').write(json.dumps(dict(os.environ)) + '\\n')\nexec(sys.argv[2])",
    )
    served = {"HOST": "$(SCALERL_BIND)", "PORT": "$(SCALERL_PORT_ENVIRONMENT)"}
    first = "import os; [time.sleep(600)] if os.path.exists(sys.argv[1] + '2') else open(sys.argv[1] + '2', 'w') and sys.exit(3)"
    harness = Harness(
        tmp_path,
        workload(Role.COORDINATOR, Lifetime.SERVICE, *SLEEP),
        workload(Role.GENERATOR, Lifetime.SERVICE, keep, f"{path}-generator", "time.sleep(600)"),
        workload(
            Role.ENVIRONMENT,
            Lifetime.SERVICE,
            *(keep, str(path), first),
            ports=("environment",),
            env=served,
            replicas=3,
        ),
    )

    async def scenario() -> None:
        await eventually(lambda: len(notes(path)) == 2 and bool(notes(Path(f"{path}-generator"))))

    await harness.while_running(scenario)
    (of_generator,) = notes(Path(f"{path}-generator"))
    for given in notes(path):
        assert of_generator["SCALERL_ENVIRONMENT_URL"] == f"http://127.0.0.1:{given['PORT']}"
        assert given["HOST"] == "127.0.0.1"
        assert {name for name in given if name.startswith("SCALERL_")} == {
            "SCALERL_BIND",
            "SCALERL_PORT_ENVIRONMENT",
            "SCALERL_PROCESS",
        }
    (event,) = harness.events
    assert (event.unit, "restarting in 0.05 s" in event.text) == ("environment-0", True)
    observed = harness.runtime.observed(0.0)
    assert observed.environment is not None
    assert observed.environment.bad_input is None
