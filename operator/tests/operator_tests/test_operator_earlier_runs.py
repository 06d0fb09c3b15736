"""Finished runs of a namespace as a prior of its forecasts: which of them count, newest first."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestServer
from coordinator_statuses import evaluations, flat_curve, status
from decision_service import DecisionService

from operator_tests.manifests import UID, cluster_run
from scalerl_api.curve import curve_csv
from scalerl_api.forecast import MAX_EARLIER_RUNS
from scalerl_api.status import Phase, RunStatus
from scalerl_autoscaling.earlier_runs import MAX_EXAMINED
from scalerl_autoscaling.models import Generators
from scalerl_autoscaling.replay import verify
from scalerl_curvefit.sidecar.app import Sidecar
from scalerl_operator.controller.claimed_runs import ReconcileContext, reconciler
from scalerl_operator.controller.cluster_autoscaler import FinishedRuns
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.cache import Cache
from scalerl_operator.manifests.scope import Images
from scalerl_operator.manifests.storage import curve_config_map
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.settings import Settings

REWARDS = [0.2 + 0.01 * i for i in range(12)]
TABLE = curve_csv(evaluations(REWARDS))


class Namespace:
    """A cache with runs of a namespace."""

    def __init__(self) -> None:
        self.cache = Cache(lambda key: None)
        self._version = 0

    def add(self, name: str, *, phase: str = "Completed", end: int = 0, **changes: Any) -> None:
        """table: of its curve, None for no ConfigMap. status, namespace: of its object."""
        uid = changes.pop("uid", f"uid-{name}")
        table, status = changes.pop("table", TABLE), changes.pop("status", {})
        namespace = changes.pop("namespace", "ml")
        made = cluster_run(**changes)
        made = made.model_copy(
            update={"metadata": made.metadata.model_copy(update={"name": name, "namespace": namespace})}
        )
        manifest = made.to_manifest()
        manifest["metadata"] |= {"uid": uid}
        written = RunStatus(phase=Phase(phase), completion_time=f"2026-08-01T{end:06d}").to_object()
        manifest["status"] = written | status
        self.put(manifest)
        if table is not None:
            curve = curve_config_map(made, uid, evaluations(REWARDS))
            curve["data"] = {"curve.csv": table}
            curve["metadata"]["uid"] = f"curve-{uid}"
            self.put(curve)

    def put(self, obj: dict[str, Any]) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.cache.observe("ADDED", obj)

    async def names(self) -> list[str]:
        found = await FinishedRuns(self.cache, "ml", UID)(cluster_run().spec)
        return [one.name for one in found]


async def test_earlier_runs_are_ordered_newest_first() -> None:
    there = Namespace()
    there.add("completed", end=1)
    there.add("failed", phase="Failed", end=3)
    there.add("newest", end=4, seed=7, recipe={"promptsPerStep": 2})
    for phase in ("Pending", "Preparing", "Running", "Finishing", "Suspending", "Suspended"):
        there.add(phase.lower(), phase=phase)
    there.add("itself", uid=UID)
    there.add("elsewhere", namespace="other-team")
    there.add("another-model", model={"scratch": {"layers": 3}})
    there.add("no-curve", phase="Failed", table=None)
    there.add("failed-at-its-start", phase="Failed", table=curve_csv(evaluations([0.2])))
    assert await there.names() == ["newest", "failed", "completed"]


async def test_earlier_run_counts_by_its_executed_spec() -> None:
    there = Namespace()
    ran = RunStatus(accepted_spec=json.dumps(cluster_run().to_manifest()["spec"])).to_object()
    there.add("edited", model={"scratch": {"layers": 3}}, status={"acceptedSpec": ran["acceptedSpec"]})
    assert await there.names() == ["edited"]


@pytest.mark.parametrize(
    "garbage",
    [
        {"table": "no curve at all"},
        {"table": TABLE.replace("0.25", "a quarter")},
        {"table": TABLE.replace("\n0,", "\n" + "9" * 400 + ",")},
        {"table": ""},
        {"status": {"acceptedSpec": "{"}},
        {"status": {"acceptedSpec": "[]"}},
        {"status": {"acceptedSpec": '{"model": 1, "task": []}'}},
        {"status": {"completionTime": None}, "table": "\x00"},
    ],
)
async def test_garbage_is_excluded_and_reported_once(
    garbage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    there = Namespace()
    there.add("good", end=1)
    there.add("bad", end=2, **garbage)
    with caplog.at_level("INFO"):
        assert await there.names() == ["good"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        "namespace ml: 1 finished run may be a prior of the forecast: good; 1 left out: bad ("
    )


async def test_curve_of_a_namesake_is_not_used() -> None:
    there = Namespace()
    there.add("again", uid="first")
    there.add("again", uid="second", table=None)
    assert await there.names() == []


async def test_deleted_earlier_run_is_left_out() -> None:
    there = Namespace()
    there.add("stays")
    there.add("goes", end=1)
    reader = FinishedRuns(there.cache, "ml", UID)
    newest = await reader._newest()
    assert newest == ["goes", "stays"]
    there.cache.observe("DELETED", there.cache.run("ml", "goes") or {})
    assert [name for name, _ in reader._loaders(newest)] == ["stays"]
    assert await there.names() == ["stays"]


async def test_thousand_finished_runs_are_bounded() -> None:
    there = Namespace()
    there.add("run-0")
    there.add("other-0", model={"scratch": {"layers": 3}})
    objects = [there.cache.get(kind, "ml", name) for kind, _, name in there.cache]
    for i in range(1, 1000):
        # The newest 120 are of another model, then one of each kind in turns.
        which = "other-0" if i >= 880 or i % 2 else "run-0"
        for obj in objects:
            assert obj is not None
            if obj["metadata"]["name"].startswith(which):
                text = json.dumps(obj).replace(which, f"{which[:-2]}-{i}")
                copy = json.loads(text)
                if "status" in copy:
                    copy["status"]["completionTime"] = f"2026-08-01T{i:06d}"
                there.put(copy)
    found = await there.names()
    assert len(found) == (MAX_EXAMINED - 120) // 2
    assert found[:2] == ["run-878", "run-876"]
    there = Namespace()
    for i in range(MAX_EARLIER_RUNS + 10):
        there.add(f"run-{i}", end=i)
    found = await there.names()
    assert found == [f"run-{i}" for i in range(59, 9, -1)]


async def _without_uid(call: Callable[..., Awaitable[Any]], uid: str, *arguments: Any) -> Any:
    return await call(*arguments)


async def test_forecast_request_has_runs_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    there, api, woken = Namespace(), DecisionService(), asyncio.Event()
    sidecar = TestServer(Sidecar().application())
    await sidecar.start_server()
    curve = flat_curve()
    there.add("before", table=curve_csv(evaluations([p.reward for p in curve] + [0.6] * 60)))
    settings = Settings(
        images=Images("trainer:1", "generator:1", "coordinator:1"),
        sidecar_url=str(sidecar.make_url("/")).rstrip("/"),
    )
    parts = ReconcileContext(settings, cast(Any, api), there.cache, Metrics(), lambda key: woken.set())
    reconcilers: list[Reconciler] = []

    def recorded(*arguments: Any, **options: Any) -> Reconciler:
        reconcilers.append(Reconciler(*arguments, **options))
        return reconcilers[-1]

    monkeypatch.setattr("scalerl_operator.controller.claimed_runs.Reconciler", recorded)
    async with reconciler(parts):
        run = cluster_run(autoscaling={"mode": "Advisory"}, budget={"maxSeconds": 1_000_000})
        made = cast(Any, reconcilers[0])
        for name in ("decisions", "record_decision"):
            monkeypatch.setattr(made.coordinators, name, functools.partial(_without_uid, getattr(api, name)))
        autoscaler = made._autoscaler(run, UID)
        for _ in ("opens the record", "asks"):
            woken.clear()
            autoscaler.report(run.spec, status(curve), Generators(wanted=1, ready=1))
            await asyncio.wait_for(woken.wait(), 120)
        autoscaler.close()
    await sidecar.close()
    (line,), differences = verify(api.content())
    assert differences == []
    assert line.observation.forecast is not None
    assert [use.name for use in line.observation.forecast.earlier or []] == ["before"]
