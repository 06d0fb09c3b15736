"""Edits with which a role does not start, while a run trains on a real kubelet: it is held, or waits with the reason; its revert goes on.

One run goes through all of them and then to its end: no step and no group is lost, and none is counted twice. Every field, with
pods that the test ends: ``test_failing_edits.py``. In the default tier, ``test_runs.py`` has one such edit.
"""

from __future__ import annotations

import csv
import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import ROOT, Object, Run, chart, say, until
from journal_audit import JournalCopy, audit
from runs import small_spec
from testcluster import Cluster

from scalerl_api.paths import RunPaths

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

NAMESPACE, NAME, COMPLETIONS, EVERY = (
    "failing-edits",
    "edited",
    4,
    small_spec()["spec"]["checkpoint"]["everySteps"],
)
EXAMPLE = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())["spec"]
PODS = EXAMPLE["podTemplate"]
LOST_DATA = {"name": "data", "emptyDir": {}}
HELD, LINE = ("Suspended", "True", "EditFailed"), "revert or fix the edit of "


@dataclass(frozen=True)
class Failing:
    """An edit, as a merge patch of the spec.

    revert: the patch that takes it back.
    then: type, status and reason of the condition that tells it.
    says: parts of that condition's message.
    trains_on: the other pods continue.
    saves: the trainer writes a checkpoint first. It has the coordinator's state, so without a coordinator none is written.
    """

    name: str
    patch: Object
    revert: Object
    then: tuple[str, str, str]
    says: tuple[str, ...]
    trains_on: bool = False
    saves: bool = True

    def __str__(self) -> str:
        return self.name


def pods(name: str, **fields: Any) -> tuple[str, Object, Object]:
    """An edit of ``podTemplate``."""
    return name, {"podTemplate": fields}, {"podTemplate": {name: PODS.get(name) for name in fields}}


def of_role(name: str, role: str, **fields: Any) -> tuple[str, Object, Object]:
    """An edit of a role's section."""
    return name, {role: fields}, {role: dict.fromkeys(fields)}


def memory(amount: str) -> Object:
    return {"resources": {"requests": {"memory": amount}, "limits": {"memory": amount}}}


MOUNT, ENV = [{"name": "data", "mountPath": "/dat", "readOnly": True}], "podTemplate.env"
SECRET = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "token"}}}
CLAIM = {"name": "more", "persistentVolumeClaim": {"claimName": "nowhere"}}
GARBLED = {"name": "data", "configMap": {"name": "garbled"}}
WAITS, DEGRADED = ("Prepared", "False"), ("Degraded", "True")

EDITS = (
    Failing(
        *pods("mount path", volumeMounts=MOUNT),
        HELD,
        ("BadInput: task.jsonl.path: ", f"{LINE}spec.podTemplate.volumeMounts.0.mountPath"),
    ),
    Failing(
        *of_role("no such image", "images", trainer="localhost/scalerl-trainer:nowhere"),
        (*WAITS, "ImagePullFailed"),
        ("localhost/scalerl-trainer:nowhere",),
    ),
    Failing(
        *of_role("image without the program", "images", trainer="localhost/busybox:1"),
        HELD,
        ("PrepareFailed: ", f"{LINE}spec.images.trainer"),
    ),
    Failing(
        *of_role("memory of the trainer", "trainer", podTemplate=memory("48Mi")),
        HELD,
        ("StartsFailed: trainer: ", "OOMKilled", f"{LINE}spec.trainer.podTemplate.resources"),
    ),
    Failing(
        *of_role("memory of the generator", "generator", podTemplate=memory("64Mi")),
        (*DEGRADED, "OutOfMemory"),
        ("generator: server was killed: it used more memory than its limit of 64Mi",),
        trains_on=True,
    ),
    Failing(*pods("no such Secret", env=[SECRET]), (*WAITS, "ReferenceNotFound"), ('secret "nowhere"',)),
    Failing(
        *pods("no such claim", volumes=[*PODS["volumes"], CLAIM]),
        (*WAITS, "ReferenceNotFound"),
        ('persistentvolumeclaim "nowhere" not found',),
    ),
    Failing(
        *pods("no such node", nodeSelector={"nowhere": "true"}),
        (*WAITS, "Unschedulable"),
        ("didn't match Pod's node affinity/selector",),
    ),
    Failing(
        *pods("no such priority class", priorityClassName="nowhere"),
        (*WAITS, "ReferenceNotFound"),
        ("no PriorityClass with name nowhere was found",),
    ),
    Failing(
        *of_role("option that vLLM refuses", "generator", extraArgs=["--block-size=many"]),
        (*DEGRADED, "BackOff"),
        ("generator: server: ", "--block-size"),
        trains_on=True,
    ),
    Failing(
        *of_role("claim of the compile cache", "generator", compileCache={"claimName": "nowhere"}),
        (*DEGRADED, "ReferenceNotFound"),
        ('persistentvolumeclaim "nowhere" not found',),
        trains_on=True,
    ),
    Failing(
        *of_role("file of the coordinator", "coordinator", podTemplate={"volumes": [LOST_DATA]}),
        HELD,
        ("BadInput: coordinator: ", "/data/data.jsonl", f"{LINE}spec.coordinator.podTemplate.volumes"),
        saves=False,
    ),
    Failing(
        *pods("garbled task", volumes=[GARBLED]),
        HELD,
        ("BadInput: ", f"{LINE}spec.podTemplate.volumes.0.configMap.name"),
    ),
    Failing(
        *pods("Python's home", env=[{"name": "PYTHONHOME", "value": "/nowhere"}]),
        HELD,
        ("PrepareFailed: ", f"{LINE}spec.podTemplate.env"),
    ),
)


@dataclass
class Watched:
    """The run in training, with all segments of its journal, also those that the coordinator removes."""

    run: Run
    folder: Path
    journal: JournalCopy
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.over.wait(0.2):
            with suppress(FileNotFoundError):  # a segment that is removed just now was linked before
                self.journal.update()


@pytest.fixture(scope="module")
def watched(
    cluster: Cluster, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    if cluster.layout is None:
        pytest.skip("the volumes of this cluster are not on this machine")
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    create = ("create", "configmap", "-n", NAMESPACE)
    cluster.kubectl(*create, "tiny-addition-data", f"--from-file={ROOT / 'examples/tiny/data.jsonl'}")
    cluster.kubectl(*create, "garbled", '--from-literal=data.jsonl={"prompt": "1+1="')
    made = small_spec(budget__maxSteps=100_000, trainer__replicas=1)
    made["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    made["spec"] |= {"podTemplate": PODS, "storage": EXAMPLE["storage"]}
    made["spec"]["task"]["jsonl"]["path"] = "/data/data.jsonl"
    with chart(cluster, images):
        try:
            cluster.apply(made)
            run = Run(cluster, NAME, NAMESPACE)
            say("to the first step", until(lambda: run.step() >= 1, 600, "the first step"), 120)
            (folder,) = (path.parent for path in cluster.layout.volumes.glob(f"*/{NAME}/coordinator"))
            watched = Watched(run, folder, JournalCopy(folder, tmp_path_factory.mktemp("journal") / "copy"))
            thread = threading.Thread(target=watched.watch)
            thread.start()
            yield watched
            watched.over.set()
            thread.join()
        finally:
            cluster.kubectl("delete", "scalerlruns", "--all", "-n", NAMESPACE, "--timeout=500s")
            cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_edit_that_fails_loses_nothing(watched: Watched, edit: Failing) -> None:
    run, (type_, status, reason) = watched.run, edit.then
    before, attempt = run.step(), run.status()["trainer"]["attempt"]
    run.patch(edit.patch)

    def reported() -> bool:
        found = run.condition(type_)
        return found[:2] == (status, reason) and all(part in found[2] for part in edit.says)

    try:
        said = until(reported, 500, f"{edit.then}: {edit.says}")
        kept = run.step()
        assert kept >= before
        if edit.trains_on:
            run.continues(120)
            assert run.status()["trainer"]["attempt"] == attempt
        else:
            assert not run.pods("generator") + run.pods("trainer", ready=True)
        if edit.then == HELD:
            assert run.phase() == "Suspended"
            assert any(event.startswith("EditFailed: ") for event in run.events())
        run.patch(edit.revert)
        kept = max(kept, run.step())
        took = until(
            lambda: (
                run.phase() == "Running"
                and run.step() > kept
                and run.condition("Degraded")[0] == "False"
                and run.condition("TrainerReady")[0] == "True"
            ),
            500,
            "it trains on",
        )
    except AssertionError:
        print(run.tell())
        print(json.dumps(run.status().get("conditions"), indent=1))
        run.patch(edit.revert)  # for the next edit
        raise
    if not edit.trains_on:
        resumed = run.resumed_at()
        # Without a checkpoint, the steps since the last one are trained again, with the groups of the journal.
        assert resumed == kept if edit.saves else resumed >= kept - EVERY, (resumed, kept)
    print(f"measured: {edit}: {said:.0f} s to {' '.join(edit.then)}; reverted, it trains after {took:.0f} s")


def test_run_ends_with_exact_counts(watched: Watched) -> None:
    run = watched.run
    steps = (run.step() // 10 + 3) * 10
    run.patch({"budget": {"maxSteps": steps}})
    until(lambda: run.phase() == "Completed", 600, "the end")
    watched.journal.update()
    paths = RunPaths(watched.folder)
    rows = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps)), "each step once"
    curve = run.cluster.get("configmap", f"{NAME}-curve", "-n", NAMESPACE)["data"]["curve.csv"]
    versions = [int(row["version"]) for row in csv.DictReader(io.StringIO(curve))]
    assert versions == list(range(0, steps + 1, 10)), "each point once"
    found = audit(watched.journal, COMPLETIONS)
    assert found.open == []
    by_row = Counter[str]()
    for row in rows:
        filtered = COMPLETIONS * (row["filtered_groups"] - row["given_up_groups"])
        by_row.update(filtered=filtered, given_up=COMPLETIONS * row["given_up_groups"])
        by_row["skipped" if row["skipped"] else "trained"] += row["rollouts"] - filtered
    assert +by_row == +found.fates
    assert sum(found.fates.values()) == steps * small_spec()["spec"]["recipe"]["promptsPerStep"] * COMPLETIONS
    print(
        f"measured: {steps} steps, {dict(found.fates)}, {run.status()['trainer']['attempt']} attempts of the trainer"
    )
