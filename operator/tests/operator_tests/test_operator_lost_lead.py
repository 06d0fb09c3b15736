"""What a replica that no longer leads has to forget, and answers that cannot be read."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.errors import Unreachable
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.transport import Call, translated
from scalerl_operator.manifests.scope import Images


async def test_decisions_of_an_earlier_lead_are_forgotten() -> None:
    closed: list[str] = []

    class Autoscaler:
        def close(self) -> None:
            closed.append("closed")

    cache = Cache(lambda key: None)
    api = KubeApi(Configuration())
    reconciler = Reconciler(api, cache, images=Images("t", "g", "c"), operator_namespace="o")
    state = await reconciler._known.state(("ns", "run"), "u")
    assert state is not None
    state.autoscaler = cast(Any, Autoscaler())
    await reconciler.forget_all()
    assert closed == ["closed"]
    assert await reconciler._known.state(("ns", "run"), "u") is not state


def test_unreadable_response_is_retried() -> None:
    with (
        pytest.raises(Unreachable, match="cannot be read"),
        translated(Call("list", kind_of("Pod"), None), ""),
    ):
        msgspec.json.decode(b"<html>a proxy's page")
