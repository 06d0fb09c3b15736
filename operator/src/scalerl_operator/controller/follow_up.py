"""What follows from a reconcile for others: the quota of an evicted run, edits of ``spec``, the deletion of an expired run; and when to
reconcile again."""

from __future__ import annotations

from typing import Final

from scalerl_lifecycle.status_fields import is_over
from scalerl_operator.controller import gang_admission
from scalerl_operator.controller.cluster_autoscaler import number_to_scale_to
from scalerl_operator.controller.diagnosis import next_start_check
from scalerl_operator.controller.parts import Findings
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.volume import RETRY_SECONDS
from scalerl_operator.kube.client import KubeApi

BLOCKED_SECONDS: Final = 30.0
"""Between two reconciles of a run of which an object was refused."""


async def follow_up(api: KubeApi, run_object: RunObject, findings: Findings) -> float | None:
    """Tells others what was decided. Returns the seconds until the next reconcile."""
    run, decision, state = findings.run, findings.decision, findings.run.state
    if findings.accepted.found is None:
        return decision.again_seconds
    if findings.checks.not_started is None:
        await gang_admission.write_workload_status(api, findings)
        if decision.set_suspend:
            await run_object.suspend(run)
        elif (number := number_to_scale_to(findings)) is not None:
            await run_object.scale(run, number, findings.observed.autoscaler.decision)
            return 0.0  # the operator's own write wakes no run
    repair = state.next_repair_seconds(run.unix_seconds)
    if is_over(decision.persisted):
        ttl = findings.accepted.spec.ttl_seconds_after_finished
        return soonest(await run_object.expire(run, ttl), repair)
    # A restored claim without the run's label is not watched.
    unwatched = findings.blocked is not None or findings.checks.claim_gone or state.workload_refusal
    return soonest(
        decision.again_seconds,
        findings.observed.young_seconds,
        repair,
        RETRY_SECONDS if state.size_refused is not None else None,
        BLOCKED_SECONDS if unwatched else None,
        next_start_check(findings),
    )


def soonest(*waits: float | None) -> float | None:
    """The shortest of the waits that there are; None: there is none."""
    return min((wait for wait in waits if wait is not None), default=None)
