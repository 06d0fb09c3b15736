"""What is written of a run's status: each thing once, and nothing of steps that were given up."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from scalerl_api.spec import KIND
from scalerl_api.status import ExportsStatus, RunStatus
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.volume import without_steps
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.policy.lifecycle_types import Memory


class OlderServer:
    """Takes a status as an API server does whose CRD lacks ``acceptedSpec``: it drops the field and says nothing."""

    def __init__(self) -> None:
        self.writes = 0

    async def patch(self, *of: Any, resource_version: str, **more: Any) -> dict[str, Any]:
        self.writes += 1
        status = {k: v for k, v in of[3]["status"].items() if v is not None and k != "acceptedSpec"}
        metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": str(self.writes + 1)}
        return {"kind": KIND, "metadata": metadata, "status": status}

    async def event(self, *of: Any) -> None:
        pass


async def test_a_field_that_an_older_crd_does_not_keep_is_written_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}
    seen = RunContext({"kind": KIND, "metadata": metadata}, {}, 100.0, RunStatus(), Memory())
    server = OlderServer()
    ours = RunObject(cast(KubeApi, server), Cache(lambda key: None))
    for _ in range(3):
        await ours.write(seen, RunStatus(accepted_spec="{}"), at_once=True)
    assert server.writes == 1
    assert [r.levelname for r in caplog.records if "does not keep status.acceptedSpec" in r.message] == [
        "WARNING"
    ]


def test_a_run_that_begins_again_has_neither_models_nor_decisions() -> None:
    before = RunStatus(step=3, decision="Watching", exports=ExportsStatus(problem="full"))
    after = without_steps(copy.deepcopy(before))
    assert (after.step, after.decision, after.decisions, after.exports) == (None, None, [], ExportsStatus())
