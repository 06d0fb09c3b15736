"""Whether the LocalQueue (Kueue) that a run is labelled with exists."""

from __future__ import annotations

from typing import Final

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_operator.controller.observe import label
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import QUEUE

ASK_SECONDS: Final = 30.0
"""Between two questions for the queue of one run."""
_BEFORE_THE_END: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING)


async def queue_problem(api: KubeApi, context: RunContext, phase: Phase) -> str:
    """Why no queue holds the run; empty where one has admitted it, where it exists, and where the operator may not read it.

    Asks at most every :data:`ASK_SECONDS` for one run.

    Raises:
        ApiError: the API server did not answer.
    """
    queue, admitted = label(context.run, QUEUE), context.before.condition(ConditionType.ADMITTED)
    known = admitted is not None and admitted.status == "True" and admitted.reason != Reason.NO_QUEUE
    if not queue or known or phase not in _BEFORE_THE_END:
        return ""
    asked, problem = context.state.queue_asked
    if 0 <= context.unix_seconds - asked < ASK_SECONDS:
        return problem
    try:
        found = await api.get("LocalQueue", context.namespace, queue)
    except errors.Forbidden:
        found = {}  # by a role that is not the chart's
    problem = "" if found is not None else f"no LocalQueue {queue} in the namespace {context.namespace}"
    context.state.queue_asked = (context.unix_seconds, problem)
    return problem
