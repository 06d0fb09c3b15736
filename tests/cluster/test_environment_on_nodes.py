"""A run whose environment servers are pods of a real kubelet: it trains, loses one in the middle of episodes, and ends with exact counts.

The server is a user's program on the generator's image, with a token. NetworkPolicies are not enforced here; their content is tested
in ``operator/tests/operator_tests/test_operator_environment_servers.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml
from installed import ROOT, Run, chart, say, until
from testcluster import Cluster

from scalerl_api.paths import RunPaths

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(2400)]

NAMESPACE, NAME, COMPLETIONS, PROMPTS = "environments", "served", 4, 4
SERVER = '''
import os
from aiohttp import web
from openenv_stand_in import Echo, OpenEnvServer, observed

class Longer(Echo):
    """Ends with its third reply; longer ones earn more."""
    def step(self, action):
        self.steps += 1
        answer = {"echoed_message": f"{self.steps}:", "message_length": len(action["message"])}
        return observed(answer, min(len(action["message"]) * 0.1, 1.0), self.steps == 3)

server = OpenEnvServer()
server.environment, server.token = Longer, os.environ["ENVIRONMENT_TOKEN"]
web.run_app(server.app(), host=os.environ["HOST"], port=int(os.environ["PORT"]), print=None)
'''


def manifest() -> dict[str, object]:
    """The example, with episodes and servers, made small."""
    run = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    run["metadata"]["name"] = NAME
    spec = run["spec"]
    spec["model"] |= {"contextTokens": 128}
    spec["model"]["scratch"]["vocabularySize"] = 300
    del spec["task"]["verifier"]
    spec["task"]["environment"] = {"name": "server", "maxTurns": 4, "maxTokensPerTurn": 6}
    spec["task"]["heldOut"]["size"] = 16
    spec["warmStart"] = {"steps": 30, "batchSize": 16, "learningRate": "1e-3"}
    spec["recipe"] |= {
        "promptsPerStep": PROMPTS,
        "completionsPerPrompt": COMPLETIONS,
        "maxCompletionTokens": 64,
    }
    spec["trainer"] = {"replicas": 1, "cpuThreads": 1}
    spec["evaluation"] = {"everySteps": 100, "samplesPerPrompt": 1}
    spec["checkpoint"] = {"everySteps": 50, "keep": 2}
    spec["budget"] = {"maxSteps": 20_000, "maxSeconds": 1800}
    token = {"name": "ENVIRONMENT_TOKEN", "valueFrom": {"secretKeyRef": {"name": "game", "key": "token"}}}
    spec["generator"]["podTemplate"] = {"env": [token]}
    spec["environment"] = {
        "command": ["python", "/server/server.py"],
        "podTemplate": {
            "env": [token, {"name": "PYTHONPATH", "value": "/server"}],
            "volumes": [{"name": "server", "configMap": {"name": "game"}}],
            "volumeMounts": [{"name": "server", "mountPath": "/server", "readOnly": True}],
            "resources": {"requests": {"cpu": "100m"}},
        },
    }
    spec["podTemplate"]["volumes"][0]["configMap"]["name"] = "prompts"
    return run


@pytest.fixture(scope="module")
def run(cluster: Cluster, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if cluster.layout is None:
        pytest.skip("the journal is read from the volume of a cluster of our own")
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.py").write_text(SERVER)
    ns = ("-n", NAMESPACE)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    files = [
        f"--from-file={path}" for path in (folder / "server.py", ROOT / "tests/support/openenv_stand_in.py")
    ]
    cluster.kubectl("create", "configmap", "game", *files, *ns)
    cluster.kubectl("create", "configmap", "prompts", f"--from-file={ROOT / 'examples/tiny/data.jsonl'}", *ns)
    cluster.kubectl("create", "secret", "generic", "game", "--from-literal=token=of-the-game", *ns)
    with chart(cluster, images):
        try:
            cluster.kubectl("apply", "-f", "-", *ns, stdin=json.dumps(manifest()))
            yield Run(cluster, NAME, NAMESPACE)
        finally:
            cluster.kubectl("delete", "scalerlruns", "--all", *ns, "--timeout=500s")
            cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_run_survives_its_server(run: Run) -> None:
    try:
        _survives(run)
    except BaseException:
        print(run.tell())
        print(json.dumps(run.status().get("conditions"), indent=1))
        for pod in run.pods("environment"):
            print(run.cluster.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE, "--tail=30"))
        raise


def _survives(run: Run) -> None:
    cluster, ns = run.cluster, ("-n", NAMESPACE)
    say("environment server ready", until(lambda: run.pods("environment", ready=True), 600, "a server"), 60)
    until(lambda: run.step() >= 2, 900, "steps", every=1)
    assert cluster.layout is not None
    (folder,) = (path.parent for path in cluster.layout.volumes.glob(f"*/{NAME}/coordinator"))

    (service,) = cluster.get(
        "services", *ns, "-l", f"scalerl.dev/run={NAME},app.kubernetes.io/component=environment"
    )["items"]
    assert service["spec"]["clusterIP"] == "None"
    (pod,) = run.pods("environment")
    (generator,) = run.pods("generator")
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc"
    ask = (
        "import socket, urllib.request as u, sys\n"
        f"print(socket.gethostbyname({host!r}))\n"
        f"try: u.urlopen('http://{host}:8000/schema')\n"
        "except Exception as e: print(e.code)"
    )
    words = ("exec", generator["metadata"]["name"], *ns, "-c", "actor", "--", "python", "-c", ask)
    assert cluster.kubectl(*words).split() == [pod["status"]["podIP"], "401"], (
        "by name, and not without the token"
    )

    cluster.kubectl("delete", "pod", pod["metadata"]["name"], *ns, "--grace-period=0", "--force")
    before = run.step()
    took = until(lambda: run.pods("environment", ready=True), 600, "another server")
    say("server deleted, another one ready", took, 60)
    said = until(lambda: run.step() >= before + 20, 600, "steps")
    say("and training continues", said, 120)
    steps = (run.step() // 100 + 1) * 100
    run.patch({"budget": {"maxSteps": steps}})
    until(lambda: run.phase() in ("Completed", "Failed"), 900, "the end")
    assert run.condition("Completed")[:2] == ("True", "BudgetReached")
    rows = [json.loads(line) for line in RunPaths(folder).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps)), "each step once"
    # Of each row, the given up are the ones that no generator brought back.
    given_up = sum(row["given_up_groups"] for row in rows)
    assert (sum(row["rollouts"] for row in rows), given_up) == (steps * PROMPTS * COMPLETIONS, 0), "each once"
    assert sum(row["grading_errors"] for row in rows) == 0
    print(f"measured: {steps} steps, {rows[-1]['episode_turns']} turns")
