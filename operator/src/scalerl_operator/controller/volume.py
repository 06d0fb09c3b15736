"""The run's claim: whether it is being deleted, or is gone with the steps that the run has trained.

A claim cannot be un-deleted, and one that the operator made anew would be empty. So the operator makes a claim only for a
run without steps; another that has lost its claim is held until somebody restores the claim or gives the steps up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import ExportsStatus, RunStatus, TroubleStatus
from scalerl_operator.controller.observe import Problem
from scalerl_operator.controller.run_context import CLAIM, RunContext, is_deleted
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ABANDON, RUN, RUN_UID, Names, label_value

ASK_SECONDS: Final = 30.0
"""Between two questions for a claim that the run only names: it has no label by which it would be watched."""


@dataclass(frozen=True)
class Volume:
    """problem: what is wrong with the claim; None: nothing. gone: no pod may start on it, for it holds none of the run's
    steps, or will not for long."""

    problem: Problem | None = None
    gone: bool = False


async def observe_volume(
    api: KubeApi, run: ScaleRLRun, context: RunContext, steps: int, *, mounted: bool, empty: bool = False
) -> Volume:
    """The state of the run's claim.

    steps: trained so far. mounted: pods of the run may still have the volume mounted. empty: the coordinator found none of
    the steps on it.
    """
    named = run.spec.storage.claim_name
    name = named or Names(context.name).claim
    live = context.objects.get((CLAIM, name)) if named is None else None
    labels = f"{RUN}={label_value(context.name)} {RUN_UID}={context.uid}" if named is None else ""
    if live is None and steps:
        live = await _get_claim(api, context, name, cached=mounted and named is not None)
    if live is None:
        return Volume(_lost(name, steps, "does not exist", labels), gone=True) if steps else Volume()
    if named is None and not context.owns(live):
        if not steps:
            return Volume()  # the name is taken, as of any object
        how = f"is not known as this run's (if it is: kubectl label pvc {name} --overwrite {labels})"
        return Volume(_lost(name, steps, how), gone=True)
    if (live.get("status") or {}).get("phase") == "Lost" and steps:
        return Volume(_lost(name, steps, "has lost its volume", labels), gone=True)
    if steps and empty:
        return Volume(_lost(name, steps, "holds neither journal nor checkpoint of the run"), gone=True)
    if not is_deleted(live):
        return Volume()
    if steps and not mounted:
        return Volume(_lost(name, steps, "is being deleted", labels), gone=True)
    said = f"PersistentVolumeClaim {name} is being deleted; it and its data go with the last pod that has it mounted"
    return Volume(Problem(Reason.CLAIM_DELETED, said))


async def _get_claim(api: KubeApi, context: RunContext, name: str, *, cached: bool) -> Object | None:
    asked, live = context.state.claim_asked
    if not (cached and 0 <= context.unix_seconds - asked < ASK_SECONDS):
        live = await api.get(CLAIM, context.namespace, name)
        context.state.claim_asked = (context.unix_seconds, live)
    return live


def _lost(name: str, steps: int, how: str, labels: str = "") -> Problem:
    """``labels``: of the claim that is to take its place; empty where it needs none."""
    said = f"PersistentVolumeClaim {name} {how}; the run has trained {steps} steps and does not start on an empty volume"
    if labels:
        said += f"; the claim restored in its place needs the labels {labels}"
    return Problem(Reason.CLAIM_LOST, said)


def abandons(context: RunContext, steps: int) -> bool:
    """Whether somebody has given up exactly these steps."""
    return (context.run["metadata"].get("annotations") or {}).get(ABANDON) == str(steps)


def without_steps(status: RunStatus) -> RunStatus:
    """The status of a run that begins again at step 0."""
    none = {
        "step": None,
        "last_step_time": None,
        "reward": None,
        "points": 0,
        "forecast": None,
        "decision": None,
    }
    empty = {"decisions": [], "exports": ExportsStatus(), "trouble": TroubleStatus()}
    return status.model_copy(update={**none, **empty})
