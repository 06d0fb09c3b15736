"""TensorBoard, with its own reader: each step of metrics.jsonl and each evaluation of curve.csv once, whatever ends its process;
and trackers in a coordinator."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from coordinator_client import make_group, run_text
from free_port import free_port
from tracker_runs import (
    LATE,
    Rows,
    device_seconds,
    figures,
    finish,
    in_process,
    row,
    rows,
    specify,
    start,
    wait_for,
    write_curve,
)

from scalerl_api import endpoints, wire
from scalerl_api.curve import curve_figures
from scalerl_api.load import SpecError, load_run, parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.trackers import TrackersSpec
from scalerl_coordinator import main
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.tracking import supervisor
from scalerl_coordinator.tracking.sink import flat, hyperparameters
from scalerl_coordinator.tracking.supervisor import Trackers, missing_package

OVER_COMPUTE = "held_out/reward_over_device_seconds"


def tensorboard_scalars(directory: Path) -> Rows:
    """What training has, by step."""
    found = tensorboard_events(directory)
    trained = {s: {n: v for n, v in row.items() if "/" not in n} for s, row in found.items()}
    return {step: row for step, row in trained.items() if row}


def tensorboard_curve(directory: Path) -> tuple[Rows, list[tuple[int, float]]]:
    """Evaluations by version; the reward over compute."""
    found = tensorboard_events(directory)
    curve = {v: {n: x for n, x in r.items() if "/" in n and n != OVER_COMPUTE} for v, r in found.items()}
    over = sorted((compute, row[OVER_COMPUTE]) for compute, row in found.items() if OVER_COMPUTE in row)
    return {version: row for version, row in curve.items() if row}, over


def tensorboard_events(directory: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    found: Rows = {}
    for tag in read.Tags()["scalars"]:
        steps = [event.step for event in read.Scalars(tag)]
        assert steps == sorted(steps), "TensorBoard drops what has a higher step than the next"
        assert tag == OVER_COMPUTE or len(steps) == len(set(steps)), "twice"
        for event in read.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return found


def as_float32(found: Rows) -> Rows:
    import numpy as np

    return {s: {name: float(np.float32(value)) for name, value in r.items()} for s, r in found.items()}


def test_tensorboard_equals_metrics_after_return(paths: RunPaths) -> None:
    shared = paths.root / "shared"
    specify(paths, tensorBoard={"directory": str(shared)})
    mine = shared / "test"
    mine.mkdir(parents=True)
    (mine / "events.out.tfevents.1.other").write_text("")
    files = RunFiles(paths)
    files.write_rows(rows(600), 600, whole=True)
    write_curve(paths, range(0, 600, 100))
    lines = rows(590) | {s: row(s, 0.25) for s in range(590, 602)}
    stages = iter(
        [
            lambda: files.write_rows(rows(590), 590, whole=True),
            lambda: files.write_rows(lines, 602),
            lambda: write_curve(paths, range(0, 601, 100)),
            lambda: write_curve(paths, [LATE, *range(0, 601, 100)]),
        ]
    )

    def wait(seconds: float) -> bool:
        stage = next(stages, None)
        if stage is not None:
            stage()
        return stage is None

    assert in_process(paths, "tensorBoard", wait) == [599, 589, 601]
    assert tensorboard_scalars(mine) == as_float32(lines)
    measured = {v: figures(v) for v in sorted([LATE, *range(0, 601, 100)])}
    curve, over_compute = tensorboard_curve(mine)
    assert curve == as_float32(measured)
    ended = sorted(measured, key=device_seconds)
    assert over_compute == [(device_seconds(v), as_float32(measured)[v]["held_out/reward"]) for v in ended]
    assert len(list(mine.iterdir())) == 2, "its own file of before is gone, others' are left alone"


def test_tensorboard_random_kills_write_each_step_once(paths: RunPaths) -> None:
    specify(paths, tensorBoard={})
    files, drawn = RunFiles(paths), random.Random(7)
    files.write_rows(rows(2000), 2000, whole=True)
    for kill in range(4):
        process = writing(paths)
        time.sleep(drawn.uniform(0, 0.3))
        process.kill()
        process.communicate()
        files.write_rows(rows(2001 + kill), 2001 + kill, whole=True)
        write_curve(paths, [*range(0, 2001, 100), *range(1950 - kill, 1950)])
    process = writing(paths)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert peak is not None
    assert int(peak[1]) < 300_000, "torch is installed here, and not loaded"
    assert finish(process)["step"] == 2003
    assert tensorboard_scalars(paths.tensorboard) == as_float32(rows(2004))
    measured = [*range(0, 2001, 100), *range(1947, 1950)]
    assert tensorboard_curve(paths.tensorboard)[0] == as_float32({v: figures(v) for v in measured})


def test_tracker_accepts_spec_of_earlier_release(paths: RunPaths) -> None:
    """On a cluster, where its operator keeps the spec."""
    RunFiles(paths).write_rows(rows(3), 3, whole=True)
    given = paths.root / "given.yaml"
    given.write_text(run_text(trackers={"tensorBoard": {}}, budget={"maxSteps": -1}))
    with pytest.raises(SpecError):
        load_run(given)
    assert finish(start(paths, "tensorBoard", SCALERL_RUN_FILE=str(given)))["step"] == 2
    assert tensorboard_scalars(paths.tensorboard) == as_float32(rows(3))


def writing(paths: RunPaths) -> subprocess.Popen[bytes]:
    """TensorBoard's process, once it has a file of its own."""
    before = set(paths.tensorboard.glob("*"))
    process = start(paths, "tensorBoard")
    wait_for(lambda: set(paths.tensorboard.glob("*")) - before, process)
    return process


def test_hyperparameters_exclude_secrets() -> None:
    template = {"env": [{"name": "WANDB_API_KEY", "value": "secret"}]}
    run = parse_run(run_text(podTemplate=template, coordinator={"podTemplate": template}), "test")
    found = dict(flat(hyperparameters(run)))
    assert found["recipe.loss.cispo.ratioCap"] == "5"
    assert "secret" not in json.dumps(found)


def test_missing_tracker_package_refuses_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TrackersSpec.model_validate({"wandb": {}})
    main._check_trackers(spec)
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_no_such_package")
    with pytest.raises(
        main.TrackerMissing, match=r"spec\.trackers\.wandb: the Python package .* is missing: pip"
    ):
        main._check_trackers(spec)


def test_missing_package_ignores_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scalerl_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_folder")
    assert "is missing" in str(missing_package("wandb"))


async def test_tracker_failure_is_logged_once_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_no_such_package")
    trackers = Trackers(TrackersSpec.model_validate({"wandb": {}}), backoff_seconds=(0.01,))
    trackers.start()
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(120):
            while trackers.status()[0].failures < 5:  # noqa: ASYNC110 - a count, not an event
                await asyncio.sleep(0.01)
        await trackers.close()
    assert "scalerl_no_such_package is missing" in trackers.status()[0].problem
    assert len(caplog.records) == 1


async def test_unreachable_tracker_does_not_stop_training(coordinator, client) -> None:
    """MLflow's server is away, and the coordinator is killed; TensorBoard gets every step and evaluation, also the last ones
    before the end."""
    uri = f"http://127.0.0.1:{free_port()}"
    trackers = {"tensorBoard": {}, "mlflow": {"uri": uri}}
    coordinator.paths.run_file.write_text(run_text(trackers=trackers, budget={"maxSteps": 100}))
    coordinator.start()
    stands: dict[str, wire.Tracker] = {}
    async with asyncio.timeout(120):
        while not (stands and stands["mlflow"].failures):
            await asyncio.sleep(0.1)
            stands = {tracker.name: tracker for tracker in (await client.status()).trackers}

    async def generate(version: int) -> None:
        """All that there is to generate with these weights: every second version is evaluated."""
        member = await client.register("g", coordinator.digest)
        await client.publish("t", version)
        await client.heartbeat(member, version)
        leases = (await client.lease(member, version, 64)).leases
        await client.push(member, [make_group(lease) for lease in leases])

    await client.hello("t")
    await generate(0)
    assert (await client.next("t", 0)).action is wire.NextAction.TRAIN
    await client.report("t", 0, {"loss": 0.5})
    assert stands["tensorBoard"].problem == ""
    assert uri.removeprefix("http://127.0.0.1:") in stands["mlflow"].problem
    async with client.session.get(coordinator.url + endpoints.METRICS) as response:
        text = await response.text()
    assert 'scalerl_coordinator_tracker_failures_total{tracker="tensorBoard"} 0.0' in text
    assert 'scalerl_coordinator_tracker_failures_total{tracker="mlflow"} 0.0' not in text
    coordinator.kill()
    coordinator.paths.run_file.write_text(run_text(trackers={"tensorBoard": {}}, budget={"maxSteps": 100}))
    coordinator.start()
    async with asyncio.timeout(120):
        while (await client.status()).trackers[0].step < 0:  # noqa: ASYNC110 - until it has what was there
            await asyncio.sleep(0.1)
    await client.report("t", 1, {"loss": 0.25})
    await generate(2)
    assert await asyncio.to_thread(coordinator.terminate) == 0
    lines = [json.loads(line) for line in coordinator.paths.metrics.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.5, 0.25]
    assert tensorboard_scalars(coordinator.paths.tensorboard) == as_float32(
        {line["step"]: line for line in lines}
    )
    evaluations = {int(row["version"]): row for row in curve_figures(coordinator.paths.curve.read_text())}
    assert list(evaluations) == [0, 2]
    assert tensorboard_curve(coordinator.paths.tensorboard)[0] == as_float32(
        {version: {f"held_out/{n}": v for n, v in row.items()} for version, row in evaluations.items()}
    )
    assert coordinator.log().count("tracker mlflow failed") == 1, coordinator.log()


def test_trackers_guide_examples_are_valid() -> None:
    guide = Path(__file__).parents[2] / "docs" / "trackers.md"
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.S)]
    assert len(examples) == 2
    for example in examples:
        assert parse_run(run_text(**example), "guide").spec.trackers.asked_for
