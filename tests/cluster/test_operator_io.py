"""The operator's input and output against a real API server: its client, its cache, its process."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from asyncio.events import Handle
from collections.abc import Iterator
from typing import Any

import pytest
from replicas import a_run, an_operator, asked, config_map, noting, running, settings, until
from stage import own_control_plane, serve_runs
from testcluster import Cluster

from scalerl_operator import main, names
from scalerl_operator.kube import connection, errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.informer import listed
from scalerl_operator.kube.kinds import KINDS
from scalerl_operator.kube.leader_election import DURATION_SECONDS
from scalerl_operator.kube.run_stream import Resync
from scalerl_operator.kube.types import Key

pytestmark = pytest.mark.cluster


# The client


async def test_objects_are_applied_read_patched_and_deleted(api: KubeApi, namespace: str) -> None:
    assert await api.get("ConfigMap", namespace, "a") is None
    made = await api.apply(config_map(namespace, "a", k="v"))
    assert made["metadata"]["managedFields"][0]["manager"] == "scalerl-operator"
    again = await api.apply(config_map(namespace, "a", k="v"))
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"], (
        "an idle write changes nothing"
    )
    read = await api.get("ConfigMap", namespace, "a")
    assert read is not None
    assert read["data"] == {"k": "v"}
    patched = await api.patch(
        "ConfigMap",
        namespace,
        "a",
        {"data": {"k": "x"}},
        resource_version=made["metadata"]["resourceVersion"],
    )
    assert patched["data"] == {"k": "x"}
    with pytest.raises(errors.Conflict):
        await api.patch(
            "ConfigMap",
            namespace,
            "a",
            {"data": {"k": "y"}},
            resource_version=made["metadata"]["resourceVersion"],
        )
    with pytest.raises(errors.Conflict):
        await api.replace(made)
    assert not await api.delete("ConfigMap", namespace, "a", uid=str(uuid.uuid4())), (
        "another object of that name"
    )
    assert await api.delete("ConfigMap", namespace, "a", uid=made["metadata"]["uid"])
    assert not await api.delete("ConfigMap", namespace, "a")


async def test_apply_restores_own_fields_only(api: KubeApi, namespace: str) -> None:
    await api.apply(config_map(namespace, "a", ours="1"))
    await api.patch("ConfigMap", namespace, "a", {"data": {"theirs": "2"}})
    assert (await api.apply(config_map(namespace, "a", ours="1")))["data"] == {"ours": "1", "theirs": "2"}
    hand = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b", "namespace": namespace}}
    await api.create({**hand, "data": {"ours": "0"}})
    assert (await api.apply(config_map(namespace, "b", ours="1")))["data"] == {"ours": "1"}


async def test_apply_is_bound_to_the_uid(api: KubeApi, namespace: str) -> None:
    made = await api.apply(config_map(namespace, "a", k="1"))
    changed = await api.apply(config_map(namespace, "a", k="2"), uid=made["metadata"]["uid"])
    assert changed["data"] == {"k": "2"}
    with pytest.raises(errors.Conflict):  # another's
        await api.apply(config_map(namespace, "a", k="3"), uid=str(uuid.uuid4()))
    with pytest.raises(errors.Conflict):  # gone
        await api.apply(config_map(namespace, "b", k="3"), uid=str(uuid.uuid4()))
    found = [await api.get("ConfigMap", namespace, name) for name in ("a", "b")]
    assert [one and one["data"] for one in found] == [{"k": "2"}, None]


async def test_refusals_are_typed_errors(api: KubeApi, namespace: str) -> None:
    await api.apply(config_map(namespace, "a"))
    with pytest.raises(errors.AlreadyExists):
        await api.create(config_map(namespace, "a"))
    with pytest.raises(errors.NotFound, match="namespaces"):
        await api.apply(config_map("no-such-namespace", "a"))
    with pytest.raises(errors.NotFound):
        await api.patch("ConfigMap", namespace, "none", {"data": {}})
    with pytest.raises(errors.Invalid) as named:
        await api.apply(config_map(namespace, "Not_A_Name"))
    assert named.value.field == "metadata.name"
    # These two the API server calls an internal error; they must not be tried again and again.
    with pytest.raises(errors.Invalid) as unknown:
        await api.apply({**config_map(namespace, "b"), "dta": {}})
    assert unknown.value.field == "dta"
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", "namespace": namespace},
        "spec": {
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "c", "image": "i", "resources": {"limits": {"cpu": "much"}}}],
                }
            }
        },
    }
    with pytest.raises(errors.Invalid, match="quantities"):
        await api.apply(job)
    run = a_run(namespace, "r")
    run["spec"]["trainer"]["replicas"] = "two"
    with pytest.raises(errors.Invalid) as typed:
        await api.apply(run)
    assert typed.value.field == "spec.trainer.replicas"


async def test_quota_errors_are_distinct_from_missing_permission(
    api: KubeApi, served: Cluster, namespace: str
) -> None:
    served.kubectl("-n", namespace, "create", "quota", "few", "--hard=count/configmaps=2")
    # kube-root-ca.crt is the other one, which a controller makes sooner or later.
    one = {"count/configmaps": "1"}
    await until(
        lambda: served.get("resourcequota", "few", "-n", namespace).get("status", {}).get("used") == one
    )

    async def fill() -> None:
        for number in range(240):  # the API server's admission learns of it a moment later
            await api.apply(config_map(namespace, f"a{number}"))
            await asyncio.sleep(0.5)

    with pytest.raises(errors.QuotaExceeded):
        await fill()
    pinned = config_map(namespace, "a0")
    pinned["metadata"]["finalizers"] = ["scalerl.dev/test"]
    await api.apply(pinned)
    served.kubectl("delete", "namespace", namespace, "--wait=false")

    async def late() -> None:
        for _ in range(240):  # the API server's admission learns of it a moment later
            with contextlib.suppress(errors.QuotaExceeded):
                await api.apply(config_map(namespace, "late"))
            await asyncio.sleep(0.5)

    try:
        with pytest.raises(errors.Forbidden):
            await late()
    finally:
        del pinned["metadata"]["finalizers"]
        await api.apply(pinned)
    token = served.kubectl("-n", "default", "create", "token", "default").strip()
    configuration = await connection.load(str(served.kubeconfig))
    configuration.cert_file = configuration.key_file = None
    configuration.api_key["BearerToken"] = f"Bearer {token}"
    async with KubeApi(configuration) as absent:
        with pytest.raises(errors.Forbidden, match="cannot list"):
            await absent.list("Secret")
        configuration.api_key["BearerToken"] = "Bearer nonsense"
        with pytest.raises(errors.ApiError):
            await absent.list("Secret")


async def test_lists_come_in_pages_and_say_their_kind(api: KubeApi, namespace: str) -> None:
    await asyncio.gather(*(api.apply(config_map(namespace, f"a{n:02d}", run=f"r{n % 2}")) for n in range(23)))
    found, _ = await api.list_at("ConfigMap", namespace, label_selector=names.RUN, limit=5)
    assert [o["metadata"]["name"] for o in found] == [f"a{n:02d}" for n in range(23)]
    assert {(o["kind"], o["apiVersion"]) for o in found} == {("ConfigMap", "v1")}
    odd, _ = await api.list_at("ConfigMap", namespace, label_selector=f"{names.RUN}=r1", limit=5)
    assert len(odd) == 11
    bare, _ = await api.list_at(
        "ConfigMap", namespace, label_selector=names.RUN, metadata_only=True, limit=10
    )
    assert len(bare) == 23
    assert all(set(o) == {"kind", "apiVersion", "metadata"} for o in bare)


async def test_repeated_event_is_counted(api: KubeApi, served: Cluster, namespace: str) -> None:
    run = await api.apply(a_run(namespace, "r"))
    for _ in range(3):
        await api.event(run, "Normal", "Running", "The trainer trains.")
    await api.event(run, "Warning", "BackOff", "ä" * 2000)
    found = {e["reason"]: e for e in await api.list("Event", namespace)}
    assert found["Running"]["count"] == 3
    assert len(found["BackOff"]["message"].encode()) <= 1024
    assert "The trainer trains." in served.kubectl("-n", namespace, "describe", "scalerlrun", "r")
    gone = {**run, "metadata": {**run["metadata"], "namespace": "no-such-namespace"}}
    await api.event(gone, "Normal", "Running", "Written about nothing, and nothing is raised.")


async def test_fenced_client_writes_nothing_but_leases(served: Cluster, namespace: str) -> None:
    may = False
    async with KubeApi(await connection.load(str(served.kubeconfig)), fence=lambda: may) as api:
        with pytest.raises(errors.Fenced):
            await api.apply(config_map(namespace, "a"))
        with pytest.raises(errors.Fenced):
            await api.delete("ConfigMap", namespace, "a")
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {"holderIdentity": "me"}}
        await api.create({**lease, "metadata": {"name": "l", "namespace": namespace}})
        may = True
        await api.apply(config_map(namespace, "a"))


async def test_watch_brings_what_happens_and_ends(api: KubeApi, namespace: str) -> None:
    await api.apply(config_map(namespace, "a", k="1"))
    _, version = await api.list_at("ConfigMap", namespace, label_selector=names.RUN)
    await api.apply(config_map(namespace, "a", k="2"))
    await api.delete("ConfigMap", namespace, "a")
    kinds = list[str]()
    while "DELETED" not in kinds:
        watch = api.watch("ConfigMap", namespace, since=version, label_selector=names.RUN, seconds=3)
        async with contextlib.aclosing(watch):
            kinds = [event.type async for event in watch if event.type != "BOOKMARK"]
    assert kinds == ["MODIFIED", "DELETED"]


async def test_list_drops_objects_deleted_without_event(api: KubeApi, namespace: str) -> None:
    woken: list[Key] = []
    cache = Cache(woken.append)
    run = await api.apply(a_run(namespace, "r"))
    await api.apply(config_map(namespace, "stays"))
    await api.apply(config_map(namespace, "goes"))
    for kind in ("ScaleRLRun", "ConfigMap"):
        await listed(api, cache, KINDS[kind], namespace)
    assert {name for _, name in cache.owned(namespace, "r")} == {"stays", "goes"}
    await api.delete("ConfigMap", namespace, "goes")
    await listed(api, cache, KINDS["ConfigMap"], namespace)
    assert {name for _, name in cache.owned(namespace, "r")} == {"stays"}
    # And the same of runs, beside kopf's stream, of which one was missed here and another came late.
    await api.apply(a_run(namespace, "late"))
    repaired: list[int] = []
    resync = Resync(api, cache, [namespace], every=60.0, on_repair=repaired.append)
    await api.delete("ScaleRLRun", namespace, "r", uid=run["metadata"]["uid"])
    assert await resync.compare(namespace) == 2
    assert cache.runs() == [(namespace, "late")]
    assert await resync.compare(namespace) == 0
    assert repaired == [2]


# The process, with another reconcile in it


async def test_every_change_of_run_or_its_objects_reconciles_it(
    api: KubeApi, served: Cluster, namespace: str
) -> None:
    reconciled: list[Key] = []
    before = await api.apply(a_run(namespace, "before"))
    async with running(await an_operator(served, namespace, reconciled)) as operator:
        await until(lambda: (namespace, "before") in reconciled)
        await until(operator.watches.started.is_set)
        assert await asked(operator, "/healthz") == (200, "ok\n")
        assert await asked(operator, "/readyz") == (200, "leads\n")

        async def looked_at(change: Any) -> None:
            reconciled.clear()
            await change
            print(f"reconciled after {await until(lambda: (namespace, 'r') in reconciled):.3f} s")
            await asyncio.sleep(0.3)

        await asyncio.sleep(1)  # kopf's streams start
        await looked_at(api.apply(a_run(namespace, "r")))
        await looked_at(api.apply(config_map(namespace, "mine")))
        await until(lambda: set(operator.cache.owned(namespace, "r")) == {("ConfigMap", "mine")})
        await looked_at(api.patch("ConfigMap", namespace, "mine", {"data": {"by": "hand"}}))
        await until(
            lambda: (operator.cache.get("ConfigMap", namespace, "mine") or {}).get("data") == {"by": "hand"}
        )
        await looked_at(
            api.patch("ConfigMap", namespace, "mine", {"metadata": {"labels": {names.RUN: None}}})
        )
        await until(lambda: operator.cache.owned(namespace, "r") == {})
        await looked_at(api.apply(config_map(namespace, "mine")))
        await looked_at(api.delete("ConfigMap", namespace, "mine"))
        await until(lambda: operator.cache.owned(namespace, "r") == {})
        reconciled.clear()
        await api.apply(config_map(namespace, "nobodys", run=None))
        await asyncio.sleep(1)
        assert reconciled == []
        await looked_at(api.delete("ScaleRLRun", namespace, "r"))
        await until(lambda: operator.cache.run(namespace, "r") is None)
        # kopf left no trace, and an operator with nothing to do writes nothing but its Lease.
        after = await api.get("ScaleRLRun", namespace, "before")
        assert after is not None
        assert after["metadata"] == before["metadata"]
        _, metrics = await asked(operator, "/metrics")
        assert {
            line.split("{")[1].split("}")[0]
            for line in metrics.splitlines()
            if line.startswith("scalerl_operator_writes_total{")
        } == {'kind="Lease"'}
        assert "scalerl_operator_leader 1.0" in metrics


async def test_operator_catches_up_after_an_api_server_outage(
    api: KubeApi, served: Cluster, namespace: str
) -> None:
    reconciled: list[Key] = []
    await api.apply(a_run(namespace, "r"))
    made = await an_operator(served, namespace, reconciled, lease_seconds=DURATION_SECONDS)
    async with running(made) as operator:
        await until(lambda: reconciled)
        await until(operator.watches.started.is_set)
        await asyncio.sleep(1)
        with served.without("kube-apiserver"):
            await until(lambda: not operator.leader.is_leader())
            await asyncio.sleep(5)
            assert await asked(operator, "/healthz") == (200, "ok\n")
        began = time.monotonic()
        await until(operator.leader.is_leader, 120)
        print(f"leads again {time.monotonic() - began:.1f} s after the API server is back")
        await asyncio.sleep(1)
        reconciled.clear()
        await api.apply(config_map(namespace, "a"))
        await until(lambda: reconciled, 120)
        await api.apply(a_run(namespace, "s"))
        with pytest.raises(errors.Expired):  # what a server that has just started no longer knows
            await anext(api.watch("ConfigMap", namespace, since="1"))
        print(f"receives events again after {await until(lambda: (namespace, 's') in reconciled, 120):.1f} s")


async def test_token_that_runs_out_is_replaced(api: KubeApi, served: Cluster, namespace: str) -> None:
    """A pod's token lives for an hour and its file is written again before that; the client and kopf have to follow."""
    account = f"--serviceaccount={namespace}:default"
    served.kubectl("create", "clusterrolebinding", namespace, "--clusterrole=cluster-admin", account)
    served.kubectl("-n", namespace, "create", "secret", "generic", "life")
    bound = ("--bound-object-kind=Secret", "--bound-object-name=life")
    # The controllers may have thousands of objects of other tests to remove first.
    await until(lambda: "default" in served.kubectl("get", "serviceaccounts", "-n", namespace, "-o", "name"))
    current = served.kubectl("-n", namespace, "create", "token", "default", *bound).strip()

    def reread(configuration: Any) -> None:
        configuration.api_key["BearerToken"] = f"bearer {current}"

    chosen = settings(served, namespace)
    configuration = await connection.load(chosen.kubeconfig)
    configuration.cert_file = configuration.key_file = None
    configuration.refresh_api_key_hook = reread
    reread(configuration)
    reconciled: list[Key] = []
    await api.apply(a_run(namespace, "r"))
    async with running(main.Operator(chosen, configuration, noting(reconciled))) as operator:
        await until(lambda: reconciled)
        await until(operator.watches.started.is_set)
        await asyncio.sleep(2)
        served.kubectl(
            "-n", namespace, "delete", "secret", "life"
        )  # the first token is worth nothing any more
        current = served.kubectl("-n", namespace, "create", "token", "default").strip()
        with served.without("kube-apiserver"):  # so that streams have to begin again
            await until(lambda: not operator.leader.is_leader())
        await until(operator.leader.is_leader, 120)
        reconciled.clear()
        await api.apply(a_run(namespace, "s"))
        print(
            f"receives events with a new token after {await until(lambda: (namespace, 's') in reconciled, 120):.1f} s"
        )
        reconciled.clear()
        await api.apply(config_map(namespace, "a"))
        await until(lambda: reconciled, 120)
        await until(lambda: operator.watches.down_seconds() == 0)


async def test_long_lists_do_not_block_the_event_loop(
    api: KubeApi, served: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Semaphore(16)

    async def make(number: int) -> None:
        async with gate:
            if number % 4 == 0:
                await api.apply(a_run(namespace, f"r{number}"))
            else:
                await api.apply(
                    config_map(namespace, f"a{number}", run=f"r{number // 4 * 4}", text="x" * 4000)
                )

    await asyncio.gather(*(make(number) for number in range(1600)))
    longest = 0.0
    real = Handle._run

    def measured(handle: Handle) -> None:
        nonlocal longest
        began = (
            time.thread_time()
        )  # this thread's work alone: others of this machine are not ours to answer for
        real(handle)
        longest = max(longest, time.thread_time() - began)

    reconciled: list[Key] = []
    operator = await an_operator(served, namespace, reconciled)
    monkeypatch.setattr(Handle, "_run", measured)
    async with running(operator):
        await until(lambda: len(set(reconciled)) == 400, 120)
        await until(operator.watches.started.is_set)
        await asyncio.sleep(5)
    monkeypatch.undo()
    print(f"the longest step of the event loop took {longest * 1000:.0f} ms")
    assert longest < 0.1


@pytest.fixture
def bare() -> Iterator[Cluster]:
    """A control plane of its own: no other runs keep its CRD from going."""
    with own_control_plane() as cluster:
        yield cluster


async def test_operator_survives_a_missing_crd(bare: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The chart may bring the operator before its CRDs; then it is not ready, says why, and does not end."""
    reconciled: list[Key] = []
    namespace = "default"
    configuration = await connection.load(str(bare.kubeconfig))
    # Its first Lease has to expire before it is taken.
    made = await an_operator(
        bare, namespace, reconciled, lease_seconds=DURATION_SECONDS, wait_log_seconds=1.0
    )
    async with KubeApi(configuration) as api, running(made) as operator:
        await until(lambda: operator.address and "waiting for the first list of ScaleRLRun" in caplog.text)
        deadline = time.monotonic() + 120
        # Until all but the runs are listed.
        while (answer := await asked(operator, "/readyz")) != (
            503,
            "waiting for the first list of ScaleRLRun\n",
        ):
            assert time.monotonic() < deadline, answer
            await asyncio.sleep(0.1)
        assert (await asked(operator, "/healthz"))[0] == 200
        serve_runs(bare)
        await until(lambda: operator.leader.is_leader(), 120)
        await api.apply(a_run(namespace, "r"))
        await until(lambda: (namespace, "r") in reconciled, 120)
        await asyncio.sleep(2)  # kopf is up

        bare.kubectl("delete", "crd", "scalerlruns.scalerl.dev")
        await asyncio.sleep(8)
        assert (await asked(operator, "/healthz"))[0] == 200
        serve_runs(bare)
        await api.apply(a_run(namespace, "s"))
        took = await until(lambda: (namespace, "s") in reconciled, 120)
        print(f"receives events {took:.0f} s after their CRD is back")
        await until(lambda: operator.cache.runs() == [(namespace, "s")], 120)
        await until(lambda: operator.watches.down_seconds() < 60)
