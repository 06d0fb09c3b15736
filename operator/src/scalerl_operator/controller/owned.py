"""Place: one run as it is found, whose what is found is, and what the API server's no comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.cluster import ImagesSpec
from scalerl_api.conditions import Reason
from scalerl_api.spec import KIND
from scalerl_operator.controller.message_patterns import creation_problem
from scalerl_operator.controller.observe import Problem, belongs, label
from scalerl_operator.controller.spec_fields import in_terms_of_the_spec
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Images, Object
from scalerl_operator.names import COMPONENT, IMAGE
from scalerl_operator.workloads import Role

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"


@dataclass(frozen=True)
class Place:
    """One run as it is found: the object, and what there is of it by (kind, name), with what was written since."""

    run: Object
    objects: dict[tuple[str, str], Object]
    unix_seconds: float

    @property
    def uid(self) -> str:
        return str(self.run["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        return str(self.run["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.run["metadata"]["name"])

    def mine(self, obj: Object) -> bool:
        """Whether an object is this run's, not an earlier one's of the same name."""
        return belongs(obj, self.uid)


def leaving(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def pinned(place: Place, named: ImagesSpec, images: Images) -> Images:
    """``images``, but for roles that work already: an upgrade of the operator does not mix versions in a run that is
    under way. One that was suspended takes the new ones.

    named: the run's own, which win. Each workload has beside its image the one that it would have without: a role whose
    image is no longer named goes back to that, and not to what it had been given.
    """
    given: dict[str, str | None] = {
        Role.PREPARE: named.trainer,
        Role.TRAINER: named.trainer,
        Role.GENERATOR: named.generator,
        Role.COORDINATOR: named.coordinator,
    }
    live: dict[str, str] = {}
    for (kind, _), obj in place.objects.items():
        if kind in WORKLOADS and place.mine(obj) and not leaving(obj):
            role = label(obj, COMPONENT)
            own = (obj["metadata"].get("annotations") or {}).get(IMAGE)
            if own is None and given.get(role) is None:  # made by a release that did not note it
                own = obj["spec"]["template"]["spec"]["containers"][0]["image"]
            if own is not None:
                live[role] = own
    return Images(
        trainer=live.get(Role.TRAINER, live.get(Role.PREPARE, images.trainer)),
        generator=live.get(Role.GENERATOR, images.generator),
        coordinator=live.get(Role.COORDINATOR, images.coordinator),
        pull_policy=images.pull_policy,
    )


def not_mine(live: Object, kind: str, name: str, place: Place) -> Problem | None:
    """What an object in the way of the run's comes to; None: it is the run's."""
    if place.mine(live):
        return None
    what = f"{kind} {name}"
    if kind == CLAIM:
        return Problem(Reason.CLAIM_TAKEN, f"{what} holds another run's data")
    owners = live["metadata"].get("ownerReferences") or ()
    if leaving(live) or any(o.get("kind") == KIND and o.get("name") == place.name for o in owners):
        return Problem(
            Reason.NAME_TAKEN, f"{what} is of an earlier run of this name, and still being removed"
        )
    return Problem(Reason.NAME_TAKEN, f"{what} exists and is not this run's")


def refused(error: errors.ApiError, what: str, obj: Object, run: Object) -> Problem:
    """What the API server's no to ``obj``, which was rendered from ``run``, comes to."""
    if isinstance(error, errors.QuotaExceeded):
        return Problem(Reason.QUOTA_EXCEEDED, f"{what}: {error.message}")
    if isinstance(error, errors.Forbidden) and "cannot" in error.message and "User" in error.message:
        return Problem(Reason.FORBIDDEN, f"{what}: {error.message}")
    return Problem(creation_problem(error.message), f"{what}: {in_terms_of_the_spec(error, obj, run)}")
