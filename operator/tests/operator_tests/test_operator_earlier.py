"""Finished runs as a prior: which of them count, which of their points, and that they are read once."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import Field

from operator_tests.children import run_spec
from operator_tests.decision_service import DecisionService
from operator_tests.manifests import UID, cluster_run
from operator_tests.scaling import answer, chain, evaluations, flat_curve, run, seen, spec, status
from operator_tests.watched import Watched
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.curve import curve_csv
from scalerl_api.forecast import MAX_EARLIER_RUNS, EarlierRun, EarlierUse, ForecastRequest, Points
from scalerl_api.load import to_yaml
from scalerl_api.spec import RunSpec
from scalerl_api.status import Phase, RunStatus
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_history import ALWAYS_COUNTED, NOT_COUNTED, rules
from scalerl_operator.autoscaling.decision_log import as_recorded
from scalerl_operator.autoscaling.earlier_runs import MAX_EXAMINED, MAX_POINTS, earlier_run, evenly
from scalerl_operator.autoscaling.forecast_request import implausibility
from scalerl_operator.autoscaling.models import Generators, State
from scalerl_operator.autoscaling.replay import replay_under, verify
from scalerl_operator.autoscaling.vote import prior_note
from scalerl_operator.controller.claimed_runs import Parts, reconciler
from scalerl_operator.controller.cluster_autoscaler import FinishedRuns
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.cache import Cache
from scalerl_operator.local.run_directory import DirectoryRuns
from scalerl_operator.manifests.scope import Images
from scalerl_operator.manifests.storage import curve_config_map
from scalerl_operator.metrics import Metrics
from scalerl_operator.settings import Settings

REWARDS = [0.2 + 0.01 * i for i in range(12)]
TABLE = curve_csv(evaluations(REWARDS))
# --- one run ----------------------------------------------------------------------------------------


def test_evaluations_are_those_that_lie_on_one_curve() -> None:
    points = evaluations(REWARDS)
    points[0:3] = [replace(p, set_digest="another set") for p in points[0:3]]
    points[4] = replace(points[4], mixed_versions=True)
    points[5] = replace(points[5], reward=float("nan"))
    found = earlier_run("a", curve_csv(points))
    assert found is not None
    assert found.points.eval_version == "first set"
    kept = [points[i] for i in (3, *range(6, 12))]
    assert found.points.compute == [p.work_tokens for p in kept]
    assert found.points.reward == [p.reward for p in kept]


def test_run_failed_at_its_start_is_no_earlier_run() -> None:
    assert earlier_run("a", curve_csv(evaluations(REWARDS[:4]))) is None, "the first is at compute 0"
    assert earlier_run("a", curve_csv(evaluations(REWARDS[:5]))) is not None
    assert earlier_run("a", curve_csv([])) is None


def test_long_run_is_thinned_out() -> None:
    found = earlier_run("a", curve_csv(evaluations([0.5] * 50_000)))
    assert found is not None
    compute = found.points.compute
    assert len(compute) <= MAX_POINTS
    assert (compute[0], compute[-1]) == (0.0, 49_999 * 1e5)
    assert sum(c > compute[-1] / 2 for c in compute) >= 6, (
        "evenly in log compute: 100 points over 16 doublings"
    )


@given(
    st.lists(st.integers(1, 10**12), min_size=2, unique=True).map(sorted), st.integers(3, 100), st.booleans()
)
def test_evenly_keeps_the_ends(compute: list[int], most: int, zero: bool) -> None:
    compute = [0, *compute] if zero else compute
    kept = evenly(compute, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(compute) - 1)
    assert len(compute) > most or len(kept) == len(compute)


# --- on a cluster -----------------------------------------------------------------------------------


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


async def test_forecast_request_has_runs_from_the_cache(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, api, woken = Namespace(), DecisionService(), asyncio.Event()
    curve = flat_curve()
    there.add("before", table=curve_csv(evaluations([p.reward for p in curve] + [0.6] * 60)))
    settings = Settings(images=Images("trainer:1", "generator:1", "coordinator:1"), sidecar_url=url)
    parts = Parts(settings, cast(Any, api), there.cache, Metrics(), lambda key: woken.set())
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
        autoscaler = made._observer.autoscaler(run, UID)
        for _ in ("opens the record", "asks"):
            woken.clear()
            autoscaler.report(run.spec, status(curve), Generators(wanted=1, ready=1))
            await asyncio.wait_for(woken.wait(), 120)
        autoscaler.close()
    (line,), differences = verify(api.content())
    assert differences == []
    assert line.observation.forecast is not None
    assert [use.name for use in line.observation.forecast.earlier or []] == ["before"]


# --- on this machine --------------------------------------------------------------------------------


def finished(root: Path, *, table: str = TABLE, end: float = 1e9, **changes: Any) -> Path:
    root.mkdir()
    (root / "run.yaml").write_text(to_yaml(run_spec(**changes).to_manifest()))
    (root / "curve.csv").write_text(table)
    (root / "summary.json").write_text("{}")
    os.utime(root / "summary.json", (end, end))
    (root / "lock").write_text("999999999\n")
    return root


async def test_finished_runs_beside_a_runs_directory(tmp_path: Path) -> None:
    own = finished(tmp_path / "tiny-9")
    finished(tmp_path / "tiny-1", end=1e9)
    finished(tmp_path / "tiny-2", end=2e9)
    finished(tmp_path / "another-model", model={"scratch": {"layers": 3}})
    finished(tmp_path / "no-run-file").joinpath("run.yaml").unlink()
    finished(tmp_path / "no-curve").joinpath("curve.csv").unlink()
    finished(tmp_path / "binary").joinpath("curve.csv").write_bytes(b"\xff\xfe")
    finished(tmp_path / "works-still").joinpath("lock").write_text(f"{os.getpid()}\n")
    finished(tmp_path / "was-killed").joinpath("summary.json").unlink()
    (tmp_path / "a-file").write_text("")
    (tmp_path / "latest").symlink_to(tmp_path / "tiny-2")
    said: list[str] = []
    found = await DirectoryRuns(own, said.append)(run_spec().spec)
    assert [one.name for one in found] == ["tiny-2", "tiny-1"]
    (text,) = said
    assert text.startswith("2 finished runs may be a prior of the forecast: tiny-2, tiny-1; 4 left out: ")
    assert "another-model (model.scratch.layers is 3, this run's is" in text


async def test_first_run_has_no_earlier_runs(tmp_path: Path) -> None:
    said: list[str] = []
    assert await DirectoryRuns(finished(tmp_path / "tiny-1"), said.append)(run_spec().spec) == []
    assert said == []


# --- the autoscaler ---------------------------------------------------------------------------------


class Reader:
    def __init__(self, runs: list[EarlierRun] | None) -> None:
        self.runs, self.calls = runs, 0

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        self.calls += 1
        if self.runs is None:
            raise OSError("no such thing")
        return self.runs


def as_earlier(name: str, level: float = 0.0) -> EarlierRun:
    rewards = [p.reward + level for p in flat_curve()]
    found = earlier_run(name, curve_csv(evaluations(rewards + rewards[-10:] * 6)))
    assert found is not None
    return found


def uses(watched: Watched) -> list[Any]:
    lines, differences = verify(watched.path.read_bytes())
    assert differences == []
    forecast = lines[-1].observation.forecast
    assert forecast is not None
    return list(forecast.earlier or [])


async def test_earlier_runs_are_read_once_per_request(tmp_path: Path, url: str) -> None:
    reader, curve = Reader([as_earlier("like"), as_earlier("unlike", -0.15)]), flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=reader)
    for count in (30, 40):
        await watched.must(curve[:count])
    like, unlike = uses(watched)
    assert (like.name, like.weight > 0.5, like.reason) == ("like", True, "")
    assert (unlike.name, unlike.weight < like.weight / 2) == ("unlike", True)
    assert unlike.reason == "its rewards so far differ from this run's by 0.15 at equal compute"
    reader.runs = [as_earlier("ended-meanwhile")]
    step = await watched.must(curve[:41])
    assert reader.calls == 1
    assert [use.name for use in uses(watched)] == ["like", "unlike"]
    assert step.decision.state is State.STOP
    assert step.decision.reasons[1].startswith("3 new evaluations in a row agree, with ")
    assert " as prior: like" in step.decision.reasons[1]
    # Without a prior, under way: asked again, and without.
    watched.scaler.spec = run({"stopAfter": 2, "prior": "None"}, budget={"maxSeconds": 1_000_000})
    await watched.must(curve[:41])
    assert uses(watched) == []


async def test_failure_to_read_them_costs_no_forecast(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, curve = Reader(None), flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=reader)
    for count in (30, 40):
        await watched.must(curve[:count])
    assert uses(watched) == []
    assert reader.calls == 1
    (record,) = caplog.records
    assert "the forecast is made without them as a prior" in record.getMessage()


async def test_other_policy_without_prior_requests_forecast(tmp_path: Path, url: str) -> None:
    curve = flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=Reader([as_earlier("like")]))
    await watched.must(curve[:40])
    lines, _ = verify(watched.path.read_bytes())
    asked: list[ForecastRequest] = []

    def forecast(request: ForecastRequest) -> Any:
        asked.append(request)
        return answer(), ""

    list(replay_under(spec(stopAfter=2), lines, forecast))
    assert asked == []
    list(replay_under(spec(stopAfter=2, prior="None"), lines, forecast))
    assert [request.earlier for request in asked] == [[]]


# --- policy, spec and answer ------------------------------------------------------------------------


def with_uses(*weights: float) -> Any:
    made = [EarlierUse(name=f"run-{i}", weight=w, reason="") for i, w in enumerate(weights)]
    return replace(answer(0.01), earlier=made)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((), ""),
        ((0.05, 0.0), ""),
        ((0.05, 0.9), "with 1 earlier run as prior: run-1"),
        ((0.5, 0.9, 0.7), "with 3 earlier runs as prior: run-1, run-2, run-0"),
        ((1.0,) * 7, "with 7 earlier runs as prior: run-0, run-1, run-2, run-3, run-4 and 2 more"),
    ],
)
def test_stop_names_the_runs_that_counted(weights: tuple[float, ...], text: str) -> None:
    assert prior_note(with_uses(*weights)) == text
    observations = [seen(200 + 10 * i, forecast=with_uses(*weights)) for i in range(2)]
    last = chain(decide, spec(stopAfter=2), observations)[-1]
    assert last.state is State.STOP
    assert last.reasons[1] == ", ".join(filter(None, ["2 new evaluations in a row agree", text]))


def test_request_differs_by_prior_except_the_default() -> None:
    assert rules(spec()) == "min_gain=0.04 horizon=2 stop_after=3"
    assert rules(spec(prior="None")) == "min_gain=0.04 horizon=2 stop_after=3 prior=None"
    assert as_recorded(spec(prior="None"))["prior"] == "None"


def test_unknown_field_restarts_the_count() -> None:
    class Later(AutoscalingSpec):
        patience: int = 5
        marks: list[int] = Field(default_factory=list)

    assert rules(Later()) == rules(AutoscalingSpec())
    assert rules(Later(patience=6)) == rules(AutoscalingSpec()) + " patience=6"
    assert {*ALWAYS_COUNTED, *NOT_COUNTED} == AutoscalingSpec.model_fields.keys() - {"prior", "late_rises"}


def asked_with(*names: str) -> ForecastRequest:
    points = Points(compute=[1e5 * (i + 1) for i in range(20)], reward=[0.5] * 20)
    runs = [EarlierRun(name=name, points=points) for name in names]
    return ForecastRequest(points=replace(points, compute=[5e4 * (i + 1) for i in range(20)]), earlier=runs)


@pytest.mark.parametrize(
    ("weights", "names", "says"),
    [
        ((0.0, 1.0), ("run-0", "run-1"), ""),
        ((0.5,), ("run-0", "run-1"), "it weighs the earlier runs run-0, asked with run-0, run-1"),
        ((0.5, 0.5), ("run-1", "run-0"), "it weighs the earlier runs run-0, run-1, asked with run-1, run-0"),
        ((0.5,), (), "it weighs the earlier runs run-0, asked with (none)"),
        ((0.5, 1.5), ("run-0", "run-1"), "the weight of the earlier run run-1 is 1.5"),
        ((float("nan"),), ("run-0",), "the weight of the earlier run run-0 is nan"),
    ],
)
def test_response_weighs_exactly_the_requested_runs(
    weights: tuple[float, ...], names: tuple[str, ...], says: str
) -> None:
    assert implausibility(asked_with(*names), with_uses(*weights)) == says


def test_forecast_without_earlier_runs_is_rejected() -> None:
    assert implausibility(asked_with(), answer()) == ""
    assert implausibility(asked_with("a"), answer()) == "it weighs the earlier runs (none), asked with a"
