"""Takes over runs that another release of the operator left: spec hashes of Jobs, and the autoscaler's number.

Another release may have hashed other fields. Compared with ours, its hash says nothing of whether the spec has changed, and a
run must not stop for it.
"""

from __future__ import annotations

import json
import logging
from typing import Final

from scalerl_api.load import accepted_run
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.build.shared import SPEC_HASH_VERSION, spec_hash
from scalerl_operator.controller.accepted_spec import with_spec
from scalerl_operator.controller.observe import label
from scalerl_operator.controller.run_context import RunContext, is_deleted
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import COMPONENT, SCALED_BY, SPEC_HASH
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

_ROLES: Final = (Role.PREPARE, Role.TRAINER)


async def adopt_spec_hashes(api: KubeApi, cache: Cache, context: RunContext) -> None:
    """Write into such Jobs the hash of the spec accepted last, which they were made for; where none is kept, of the present
    one. Not in a run that is being drained: its Jobs are for an earlier spec already, or about to go.
    """
    if context.memory.drain_since is not None:
        return
    for key, job in list(context.objects.items()):
        metadata, role = job["metadata"], label(job, COMPONENT)
        said = (metadata.get("annotations") or {}).get(SPEC_HASH)
        foreign = said is not None and not said.startswith(f"{SPEC_HASH_VERSION}-")
        if key[0] != "Job" or not foreign or role not in _ROLES or not context.owns(job) or is_deleted(job):
            continue
        kept = context.before.accepted_spec or json.dumps(context.run["spec"])
        annotations = {SPEC_HASH: spec_hash(accepted_run(with_spec(context.run, kept)), Role(role))}
        patch = {"metadata": {"uid": metadata["uid"], "annotations": annotations}}
        try:
            job = await api.patch("Job", context.namespace, metadata["name"], patch)
        except errors.NotFound:
            continue
        except (errors.Forbidden, errors.Invalid) as error:
            log.warning("%s/%s: Job %s: %s", context.namespace, context.name, metadata["name"], error)
            job = {
                **job,
                "metadata": {**metadata, "annotations": {**metadata["annotations"], **annotations}},
            }
        else:
            cache.remember(job)
        context.objects[key] = job


def number_of_earlier_release(run: ScaleRLRun, context: RunContext) -> int | None:
    """The number of generators that the autoscaler of the release before had chosen, which it kept in the status; None: there
    is none, a person's number stood against it, or it is in the spec by now."""
    known, allowed = context.before.generators, run.spec.autoscaling.generators
    number, wanted = known.chosen, run.spec.generator.replicas
    if run.spec.autoscaling.mode != "Auto" or allowed is None or number is None or known.base != wanted:
        return None
    number = min(max(number, allowed.min), allowed.max)
    return (
        None
        if number == wanted or SCALED_BY in (context.run["metadata"].get("annotations") or {})
        else number
    )
