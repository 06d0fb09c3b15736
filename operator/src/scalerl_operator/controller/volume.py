"""The run's claim: its size, and whether it still holds the steps that the run has trained.

A deletion of a claim cannot be undone, and a new claim is empty. So the operator only creates the claim of a run without steps;
a run with steps that has lost its claim waits until the claim is restored, or its steps are abandoned. With ``checkpoint.to`` it
gets a new claim once no pod has the old one mounted, and continues from the newest copy of its checkpoints.

The size grows with ``spec.storage.size`` or by an edit of the claim, if the StorageClass permits it, and never shrinks. A
refusal does not keep the run's other objects from being applied.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from kubernetes.utils.quantity import parse_quantity

from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_lifecycle.lifecycle_types import JobState, Problem
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import CLAIM, Checks, Findings, Observed, Run
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.errors import ApiError
from scalerl_operator.kube.objects import is_deleted, true_condition
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ABANDON, RUN, RUN_UID, Names, label_value

if TYPE_CHECKING:
    from scalerl_operator.controller.run_object import RunObject

READ_SECONDS: Final = 30.0
"""Between two reads of a claim that the spec names: without the run's label, it is not watched."""
RETRY_SECONDS: Final = 300.0
"""From the refusal of a size to the next try."""
OF_STEPS: Final = (
    *("step", "progress", "eta", "budget", "last_step_time", "reward", "points", "usage", "stop_reason"),
    *("has_trained", "unproven_since", "trained_spec", "suspending_for", "faults", "exports"),
    *("forecast", "outlook", "decision", "stop_votes", "decisions"),
)
"""Fields of the status that follow from the steps on the volume; the others stay when the steps are abandoned."""
_RESIZE_FAILED: Final = ("ControllerResizeError", "NodeResizeError")
"""Conditions of a claim whose storage could not be enlarged."""


async def check_volume(api: KubeApi, run_object: RunObject, findings: Findings) -> Checks | None:
    """The claim's problem, and whether pods may start on it. None: a user has abandoned the run's steps, and they have been
    removed from its status; it is to be reconciled again."""
    run, decision = findings.run, findings.decision
    mounted = may_have_mounted(findings.observed)
    # The coordinator has reported that the volume holds none of the run's steps.
    empty = any(pod.steps_lost for pod in findings.observed.of(Role.COORDINATOR))
    # A trainer that fails for an empty volume does not end the run.
    outcome = run.persisted.outcome if empty else decision.persisted.outcome
    if run.deleted or outcome is not None:
        return Checks()
    problem, gone = await _claim_problem(api, findings, mounted=mounted, empty=empty)
    abandoned = run.annotation(ABANDON) == str(run.steps)
    if gone and abandoned and (empty or not mounted):
        text = f"{run.steps} steps are abandoned: {ABANDON}"
        await run_object.write(run, without_steps(run.before), at_once=True)
        await api.event(run.obj, "Warning", Reason.STEPS_ABANDONED, text)
        return None
    starts = (
        decision.wanted.prepare
        or decision.wanted.coordinator
        or decision.wanted.generators
        or decision.wanted.trainer is not None
    )
    # Pods that drain still save to the volume.
    held_back = gone and starts and ((empty and decision.update_existing) or not mounted)
    return Checks(not_started=problem if held_back else None, volume=problem, claim_gone=gone)


def may_have_mounted(observed: Observed) -> bool:
    """Whether pods of the run may have mounted its volume."""
    trainer = observed.trainer
    in_queue = trainer.gated and not trainer.pods_terminating
    return observed.serving or (trainer.state in (JobState.ACTIVE, JobState.TERMINATING) and not in_queue)


async def _claim_problem(
    api: KubeApi, findings: Findings, *, mounted: bool, empty: bool
) -> tuple[Problem | None, bool]:
    """The claim's problem, and whether no pod may start on it."""
    run, spec = findings.run, findings.accepted.spec
    named, steps = spec.storage.claim_name, run.steps
    # With copies of the checkpoints, a new claim is as good, but not for pods that have the old one mounted.
    replaced = named is None and spec.checkpoint.to is not None
    name = named or Names(run.name).claim
    labels = f"{RUN}={label_value(run.name)} {RUN_UID}={run.uid}" if named is None else ""

    def lost(how: str, labels: str = "") -> tuple[Problem, bool]:
        text = f"PersistentVolumeClaim {name} {how}"
        if replaced and mounted:
            text += ": suspend and resume the run, which then continues on a new one from the newest complete copy in checkpoint.to"
        else:
            text += f"; the run has trained {steps} steps and does not start on an empty volume"
            text += f"; the claim restored in its place needs the labels {labels}" if labels else ""
        return Problem(Reason.CLAIM_LOST, text), True

    live = run.objects.get((CLAIM, name)) if named is None else None
    if live is None and steps:
        live = await _get_claim(api, run, name, cached=mounted and named is not None)
    if live is None:
        return (None, False) if not steps or (replaced and not mounted) else lost("does not exist", labels)
    if named is None and not run.owns(live):
        if not steps:
            return None, False  # reported as a name that is taken
        return lost(f"is not known as this run's (if it is: kubectl label pvc {name} --overwrite {labels})")
    if (live.get("status") or {}).get("phase") == "Lost" and steps:
        return lost("has lost its volume", labels)
    if steps and empty:
        return lost("holds neither journal nor checkpoint of the run")
    if not is_deleted(live):
        return None, False
    if steps and not mounted:
        return lost("is being deleted", labels)
    text = f"PersistentVolumeClaim {name} is being deleted; it and its data are removed after the last pod that mounts it"
    return Problem(Reason.CLAIM_DELETED, text), False


async def _get_claim(api: KubeApi, run: Run, name: str, *, cached: bool) -> Object | None:
    read_at, live = run.state.claim_read
    if not (cached and 0 <= run.unix_seconds - read_at < READ_SECONDS):
        live = await api.get(CLAIM, run.namespace, name)
        run.state.claim_read = (run.unix_seconds, live)
    return live


def without_steps(status: RunStatus) -> RunStatus:
    """The status of a run that restarts at step 0."""
    return status.model_copy(update={name: RunStatus.model_fields[name].get_default() for name in OF_STEPS})


# --- size ---------------------------------------------------------------------------------------


def _size(claim: Object) -> Any:
    return claim["spec"]["resources"]["requests"]["storage"]


def never_smaller(wanted: Object, live: Object) -> Object:
    """``wanted`` with the live size unless it wants more. The live text is kept: ``1024Gi`` and ``1Ti`` are the same size."""
    if parse_quantity(_size(live)) < parse_quantity(_size(wanted)):  # type: ignore[no-untyped-call]
        return wanted
    wanted = copy.deepcopy(wanted)
    wanted["spec"]["resources"]["requests"]["storage"] = _size(live)
    return wanted


def size_problem(run: Run) -> Problem | None:
    """Why the run's claim is smaller than wanted: the API server refused the size, or the volume could not be resized."""
    if run.state.size_refused is not None:
        return run.state.size_refused[2]
    claim = run.objects.get((CLAIM, Names(run.name).claim)) or {}
    for type_ in _RESIZE_FAILED:
        if condition := true_condition(claim, type_):
            name, why = claim["metadata"]["name"], condition.get("message") or type_
            return Problem(Reason.CLAIM_NOT_ENLARGED, f"PersistentVolumeClaim {name}: {why}")
    return None


def was_refused(run: Run, wanted: Object, live: Object) -> bool:
    """Whether the API server refused this size of the claim less than :data:`RETRY_SECONDS` ago."""
    size, at, _ = run.state.size_refused or (None, 0.0, None)
    if size == _size(wanted) and size != _size(live) and 0 <= run.unix_seconds - at < RETRY_SECONDS:
        return True
    run.state.size_refused = None
    return False


def note_refusal(run: Run, wanted: Object, live: Object, error: ApiError) -> bool:
    """Records the refusal of a claim; False if its size is not the reason."""
    if _size(wanted) == _size(live):
        return False
    name = wanted["metadata"]["name"]
    text = f"PersistentVolumeClaim {name} stays at {_size(live)}, spec.storage.size is {_size(wanted)}: {error.message}"
    problem = Problem(Reason.CLAIM_NOT_ENLARGED, text)
    run.state.size_refused = (_size(wanted), run.unix_seconds, problem)
    return True
