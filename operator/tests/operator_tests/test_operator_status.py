"""What the status of a run shows of its spec."""

from __future__ import annotations

from operator_tests.manifests import cluster_run, findings
from scalerl_api.conditions import Phase
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState
from scalerl_operator.controller.report import report


def test_status_shows_recipe_values_and_origins() -> None:
    run = cluster_run(
        recipe={"preset": "gspo", "temperature": "0.9", "length": {"interruption": {"phrase": "x" * 500}}}
    )
    status = report(findings(run, decision=LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1))))
    shown = {value["field"]: (value["value"], value["origin"]) for value in status.to_object()["recipe"]}
    assert shown["loss.gspo.clipLow"] == ("3e-4", "preset: GSPO, arXiv 2507.18071 [P]")
    assert shown["offPolicy.ppo.stepsPerBatch"] == ("4", "preset: GSPO, arXiv 2507.18071 [S]")
    assert shown["temperature"] == ("0.9", "spec")
    assert shown["kl.none"] == ("{}", "default")
    assert shown["length.interruption.phrase"] == ("x" * 256, "spec"), (
        "cut: a status is no place for long texts"
    )
