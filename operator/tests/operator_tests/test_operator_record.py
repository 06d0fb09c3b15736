"""The record of a deleted run."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from scalerl_operator.controller.parts import Run
from scalerl_operator.controller.run_object import write_record
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.manifests import run_record as module
from scalerl_operator.manifests.run_record import (
    EVENTS_KEY,
    POINTS_LEFT_OUT,
    RECORDED_CURVE_KEY,
    RUN_KEY,
    record,
)
from scalerl_operator.names import ENDED, RUN, RUN_UID, Names


def run(**status: Any) -> dict[str, Any]:
    metadata = {
        "name": "math",
        "namespace": "team",
        "uid": "0123456789",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "1"},
    }
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": metadata,
        "spec": {"seed": 1},
        "status": status,
    }


def test_record_has_no_owner_and_is_none_of_the_runs_objects() -> None:
    made = record(run(phase="Failed"), [], "")
    assert made["metadata"]["name"] == "math-ended-01234567"
    assert made["metadata"]["labels"][ENDED] == "math"
    assert not {RUN, RUN_UID} & made["metadata"]["labels"].keys()
    assert "ownerReferences" not in made["metadata"]
    kept = json.loads(made["data"][RUN_KEY])
    assert kept["metadata"]["annotations"] == {"kept": "1"}
    assert "managedFields" not in kept["metadata"]
    assert kept["status"] == {"phase": "Failed"}
    assert RECORDED_CURVE_KEY not in made["data"]


def test_long_curve_keeps_first_and_last_point() -> None:
    rows = [f"{i},0.{i:06d}{'5' * 60}\n" for i in range(20_000)]
    data = record(run(), [], "compute,reward\n" + "".join(rows))["data"]
    header, *kept = data[RECORDED_CURVE_KEY].splitlines(keepends=True)
    assert header == "compute,reward\n"
    assert (kept[0], kept[-1]) == (rows[0], rows[-1])
    assert len(kept) == len(set(kept)) == 20_000 - int(data[POINTS_LEFT_OUT])
    assert 0.8 * module.MAX_CURVE_BYTES < len(data[RECORDED_CURVE_KEY]) <= module.MAX_CURVE_BYTES


def test_record_fits_into_an_object_with_the_longest_of_everything() -> None:
    long = run(
        acceptedSpec="x" * 262_144,
        trainedSpec="x" * 262_144,
        recipe=[{"field": "f", "value": "v" * 256}] * 64,
    )
    long["spec"] = {"text": "y" * 262_144}
    events = [
        {"reason": "R", "message": "m" * 1024, "lastTimestamp": f"2026-01-01T00:{i // 60:02}:{i % 60:02}Z"}
        for i in range(300)
    ]
    data = record(long, events, "compute,reward\n" + "1,0.5\n" * 200_000)["data"]
    assert sum(map(len, data.values())) < 900 * 1024
    assert not {"acceptedSpec", "trainedSpec"} & json.loads(data[RUN_KEY])["status"].keys()
    kept = json.loads(data[EVENTS_KEY])
    assert len(kept) == module.MAX_EVENTS
    assert kept[-1]["time"] == "2026-01-01T00:04:59Z"


class Api:
    """Takes records; ``failure``: of the list of records."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.applied: list[Any] = []

    async def list(self, *_: Any, **__: Any) -> list[Any]:
        return []

    async def list_at(self, *_: Any, **__: Any) -> tuple[list[Any], str]:
        if self.failure is not None:
            raise self.failure
        return [], "1"

    async def apply(self, obj: Any) -> None:
        self.applied.append(obj)


def going(curve: dict[str, Any]) -> Run:
    metadata = {"name": "math-curve", "namespace": "team", "labels": {RUN_UID: "0123456789"}}
    curve = {"kind": "ConfigMap", "metadata": metadata, **curve}
    return Run(run(), {("ConfigMap", Names("math").curve): curve}, 1000.0)


@pytest.mark.parametrize("curve", [{}, {"data": None}, {"data": "no table"}])
async def test_curve_that_cannot_be_read_keeps_no_run(
    curve: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "owns", lambda *_: True)
    api = Api()
    await write_record(cast(KubeApi, api), going(curve))
    assert len(api.applied) == (curve.get("data") is None)


@pytest.mark.parametrize("failure", [errors.Unreachable("gone"), KeyError("metadata")])
async def test_record_is_written_once_although_old_ones_are_not_found(failure: Exception) -> None:
    api = Api(failure)
    await write_record(cast(KubeApi, api), going({}))
    assert len(api.applied) == 1
    with pytest.raises(errors.Fenced):
        await write_record(cast(KubeApi, Api(errors.Fenced("no"))), going({}))
