"""The API client against a server at fault: what a real one cannot be made to answer. (The rest: tests/cluster.)"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.kube import connection, errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.informer import Informer, listed
from scalerl_operator.kube.kinds import KINDS, kind_of

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Observer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        self.calls.append((verb, kind, code))


class Faulty:
    """An API server that gives its list of answers in turn; the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[web.Request] = []

    def say(self, code: int, body: Any = None, **headers: str) -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            if isinstance(body, str):
                return web.Response(status=code, text=body, headers=named)
            return web.json_response(body or {}, status=code, headers=named)

        self.answers.append(answer)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        await request.read()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@pytest.fixture
def server() -> Faulty:
    return Faulty()


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
async def api(server: Faulty, observer: Observer) -> AsyncIterator[KubeApi]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as listens:
        configuration = Configuration(host=str(listens.make_url("")).rstrip("/"))
        async with KubeApi(configuration, timeout=120.0, on_call=observer.called) as client:
            yield client


MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "team"}}


async def test_client_waits_as_long_as_a_429_says(api: KubeApi, server: Faulty, observer: Observer) -> None:
    server.say(429, {"message": "slow down"}, Retry_After="1")
    server.say(200, MAP)
    began = time.monotonic()
    assert await api.apply(MAP) == MAP
    assert time.monotonic() - began > 0.9
    assert observer.calls == [("apply", "ConfigMap", 429), ("apply", "ConfigMap", 200)]


@pytest.mark.parametrize(("after", "calls"), [("1", 3), ("60", 1)])
async def test_client_raises_while_the_server_stays_busy(
    after: str, calls: int, api: KubeApi, server: Faulty
) -> None:
    server.say(429, {"message": "slow down"}, Retry_After=after)
    with pytest.raises(errors.Unreachable, match="slow down") as busy:
        await api.apply(MAP)
    assert busy.value.retry_after == float(after)
    assert len(server.requests) == calls


@pytest.mark.parametrize("code", [500, 502, 503, 504])
async def test_client_does_not_retry_5xx(code: int, api: KubeApi, server: Faulty) -> None:
    server.say(code, "<html>Bad Gateway</html>")
    with pytest.raises(errors.Unreachable, match="Bad Gateway") as failed:
        await api.get("ConfigMap", "team", "a")
    assert (failed.value.code, failed.value.longest_wait) == (code, 15.0)
    assert "get ConfigMap team/a" in str(failed.value)
    assert len(server.requests) == 1


async def test_silence_and_a_cut_answer_are_unreachable(
    api: KubeApi, server: Faulty, observer: Observer
) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"kind":')
        assert request.transport is not None
        request.transport.close()
        return response

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        return web.Response()

    server.answers = [cut, silent]
    with pytest.raises(errors.Unreachable):
        await api.get("ConfigMap", "team", "a")
    api._transport.timeout = 1.0
    with pytest.raises(errors.Unreachable, match="within 1 s"):
        await api.get("ConfigMap", "team", "a")
    assert observer.calls[-1] == ("get", "ConfigMap", 0)


async def test_server_that_is_not_there_is_unreachable() -> None:
    async with KubeApi(Configuration(host="http://127.0.0.1:9")) as nowhere:
        with pytest.raises(errors.Unreachable, match="ClientConnectorError"):
            await nowhere.list("Pod")


async def test_list_whose_pages_expired_starts_over_once(api: KubeApi, server: Faulty) -> None:
    def page(name: str, more: str = "") -> dict[str, Any]:
        metadata = {"resourceVersion": "7", "continue": more}
        return {"kind": "PodList", "metadata": metadata, "items": [{"metadata": {"name": name}}]}

    server.say(200, page("old", "token"))
    server.say(410, {"reason": "Expired", "message": "The provided continue parameter is too old"})
    server.say(200, page("a", "token2"))
    server.say(200, page("b"))
    found, version = await api.list_at("Pod", "team", label_selector="x=y")
    assert ([o["metadata"]["name"] for o in found], version) == (["a", "b"], "7")
    assert [r.query.get("continue") for r in server.requests] == [None, "token", None, "token2"]
    assert {r.query.get("labelSelector") for r in server.requests} == {"x=y"}
    server.answers = []
    server.say(410, {"reason": "Expired"})
    with pytest.raises(errors.Expired):
        await api.list("Pod", "team")


async def test_names_are_read_from_the_servers_cache_up_to_a_length(api: KubeApi, server: Faulty) -> None:
    items = [{"metadata": {"name": f"object-{number:05d}"}} for number in range(20_000)]
    server.say(200, {"metadata": {}, "items": items})
    server.say(200, {"metadata": {}, "items": items[:2]})
    server.say(200, {"metadata": {}})
    ask = ("Service", "team", "!x", 100_000)
    assert await api.names(*ask) is None
    assert await api.names(*ask) == {"object-00000", "object-00001"}
    assert await api.names(*ask) == frozenset()
    for unreadable in (
        "<html>a proxy</html>",
        {"metadata": {}, "items": [{}]},
        {"metadata": {}, "items": [7]},
    ):
        server.answers = []
        server.say(200, unreadable)
        with pytest.raises(errors.Unreachable, match="cannot be read"):
            await api.names(*ask)
    assert dict(server.requests[0].query) == {"labelSelector": "!x", "resourceVersion": "0"}
    assert "PartialObjectMetadataList" in server.requests[0].headers["Accept"]


@pytest.mark.parametrize("item", [{}, 7, [], {"metadata": {}}])
async def test_object_that_cannot_be_read_is_an_error_of_the_server(
    item: Any, api: KubeApi, server: Faulty
) -> None:
    """Of a list and of a watch, also in a bookmark: the informer's task goes on."""
    server.say(200, {"metadata": {"resourceVersion": "7"}, "items": [item]})
    informer = Informer(api, Cache(lambda key: None), KINDS["Pod"], "team")
    with pytest.raises(errors.Unreachable, match="list Pod team: the response cannot be read"):
        await listed(api, informer.cache, informer.kind, "team")
    if not isinstance(item, dict):
        with pytest.raises(errors.Unreachable, match="cannot be read"):
            await api.list("Pod", "team")
    for type_ in ("BOOKMARK", "ADDED", "DELETED"):
        server.answers = []
        server.say(200, json.dumps({"type": type_, "object": item}) + "\n")
        with pytest.raises(errors.Unreachable, match="watch Pod team: the response cannot be read"):
            await anext(informer._versions("5"))


async def test_failed_watch_raises_with_the_cause(api: KubeApi, server: Faulty) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n')
        await response.write(
            b'{"type":"ERROR","object":{"code":410,"reason":"Expired","message":"too old"}}\n'
        )
        return response

    server.answers = [fails]
    watch = api.watch("Pod", "team", since="5")
    assert (await anext(watch)).type == "ADDED"
    with pytest.raises(errors.Expired, match="too old"):
        await anext(watch)
    server.answers = []
    server.say(403, {"message": "no", "reason": "Forbidden"})
    with pytest.raises(errors.Forbidden):
        await anext(api.watch("Pod", None, since="5"))


async def test_event_that_cannot_be_written_stops_nothing(
    api: KubeApi, server: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    server.say(503, {"message": "etcd is away"})
    run = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "r", "namespace": "team", "uid": "1"},
    }
    await api.event(run, "Warning", "BackOff", "because")
    assert "etcd is away" in caplog.text


async def test_event_names_its_object(api: KubeApi, server: Faulty) -> None:
    with pytest.raises(ValueError, match="has no namespace"):
        await api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
    with pytest.raises(ValueError, match="written as batch/v1"):
        await api.apply({"apiVersion": "v1", "kind": "Job", "metadata": {"name": "a", "namespace": "n"}})
    with pytest.raises(ValueError, match="not in the operator's table"):
        await api.get("Frigate", "team", "a")
    assert server.requests == []


def test_paths_of_kinds() -> None:
    assert kind_of("Pod").path("team", "a/../b") == "/api/v1/namespaces/team/pods/a%2F..%2Fb"
    assert kind_of("Job").path(None) == "/apis/batch/v1/jobs"
    run = kind_of("ScaleRLRun")
    assert run.path("t", "r", "status") == "/apis/scalerl.dev/v1alpha1/namespaces/t/scalerlruns/r/status"
    assert kind_of("StorageClass").path("ignored", "fast") == "/apis/storage.k8s.io/v1/storageclasses/fast"
    assert not KINDS["Secret"].watched, "a right to list secrets is a right to read them all"


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: there
contexts: [{name: there, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://kube.example:6443"}}]
users: [{name: u, user: {token: secret-token}}]
"""


async def test_client_and_kopf_get_one_connection(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    configuration = await connection.load(
        environ={"KUBECONFIG": str(path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    assert configuration.host == "https://kube.example:6443"
    info = await connection.for_kopf(configuration)
    assert (info.server, info.as_http_headers()) == (
        "https://kube.example:6443",
        {"Authorization": "Bearer secret-token"},
    )


async def test_missing_cluster_is_reported(tmp_path: Path) -> None:
    with pytest.raises(connection.NoCluster, match=r"no kubeconfig at .*missing"):
        await connection.load(str(tmp_path / "missing"))
    with pytest.raises(connection.NoCluster, match="service account"):
        await connection.load(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
