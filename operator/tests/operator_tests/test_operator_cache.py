"""Live copies: newest wins whatever the order of arrival, and every change wakes the run it concerns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_operator import names
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.kinds import KINDS

LONG = "a-run-with-a-name-" + "x" * 80


def thing(
    kind: str = "Pod", name: str = "p", *, version: int, run: str | None = "r", uid: str = "u1", **more: Any
) -> dict[str, Any]:
    labels = {} if run is None else {names.RUN: names.label_value(run)}
    return {
        "kind": kind,
        "apiVersion": KINDS[kind].api_version,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": labels,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        **more,
    }


def run_object(name: str = "r", *, version: int = 1, uid: str = "run-uid") -> dict[str, Any]:
    return thing("ScaleRLRun", name, version=version, run=None, uid=uid, spec={"model": {}})


Observe = Callable[[Cache, str | None, dict[str, Any]], None]


def as_object(cache: Cache, event: str | None, obj: dict[str, Any]) -> None:
    cache.observe(event, obj)


def as_json(cache: Cache, event: str | None, obj: dict[str, Any]) -> None:
    """As informers do; the items of a list have neither kind nor version."""
    kind, metadata = KINDS[obj["kind"]], obj["metadata"]
    raw = json.dumps({name: part for name, part in obj.items() if name not in ("kind", "apiVersion")})
    known = cache.observe_raw(event, kind, raw.encode())
    assert known == ((metadata["namespace"], metadata["name"]), metadata["resourceVersion"])


@pytest.fixture(params=[as_object, as_json])
def observe(request: pytest.FixtureRequest) -> Observe:
    see: Observe = request.param
    return see


@pytest.fixture
def woken() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def cache(woken: list[tuple[str, str]]) -> Cache:
    return Cache(woken.append)


def test_cache_returns_copies_of_a_run_and_its_objects(cache: Cache, observe: Observe) -> None:
    observe(cache, None, run_object())
    observe(cache, "ADDED", thing("Job", "r-trainer-1", version=2, status={"active": 1}))
    observe(cache, "ADDED", thing("Pod", "other", version=3, run="other"))
    assert cache.runs() == [("team", "r")]
    assert sorted(cache) == [
        ("Job", "team", "r-trainer-1"),
        ("Pod", "team", "other"),
        ("ScaleRLRun", "team", "r"),
    ]
    found = cache.run("team", "r")
    assert found is not None
    assert (found["kind"], found["apiVersion"]) == ("ScaleRLRun", KINDS["ScaleRLRun"].api_version)
    assert found["metadata"]["managedFields"] == [{"manager": "kubelet"}]
    owned = cache.owned("team", "r")
    assert set(owned) == {("Job", "r-trainer-1")}
    owned["Job", "r-trainer-1"]["status"]["active"] = 99
    job = cache.get("Job", "team", "r-trainer-1")
    assert job is not None
    assert job["status"] == {"active": 1}
    assert cache.run("team", "none") is None
    assert cache.owned("elsewhere", "r") == {}


@pytest.mark.parametrize("name", ["r", LONG])
def test_change_wakes_its_run_by_full_name(
    name: str, cache: Cache, observe: Observe, woken: list[tuple[str, str]]
) -> None:
    observe(cache, "ADDED", thing(version=5, run=name))
    assert woken == []  # no run to wake yet: the run's own event will
    observe(cache, "ADDED", run_object(name, version=6))
    observe(cache, "MODIFIED", thing(version=7, run=name))
    observe(cache, "DELETED", thing(version=8, run=name))
    observe(cache, "DELETED", run_object(name, version=9))
    assert woken == [("team", name)] * 4
    assert len(cache) == 0


def test_object_without_label_is_not_cached(cache: Cache, woken: list[tuple[str, str]]) -> None:
    cache.observe("ADDED", run_object(version=1))
    cache.observe("ADDED", thing(version=2, run=None))
    assert cache.owned("team", "r") == {}
    cache.observe("ADDED", thing("Job", "j", version=3))
    cache.observe("MODIFIED", thing("Job", "j", version=4, run=None))
    assert cache.owned("team", "r") == {}
    assert woken == [("team", "r")] * 3


def test_object_with_a_new_owner_wakes_both_runs(cache: Cache, woken: list[tuple[str, str]]) -> None:
    cache.observe("ADDED", run_object("a", version=1))
    cache.observe("ADDED", run_object("b", version=2, uid="b"))
    cache.observe("ADDED", thing("Job", "j", version=3, run="a"))
    woken.clear()
    cache.observe("MODIFIED", thing("Job", "j", version=4, run="b"))
    assert sorted(woken) == [("team", "a"), ("team", "b")]
    assert cache.owned("team", "a") == {}
    assert set(cache.owned("team", "b")) == {("Job", "j")}


def test_write_response_is_cached_and_its_event_wakes_nothing(
    cache: Cache, woken: list[tuple[str, str]]
) -> None:
    cache.observe("ADDED", run_object(version=1))
    woken.clear()
    cache.remember(thing("Job", "j", version=5, spec={"parallelism": 2}))
    assert set(cache.owned("team", "r")) == {("Job", "j")}
    cache.observe("ADDED", thing("Job", "j", version=5, spec={"parallelism": 2}))
    assert woken == []
    cache.observe("MODIFIED", thing("Job", "j", version=6, spec={"parallelism": 2}))
    assert woken == [("team", "r")]


def test_late_response_does_not_restore_a_deleted_object(cache: Cache) -> None:
    cache.observe("ADDED", thing("Job", "j", version=5))
    cache.observe("DELETED", thing("Job", "j", version=8))
    cache.remember(thing("Job", "j", version=7))
    assert cache.get("Job", "team", "j") is None
    cache.observe("ADDED", thing("Job", "j", version=9, uid="u2"))
    assert cache.get("Job", "team", "j") is not None


def test_version_is_of_an_object_or_of_its_deletion(cache: Cache) -> None:
    assert cache.version("Job", "team", "j") == -1
    cache.observe("ADDED", thing("Job", "j", version=5))
    assert cache.version("Job", "team", "j") == 5
    cache.observe("DELETED", thing("Job", "j", version=8))
    assert cache.version("Job", "team", "j") == 8


def test_deletions_are_not_remembered_for_ever() -> None:
    time = 0.0
    cache = Cache(lambda key: None, clock=lambda: time)
    for number in range(100):
        cache.observe("DELETED", thing("Pod", f"p{number}", version=10))
    time = 200.0
    cache.observe("DELETED", thing("Pod", "last", version=10))
    assert len(cache._tombstones) == 1


def test_list_drops_missing_objects_but_no_newer_ones(cache: Cache, woken: list[tuple[str, str]]) -> None:
    cache.observe(None, run_object(version=1))
    for name, version in (("gone", 10), ("newest", 20), ("there", 11), ("new", 25)):
        cache.observe("ADDED", thing("Pod", name, version=version, uid=name))
    cache.observe("ADDED", thing("Job", "j", version=12, uid="j"))
    woken.clear()
    assert cache.forget_missing("Pod", [("team", "there")], "20", namespace="elsewhere") == 0
    assert cache.forget_missing("Pod", [("team", "there")], "20") == 2
    assert {name for _, name in cache.owned("team", "r")} == {"there", "new", "j"}
    assert woken == [("team", "r")] * 2


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, int, str]], list[int]]:
    """The life of one name (several objects after each other), and an order in which its news arrive.

    News of one object arrive in order, each object's at its own pace: as kopf's one worker an object has it.
    """
    events: list[tuple[str, int, str]] = []
    version = 0
    for number in range(draw(st.integers(1, 3))):
        uid = f"u{number}"
        for step in range(draw(st.integers(1, 4))):
            version += draw(st.integers(1, 3))
            events.append(("ADDED" if step == 0 else "MODIFIED", version, uid))
        version += 1
        events.append(("DELETED", version, uid))
    if draw(st.booleans()):
        events.pop()
    by_uid: dict[str, list[int]] = {}
    for index, (_, _, uid) in enumerate(events):
        by_uid.setdefault(uid, []).append(index)
    order: list[int] = []
    while any(by_uid.values()):
        uid = draw(st.sampled_from([uid for uid, left in by_uid.items() if left]))
        order.append(by_uid[uid].pop(0))
    return events, order


@given(histories(), st.data())
def test_cache_converges_for_any_order_of_events(
    history: tuple[list[tuple[str, int, str]], list[int]], data: st.DataObject
) -> None:
    events, order = history
    woken: list[tuple[str, str]] = []
    cache = Cache(woken.append)
    cache.observe("ADDED", run_object(version=1))
    for index in order:
        event, version, uid = events[index]
        news = thing("Job", "j", version=version + 1, uid=uid)
        if event != "DELETED" and data.draw(st.booleans()):
            cache.remember(news)
        data.draw(st.sampled_from([as_object, as_json]))(cache, event, news)
    last_event, last_version, last_uid = events[-1]
    kept = cache.get("Job", "team", "j")
    if last_event == "DELETED":
        assert kept is None
        assert cache.owned("team", "r") == {}
    else:
        assert kept is not None
        assert (kept["metadata"]["uid"], kept["metadata"]["resourceVersion"]) == (
            last_uid,
            str(last_version + 1),
        )
        assert set(cache.owned("team", "r")) == {("Job", "j")}
