"""``scalerl get | why | logs | fetch | compare | submit`` against a real API server, as a user with the documented rights."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from stage import Stage, evaluations, tiny
from testcluster import Cluster

from scalerl_api.curve import curve_csv
from scalerl_cli.main import main
from scalerl_operator.controller import run_object
from scalerl_operator.kube import errors
from scalerl_operator.manifests import run_record as records
from scalerl_operator.names import ENDED

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny-addition"


def documented_roles() -> dict[str, dict[str, Any]]:
    """The Roles in docs/clusters.md, by name."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), flags=re.DOTALL)
    roles = [yaml.safe_load(block) for block in blocks]
    return {role["metadata"]["name"]: role for role in roles if role["kind"] == "Role"}


def user(cluster: Cluster, namespace: str, folder: Path, *roles: str) -> str:
    """A kubeconfig of a new service account with the given Roles."""
    name = "-".join(("user", *roles))
    cluster.kubectl("create", "serviceaccount", name, "-n", namespace)
    for role in roles:
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(documented_roles()[role]))
        binding = ("create", "rolebinding", f"{name}-{role}", "-n", namespace, f"--role={role}")
        cluster.kubectl(*binding, f"--serviceaccount={namespace}:{name}")
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", name, "-n", namespace).strip()
    config["users"] = [{"name": one["name"], "user": {"token": token}} for one in config["users"]]
    config["contexts"][0]["context"]["namespace"] = namespace
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return str(path)


class Shell:
    """Runs commands with a kubeconfig; they print to ``capsys``."""

    def __init__(self, kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.kubeconfig, self._capsys = kubeconfig, capsys

    async def __call__(self, *words: str, code: int = 0) -> str:
        """The output, after the exit code has been compared."""
        self._capsys.readouterr()
        found = await asyncio.to_thread(main, [*words, "--kubeconfig", self.kubeconfig])
        shown = self._capsys.readouterr()
        assert found == code, f"{words}: exit code {found}: {shown.out}{shown.err}"
        return shown.out if code == 0 else shown.out + shown.err


async def trains(there: Stage) -> None:
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.end("prepare")
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
    await there.begin("coordinator")
    await there.begin("generator")
    await there.begin("trainer", 2)
    await there.reconcile_until(lambda r: r["status"].get("step") == 3)


async def deleted(there: Stage) -> None:
    await there.delete("ScaleRLRun", NAME)
    for _ in range(3):
        await there.reconcile()
    await there.end("trainer", 0, count=2)
    assert await there.reconcile_until(lambda r: False) == {}


async def test_life_of_a_run_as_a_user_with_the_documented_role(
    there: Stage,
    control_plane: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell(user(control_plane, there.namespace, tmp_path, "scalerl-user"), capsys)
    assert await shell("get") == ""

    # Nothing is applied while one document is refused, by the same checks as `validate` or by the API server.
    data = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"a": "b"}}
    bad = tiny(budget={"maxSteps": 0})
    upper = data | {"metadata": {"name": "UPPER"}}
    for documents, says in (([data, bad], "spec.budget.maxSteps"), ([data, tiny(), upper], "RFC 1123")):
        text = yaml.safe_dump_all(documents)
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text.encode())))
        assert says in await shell("submit", "-", code=2)
    assert await there.get("ConfigMap", "mine") is None
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump_all([data, tiny()]))
    assert "accepted (dry run)" in await shell("submit", str(file), "--dry-run")
    assert await there.get("ScaleRLRun", NAME) is None
    said = await shell("submit", str(file))
    assert said.splitlines() == [
        f"ConfigMap {there.namespace}/mine: applied",
        f"ScaleRLRun {there.namespace}/{NAME}: applied",
    ]

    # Before the operator has seen it; then what it waits for.
    assert "no operator has reported" in await shell("why", NAME)
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    pod = (await there.pods("prepare"))[0]["metadata"]["name"]
    unscheduled = {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            }
        ]
    }
    await there.edit("Pod", pod, {"status": unscheduled}, "status")
    lines = (await shell("why", NAME)).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{there.namespace}/{NAME}: Preparing")
    assert "3 Insufficient nvidia.com/gpu" in lines[1]
    assert "has logged anything" in await shell("logs", NAME, "prepare", code=1)

    there.coordinator.points = evaluations(12)
    await trains(there)
    row = next(line for line in (await shell("get")).splitlines() if line.startswith(NAME))
    assert row.split()[1] == "Running"
    assert re.search(r" 3/\d+ ", row)
    one = json.loads(await shell("get", NAME, "-o", "json"))[0]
    assert (one["name"], one["phase"], one["step"], one["deleted"]) == (NAME, "Running", 3, False)
    assert json.loads(await shell("why", NAME, "-o", "json"))["advice"]
    table = curve_csv(evaluations(12))
    await shell("fetch", NAME, "curve", "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / f"{NAME}-curve.csv").read_text() == table

    # What the Role does not have, by the verb to ask for.
    said = await shell("fetch", NAME, "model", "-o", str(tmp_path), code=3)
    assert "has exported no model yet" in said
    exports = {
        "best": {
            "version": 3,
            "reward": "0.5",
            "path": "checkpoints/hf/step-00000003",
            "time": "2026-01-01T00:00:00Z",
        }
    }
    await there.edit("ScaleRLRun", NAME, {"status": {"exports": exports}}, "status")
    said = await shell("fetch", NAME, "model", "-o", str(tmp_path), code=4)
    assert "pods/exec" in said
    assert "spec.trainer.export.to" in said
    assert not any("step-" in name for name in os.listdir(tmp_path))
    said = await shell("get", "-A", code=4)
    assert "you may not list scalerlruns.scalerl.dev in all namespaces: ask for the verb 'list'" in said
    assert "did you mean tiny-addition?" in await shell("why", "tiny-adition", code=3)

    await deleted(there)
    ended = (await shell("get", "--ended")).splitlines()
    assert ended[1].startswith(NAME)
    lines = (await shell("why", NAME)).splitlines()
    assert "deleted" in lines[0]
    assert "was deleted" in await shell("logs", NAME, code=3)
    await shell("fetch", NAME, "curve", "-o", str(tmp_path / "later"))
    assert (tmp_path / "later" / f"{NAME}-curve.csv").read_text() == table
    found = await there.all("ConfigMap")
    kept = next(one for one in found if ENDED in (one["metadata"].get("labels") or {}))
    assert "ownerReferences" not in kept["metadata"]
    assert any(e["reason"] == "Running" for e in json.loads(kept["data"][records.EVENTS_KEY]))

    # Files before runs: a name is a run's only where there is no such file.
    words = ("compare", NAME, str(tmp_path / "out" / f"{NAME}-curve.csv"), "--dir", str(tmp_path / "compare"))
    assert NAME in await shell(*words)
    assert "there is no run 'no-such-run'" in await shell(
        "compare", "no-such-run", "--dir", str(tmp_path / "x"), code=2
    )


async def test_user_without_rights_gets_a_message_with_what_to_ask_for(
    there: Stage, control_plane: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(user(control_plane, there.namespace, tmp_path), capsys)
    for words, verb in (
        (("get",), "list scalerlruns.scalerl.dev in the namespace"),
        (("get", "--ended"), "list configmaps in the namespace"),
        (("why", NAME), f"get scalerlruns.scalerl.dev {there.namespace}/{NAME}"),
        (("logs", NAME), "get scalerlruns"),
        (("fetch", NAME, "curve"), "get scalerlruns"),
    ):
        assert f"you may not {verb}" in await shell(*words, code=4)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny()))
    assert "you may not apply scalerlruns" in await shell("submit", str(file), code=4)


async def test_oldest_records_go_and_no_failure_keeps_a_run(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_object, "MAX_RECORDS", 2)
    for name in ("a", "b", "c"):
        metadata = {"name": f"{name}-ended-1", "labels": {ENDED: name}}
        await there.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    await there.create(tiny())
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.delete("ScaleRLRun", NAME)
    await there.reconcile_until(lambda r: False)
    for _ in range(1200):
        left = [one for one in await there.all("ConfigMap") if ENDED in (one["metadata"].get("labels") or {})]
        if len(left) == 2:
            break
        await asyncio.sleep(0.1)
    assert len(left) == 2
    assert NAME in [one["metadata"]["labels"][ENDED] for one in left]

    # An API server that refuses the record: for two minutes it is tried again, if that may help.
    for kind, waits in ((errors.Unreachable, True), (errors.Forbidden, False)):
        monkeypatch.setattr(run_object, "_write_record", _raises(kind("no")))
        await there.create(tiny())
        await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
        await there.delete("ScaleRLRun", NAME)
        if waits:
            with pytest.raises(errors.Unreachable):
                await there.reconcile_until(lambda r: False)
            there.now += run_object.TRY_SECONDS + 1
        assert await there.reconcile_until(lambda r: False) == {}


def _raises(error: Exception) -> Any:
    async def write(*_: object) -> None:
        raise error

    return write
