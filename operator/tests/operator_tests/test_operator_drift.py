from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_tests.manifests import cluster_run, example, rendered
from scalerl_operator.build import secret
from scalerl_operator.controller.drift import differs
from scalerl_operator.kube.types import Object

GPU = cluster_run(
    generator={"devices": 2, "cpuThreads": 4},
    trainer={
        "devices": 1,
        "podTemplate": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "z"}]}
            },
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "2048Mi"}}],
        },
    },
)
OBJECTS = [*rendered(example("tiny/run-kubernetes.yaml")).values(), *rendered(GPU).values()]
IDS = [f"{n}-{o['kind']}" for n, o in enumerate(OBJECTS)]
KEYED = ("containers", "env", "volumes", "volumeMounts", "ports", "ownerReferences", "imagePullSecrets")

Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths to all scalars and empty containers."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    if not isinstance(value, dict | list) or not value:
        yield path
    for key, child in children:
        yield from leaves(child, (*path, key))


def parent(obj: Object, path: Path) -> Any:
    value: Any = obj
    for step in path[:-1]:
        value = value[step]
    return value


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case _:
            return "something else"


@pytest.mark.parametrize("obj", OBJECTS, ids=IDS)
def test_every_changed_and_every_missing_leaf_is_found(obj: Object) -> None:
    for path in leaves(obj):
        if path[0] in ("apiVersion", "kind"):
            continue
        live = copy.deepcopy(obj)
        parent(live, path)[path[-1]] = changed(parent(obj, path)[path[-1]])
        assert differs(obj, live), path
        if isinstance(path[-1], str):
            live = copy.deepcopy(obj)
            del parent(live, path)[path[-1]]
            assert differs(obj, live), path


def with_more(value: Any, chance: random.Random, name: str = "") -> Any:
    """As an API server and others give it back: more fields, more items of keyed lists, in another order."""
    if isinstance(value, dict):
        more = {key: with_more(child, chance, key) for key, child in value.items()}
        if chance.random() < 0.5:
            more[f"added-{chance.random()}"] = chance.choice(["x", 1, {"a": []}, [1]])
        return more
    if isinstance(value, list):
        items = [with_more(item, chance) for item in value]
        keyed = name in KEYED and not (
            name == "ports" and "targetPort" not in value[0] and "name" not in value[0]
        )
        if keyed:
            extra = {"name": "theirs", "mountPath": "/theirs", "uid": "theirs", "containerPort": 1, "port": 1}
            items += [extra] * chance.randint(0, 1)
            chance.shuffle(items)
        if name == "tolerations":
            items.insert(0, {"key": "node.kubernetes.io/not-ready"})
        return items
    return value


@given(st.sampled_from(OBJECTS), st.integers())
def test_what_others_add_and_the_order_of_keyed_lists_do_not_matter(obj: Object, seed: int) -> None:
    assert differs(obj, with_more(obj, random.Random(seed))) is None


@given(st.sampled_from(OBJECTS), st.integers(), st.data())
def test_a_change_is_found_among_what_others_added(obj: Object, seed: int, data: st.DataObject) -> None:
    live = with_more(obj, random.Random(seed))
    for name, value in obj["metadata"]["labels"].items():
        assert live["metadata"]["labels"][name] == value
    name = data.draw(st.sampled_from(sorted(obj["metadata"]["labels"])))
    live["metadata"]["labels"][name] += "x"
    assert differs(obj, live) == (
        f"metadata.labels.{name} is {live['metadata']['labels'][name]!r}, not {obj['metadata']['labels'][name]!r}"
    )


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"resources": {"requests": {"memory": "1024Mi", "cpu": 1}}}, {"resources": {"requests": {"memory": "1Gi", "cpu": "1"}}}),
        ({"emptyDir": {"sizeLimit": "0.5Gi"}}, {"emptyDir": {"sizeLimit": "512Mi"}}),
        ({"volumeMounts": [{"mountPath": "/a", "readOnly": False}]}, {"volumeMounts": [{"mountPath": "/a"}]}),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}),
        ({"affinity": None, "nodeSelector": {}, "args": []}, {}),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "TCP"}]}),
        ({"finalizers": ["ours"]}, {"finalizers": ["theirs", "ours"]}),
    ],
)  # fmt: skip
def test_written_otherwise_is_not_different(wanted: Object, live: Object) -> None:
    assert differs(wanted, live) is None


@pytest.mark.parametrize(
    ("wanted", "live", "said"),
    [
        ({"a": 1}, {"a": True}, "a is True, not 1"),
        ({"a": 0}, {}, "a is not there, not 0"),
        ({"a": False}, {}, "a is not there, not False"),
        ({"emptyDir": {}}, {"hostPath": {"path": "/"}}, "emptyDir is not there, not {}"),
        ({"labels": {"a": "1"}}, {"labels": {"a": "1000m"}}, "labels.a is '1000m', not '1'"),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "900m"}}, "requests.cpu is '900m', not '1'"),
        ({"args": ["a"]}, {"args": ["a", "b"]}, "args[1] is 'b', and is not wanted"),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}, "args[0] is 'b', not 'a'"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": []}, "env[A] is not there, not {'name': 'A', 'value': '1'}"),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, "tolerations is [{'key': 'b'}], not {'key': 'a'}"),
        ({"x": "y" * 99}, {}, f"x is not there, not '{'y' * 58}…"),
        ({"spec": {"x": "y" * 50}}, {"spec": 1}, f"spec is 1, not {{'x': '{'y' * 50}'}}"),
    ],
)  # fmt: skip
def test_what_is_different_is_said(wanted: Object, live: Object, said: str) -> None:
    assert differs(wanted, live) == said


def test_a_token_is_never_said() -> None:
    wanted = secret(cluster_run(), "u", "hush")
    live = copy.deepcopy(wanted)
    live["data"]["token"] = "bm9pc2U="
    assert differs(wanted, live) == "data.token is different"


def test_a_field_that_is_no_longer_wanted_is_found() -> None:
    before = rendered(cluster_run(podTemplate={"nodeSelector": {"pool": "a"}}))["Deployment/generator"]
    after = rendered(cluster_run())["Deployment/generator"]
    found = differs(after, before)
    assert found
    assert found.startswith("metadata.annotations.scalerl.dev/rendered")
