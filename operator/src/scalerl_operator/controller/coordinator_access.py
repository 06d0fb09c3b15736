"""Access to a run's coordinator: the Secret to authenticate with, its status, and stop requests.

The operator may not watch Secrets: it reads this one by name, now and then, and when a pod or the coordinator gives a reason.
"""

from __future__ import annotations

import base64
import secrets
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_operator.build import secret
from scalerl_operator.controller.conditions import update_trouble
from scalerl_operator.controller.refusals import refused
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.coordinator_poller import CoordinatorPollers
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import TOKEN_KEY, Names
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

CHECK_SECONDS: Final = 120.0
"""Between two reads of a run's Secret."""


async def ask_coordinator(api: KubeApi, pollers: CoordinatorPollers, context: RunContext) -> bool:
    """Notes the coordinator's last status in ``context``. False: no answer is as new as what is observed of the pods; the
    poller wakes the run when there is one, or when it is clear that there is none."""
    if context.memory.outcome is not None or (context.accepted is None and not context.deleted):
        await pollers.forget(context.uid)
        return True
    pods = context.observed.of(Role.COORDINATOR)
    answer = await pollers.poll(
        context.uid,
        pods,
        lambda again: read_token(api, context, again=again),
        (pods, context.observed.trainer),
    )
    context.coordinator, context.coordinator_refusal = answer.status, pollers.refusal(context.uid)
    if answer.status is not None:
        trouble = update_trouble(context.before.trouble, answer.status, context.unix_seconds)
        context.before = context.before.model_copy(update={"trouble": trouble})
    return answer.known


async def request_stop(api: KubeApi, pollers: CoordinatorPollers, context: RunContext) -> None:
    """Asks the coordinator to stop, or cancels that, where the decision says so."""
    reason = context.decision.request_stop
    if reason is not None and await pollers.request_stop(context.uid, reason):
        text = f"Asked the coordinator to stop: {reason}" if reason else "Cancelled the stop request"
        event = Reason.STOPPING if reason else Reason.STOP_CANCELLED
        await api.event(context.obj, "Normal", event, text)


async def read_token(api: KubeApi, context: RunContext, *, again: bool = False) -> str:
    """The run's token; empty while it has none. ``again``: as the Secret has it now."""
    state = context.state
    if again or not state.token:
        held = await api.get("Secret", context.namespace, Names(context.name).token)
        state.token_checked = context.unix_seconds
        if held is not None and context.owns(held):
            state.token = _token(held)
        elif held is None and again:
            state.token_doubted = True
    return state.token


async def ensure_token(api: KubeApi, context: RunContext) -> Problem | None:
    """Creates the Secret where there is none. Not for a run that is being deleted, whose Secret the garbage collector may
    have deleted already: no new pod is to read it."""
    if context.deleted:
        return None
    state, name = context.state, Names(context.name).token
    # Of a run that has nothing yet, there is no token to ask for.
    known = bool(state.token) if not context.objects else bool(await read_token(api, context))
    if known and not 0 <= context.unix_seconds - state.token_checked < CHECK_SECONDS:
        state.token_checked = context.unix_seconds
        state.token_doubted |= await api.get("Secret", context.namespace, name) is None
    if known and not state.token_doubted:
        return None
    # One that somebody has deleted comes back as it was: running pods still hold it.
    wanted = secret(context.run, context.uid, state.token or secrets.token_urlsafe(32))
    try:
        held: Object | None = await api.create(wanted)
    except errors.AlreadyExists:
        held = await api.get("Secret", context.namespace, name)
    except (errors.Invalid, errors.Forbidden) as error:
        return refused(error, wanted, context)
    if held is None or not context.owns(held):
        return Problem(Reason.NAME_TAKEN, f"Secret {name} exists and is not this run's")
    state.token, state.token_checked, state.token_doubted = _token(held), context.unix_seconds, False
    return None


def _token(held: Object) -> str:
    data = held.get("data") or {}
    return base64.b64decode(data.get(TOKEN_KEY, "")).decode()
