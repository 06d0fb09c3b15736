"""Which refused publishes end the trainer."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl_api import wire
from scalerl_trainer import leader as module
from scalerl_trainer.errors import PublishRefusedError
from scalerl_trainer.leader import Leader
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.publish.probe import Measured
from scalerl_trainer.publish.publisher import Outcome

MEMBER = wire.Member(member_id="new/1", name="new", control_url="http://new", weight_version=-1)
PHASES = ("pause", "transfer", "load", "resume")


@pytest.mark.parametrize(("holders", "ends"), [(0, True), (1, False)])
def test_generator_that_joins_and_disagrees_ends_no_run_of_others(
    monkeypatch: pytest.MonkeyPatch, holders: int, ends: bool
) -> None:
    """As after a restart of the trainer, whose generators hold the version: only the one that joins is probed."""
    commits: list[tuple[Any, ...]] = []
    permit = wire.PublishPermit(ready=True, members=[MEMBER], holders=holders)
    coordinator = SimpleNamespace(
        publish_begin=lambda version, wait: permit, publish_commit=lambda *message: commits.append(message)
    )
    spec = SimpleNamespace(
        autoscaling=SimpleNamespace(mode="Off"), model=SimpleNamespace(dtype="float32"), probe_limit=1e-6
    )
    worker = SimpleNamespace(
        spec=spec,
        coordinator=coordinator,
        version=5,
        probes=[object()],
        engine=SimpleNamespace(checkpoint_shapes=dict),
        ranks=SimpleNamespace(broadcast=lambda command, kind: command),
        metrics=Metrics(),
    )
    stats = {"publish_seconds": 0.1} | {f"publish_{phase}_seconds": 0.0 for phase in PHASES}
    publisher = SimpleNamespace(publish=lambda *_: Outcome(5, ["new/1"], [], "", stats))
    measured = Measured({"probe_kl": 3.0}, {"new/1": torch.full((4,), 3.0, dtype=torch.float64)})
    monkeypatch.setattr(module, "probe", lambda *_: measured)
    leader: Any = Leader(worker, publisher, None, SimpleNamespace(), None)  # type: ignore[arg-type]
    leader._save_last = lambda: ""
    with pytest.raises(PublishRefusedError, match="KL of new 3 ") if ends else contextlib.nullcontext():
        leader._publish()
    ((_, held, failed, _, refused, problem),) = commits
    assert (held, failed, refused) == ([], [], ["new/1"])
    assert "KL of new 3 nats per token" in problem
