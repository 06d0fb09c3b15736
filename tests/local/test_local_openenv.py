"""A server of openenv itself, installed in an environment of its own: its frames are those of the stand-in, and a run trains on it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from free_port import free_port
from openenv_stand_in import serving
from runs import ROOT, assert_nothing_left, start_run

NIM = ROOT / "examples/tiny-nim"

pytestmark = [pytest.mark.local, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Starts the echo that ``openenv init`` writes, on ``$(PORT)``."""
    folder = tmp_path_factory.mktemp("openenv")
    python, uv = folder / "venv/bin/python", str(Path(sys.executable).with_name("uv"))
    for command in (
        [uv, "venv", "-q", "-p", sys.executable, str(folder / "venv")],
        [
            uv,
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--require-hashes",
            "--python",
            str(python),
            "-r",
            str(ROOT / "requirements/openenv.txt"),
        ],
        [str(python.with_name("openenv")), "init", "echo_env", "-o", str(folder)],
    ):
        subprocess.run(command, check=True, timeout=600, cwd=folder)
    app = folder / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=3,"))
    program = [str(python), "-m", "uvicorn", "server.app:app", "--app-dir", str(folder / "echo_env")]
    return ["env", "-u", "PYTHONPATH", *program, "--host", "127.0.0.1", "--port", "$(PORT)"]


@pytest.fixture(scope="module")
def openenv(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    port, log = free_port(), tmp_path_factory.mktemp("served") / "log"
    with log.open("w") as sink:
        server = subprocess.Popen([*command[:-1], str(port)], stdout=sink, stderr=sink)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        while True:
            with suppress(OSError):
                direct.open(f"{url}/health", timeout=5).close()
                break
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        server.kill()
        server.wait(60)


FRAMES: tuple[dict[str, Any], ...] = (
    {"type": "reset", "data": {"seed": 3, "episode_id": "a", "answer": "4", "anything": [1]}},
    {"type": "step", "data": {"message": "héllo"}},
    {"type": "step", "data": {"message": 5}},
    {"type": "step", "data": {}},
    {"type": "step", "data": {"message": "a", "other": "b"}},
    {"type": "step", "data": {"message": ""}},
    {"type": "something", "data": {}},
)


async def _conversation(url: str, capacity: int) -> list[Any]:
    """What a server answers, without the texts that are for people."""

    def shape(frame: Any) -> Any:
        data = frame["data"]
        if frame["type"] == "error":
            errors = [(one["type"], list(one["loc"]), one["msg"]) for one in data.get("errors", [])]
            return data["code"], sorted(errors)
        seen = {name: value for name, value in data["observation"].items() if name != "metadata"}
        return (seen if data["reward"] else sorted(seen)), data["reward"], data["done"]

    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/schema") as answer:
            schema = await answer.json()
        found: list[Any] = [
            sorted(schema["action"]["properties"]),
            schema["action"]["required"],
            sorted(schema["observation"]["properties"]),
        ]
        sockets = [await http.ws_connect(f"{url}/ws") for _ in range(capacity)]
        for frame in FRAMES:
            await sockets[0].send_json(frame)
            found.append(shape(await sockets[0].receive_json(timeout=30)))
        for socket in sockets[1:]:  # a session counts from its first answer at the latest
            await socket.send_json(FRAMES[0])
            await socket.receive_json(timeout=30)
        refused = await http.ws_connect(f"{url}/ws")
        found.append(shape(await refused.receive_json(timeout=30)))
        found.append(
            (await refused.receive(timeout=30)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        )
        for socket in sockets:
            await socket.close()
    return found


async def test_stand_in_answers_as_openenv_does(openenv: str) -> None:
    async with serving() as (server, url):
        server.capacity = 3
        stand_in = await _conversation(url, 3)
    assert await _conversation(openenv, 3) == stand_in


def test_run_trains_on_it(command: list[str], tmp_path: Path) -> None:
    """As a server of the run; the tests of the actor have one by address."""
    run = yaml.safe_load((NIM / "run.yaml").read_text())
    spec = run["spec"]
    spec["task"]["jsonl"]["path"], spec["warmStart"]["jsonl"]["path"] = (
        str(NIM / name) for name in ("data.jsonl", "warm.jsonl")
    )
    spec["model"]["scratch"]["vocabularySize"] = 300
    spec["task"]["environment"] = {"name": "server", "maxTurns": 3, "maxTokensPerTurn": 12}
    spec["environment"] = {"command": command}
    spec["task"]["heldOut"]["size"] = 32
    spec["warmStart"]["steps"] = 100
    spec["recipe"] |= {"promptsPerStep": 8, "completionsPerPrompt": 4}
    spec["evaluation"]["everySteps"] = spec["checkpoint"]["everySteps"] = spec["budget"]["maxSteps"] = 5
    with start_run(tmp_path, run) as started:
        assert started.finish(1700) == 0, started.tail()
        summary = started.summary()
    assert_nothing_left(started.directory)
    assert (summary["steps"], summary["grading_errors"]) == (5, 0)
    rollouts = subprocess.run(
        [sys.executable, "-m", "scalerl_cli.main", "rollouts", str(started.directory), "--limit", "5"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "3 turns" in rollouts
