"""``metrics.authentication``: scrapes of an operator at work, with tokens of a real API server."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import aiohttp
import pytest
from replicas import noting, running, settings
from testcluster import Cluster

from scalerl_operator import main
from scalerl_operator.kube import connection
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.scrape_access import ScrapeAccess

pytestmark = pytest.mark.cluster


async def test_scrape_needs_the_token_of_a_user_who_may(served: Cluster, namespace: str) -> None:
    token, role = make_account(served, namespace), f"{namespace}-metrics"
    chosen = dataclasses.replace(settings(served, namespace), metrics_authentication=True)
    operator = main.Operator(chosen, await connection.load(chosen.kubeconfig), noting([]))
    try:
        async with running(operator):
            while operator.address is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert await scrape(operator) == (401, "no valid bearer token\n")
            assert (await scrape(operator, "made up"))[0] == 401
            code, text = await scrape(operator, token)
            assert code == 403
            assert "ClusterRole" in text
            for path in ("/healthz", "/readyz"):
                assert (await scrape(operator, path=path))[0] != 401, "the kubelet has no token"
            served.kubectl("create", "clusterrole", role, "--verb=get", "--non-resource-url=/metrics")
            account = f"--serviceaccount={namespace}:prometheus"
            served.kubectl("create", "clusterrolebinding", role, f"--clusterrole={role}", account)
            # By an operator that does not lead, which writes nothing.
            async with KubeApi(await connection.load(chosen.kubeconfig), fence=lambda: False) as standby:
                for _ in range(240):
                    if await ScrapeAccess(standby).status(f"Bearer {token}") == 200:
                        break
                    await asyncio.sleep(0.5)
            operator._scrape_access = ScrapeAccess(operator.api)  # as a minute later
            code, text = await scrape(operator, token)
            assert code == 200
            assert "scalerl_operator_" in text
            served.kubectl("delete", "serviceaccount", "prometheus", "-n", namespace)
            for _ in range(240):
                if await ScrapeAccess(operator.api).status(f"Bearer {token}") == 401:
                    break
                await asyncio.sleep(0.5)
            else:
                raise AssertionError("the token of an account that is gone is taken")
    finally:
        served.kubectl("delete", "clusterrole,clusterrolebinding", role, "--ignore-not-found")


def make_account(served: Cluster, namespace: str) -> str:
    """A token of another service account."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "prometheus"}}
    served.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(account))
    return served.kubectl("create", "token", "prometheus", "-n", namespace).strip()


async def scrape(operator: main.Operator, token: str = "", path: str = "/metrics") -> tuple[int, str]:
    assert operator.address is not None
    host, port = operator.address
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.text()
