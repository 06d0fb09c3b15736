"""Environment servers on a real API server, with its controllers: they come and go with a run, and their failures are in its conditions."""

from __future__ import annotations

from stage import Object, Stage, condition, tiny

SERVER = {"image": "game:1", "command": ["serve", "$(PORT)"], "replicas": 2}


def with_servers() -> Object:
    run = tiny(environment=SERVER)
    run["spec"]["task"] = {
        name: section for name, section in run["spec"]["task"].items() if not name.startswith("verifier")
    } | {"environment": {"name": "server", "maxTurns": 3}}
    return run


async def crashing(there: Stage, restarts: int) -> None:
    """All servers are in CrashLoopBackOff."""
    for pod in await there.pods("environment", 2):
        waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
        over = {"exitCode": 3, "message": "no module named game", "finishedAt": "2026-01-01T00:00:00Z"}
        status = {
            "name": "environment",
            "ready": False,
            "restartCount": restarts,
            "image": "game:1",
            "imageID": "",
            "state": {"waiting": waiting},
            "lastState": {"terminated": over},
        }
        news = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [status],
        }
        await there.edit("Pod", pod["metadata"]["name"], {"status": news}, "status")


async def test_servers_of_a_run_come_fail_and_go(there: Stage) -> None:
    await there.start(with_servers())
    await there.begin("environment", 2)
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy")
    (deployment,) = await there.all("Deployment", "environment")
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == run["metadata"]["uid"]
    (service,) = await there.all("Service", "environment")
    assert service["spec"]["clusterIP"] == "None"
    assert len(await there.all("NetworkPolicy", "environment")) == 1

    # One that crashes is said, and ends nothing.
    await crashing(there, restarts=3)
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "BackOff")
    said = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Degraded")
    assert said == "environment: environment: no module named game"

    # An edit replaces the servers alone; their number is changed at once.
    before = {pod["metadata"]["uid"] for role in ("generator", "trainer") for pod in await there.pods(role)}
    await there.edit(
        "ScaleRLRun", "tiny-addition", {"spec": {"environment": {"image": "game:2", "replicas": 3}}}
    )
    await there.reconcile_until(lambda r: r["status"]["observedGeneration"] == r["metadata"]["generation"])
    (deployment,) = await there.all("Deployment", "environment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], deployment["spec"]["replicas"]) == ("game:2", 3)
    after = {pod["metadata"]["uid"] for role in ("generator", "trainer") for pod in await there.pods(role)}
    assert after == before

    # Those that never start hold a run that has trained, which saves first.
    await crashing(there, restarts=21)
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspending")
    await there.end("trainer", count=2)
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    assert condition(run, "Suspended") == "BackoffLimitExceeded"
    left = [o for kind in ("Deployment", "Service") for o in await there.all(kind, "environment")]
    assert all("deletionTimestamp" in o["metadata"] for o in left)

    # The edit that fixes it goes on.
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"environment": {"image": "game:3"}}})
    await there.reconcile_until(lambda r: r["status"]["phase"] in ("Pending", "Preparing", "Running"))
