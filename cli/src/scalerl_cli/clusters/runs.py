"""A run of a cluster, or the record of one that was deleted, and the texts that describe it."""

from __future__ import annotations

import difflib
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from scalerl_api.conditions import BY_IMPORTANCE, ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_cli.clusters.session import ClusterProblem, Session, not_installed
from scalerl_cli.exits import NOT_FOUND
from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import RUN
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.run_record import POINTS_LEFT_OUT, RECORDED_CURVE_KEY, RUN_KEY
from scalerl_operator.names import ENDED, Names, label_value

ENDED_PHASES: Final = (Phase.COMPLETED, Phase.FAILED)
_ORDER: Final = (
    (ConditionType.FAILED, "True"),
    (ConditionType.SUSPENDED, "True"),
    (ConditionType.COMPLETED, "True"),
    *BY_IMPORTANCE,
)
"""Conditions by importance, with the status that explains why a run does not train."""


@dataclass(frozen=True)
class Run:
    """A ScaleRLRun, or its record."""

    obj: Object
    """The object; of a record, its metadata, spec and status at its deletion."""
    record: Mapping[str, str] | None = None
    """Data of the record; None for a run that exists."""

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"].get("uid", ""))

    @property
    def spec(self) -> Object:
        return dict(self.obj.get("spec") or {})

    @property
    def status(self) -> Object:
        return dict(self.obj.get("status") or {})

    @property
    def names(self) -> Names:
        return Names(self.name)

    @property
    def claim(self) -> str:
        """Name of the claim with the run's files."""
        return str((self.spec.get("storage") or {}).get("claimName") or self.names.claim)

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or Phase.PENDING)

    @property
    def condition(self) -> Mapping[str, Any] | None:
        """The condition that explains most why the run does not train; None if all is well."""
        found = {c.get("type"): c for c in self.status.get("conditions") or ()}
        for type_, status in _ORDER:
            if (one := found.get(type_)) is not None and one.get("status") == status:
                return dict(one)
        return None

    @property
    def reason(self) -> str:
        """Reason of that condition, or what the operator gives as the reason."""
        if self.status.get("reason"):
            return str(self.status["reason"])
        return "" if self.condition is None else str(self.condition.get("reason", ""))

    @property
    def steps(self) -> str:
        """Steps trained, of those of the budget, like ``50/160``."""
        return str(self.status.get("progress") or "")

    @property
    def eta(self) -> str:
        """Time until the budget is used, as the operator estimates it."""
        return str(self.status.get("eta") or "")

    @property
    def ended_at(self) -> str:
        """When the run ended or was deleted; empty before."""
        deleted = self.obj["metadata"].get("deletionTimestamp") if self.record is not None else None
        return str(self.status.get("completionTime") or deleted or "")

    @property
    def age(self) -> str:
        """Since its creation; of a record, since its end."""
        start = self.ended_at if self.record is not None else self.obj["metadata"].get("creationTimestamp")
        return since(start)

    @property
    def curve(self) -> tuple[str, int]:
        """The curve of a record, and the number of points that it leaves out."""
        kept = self.record or {}
        return kept.get(RECORDED_CURVE_KEY, ""), int(kept.get(POINTS_LEFT_OUT, 0))


def find(session: Session, name: str) -> Run:
    """The run of that name in the session's namespace, else the newest record of one that was deleted.

    Raises:
        ClusterProblem: there is neither, with similar names and other namespaces.
        errors.ApiError: the user may not read runs.
    """
    if (obj := session.get(RUN, session.namespace, name)) is not None:
        return Run(obj)
    found = [run for run in records(session, session.namespace, name) if run.name == name]
    if found:
        return found[0]
    raise ClusterProblem(_no_run(session, name), NOT_FOUND)


def records(session: Session, namespace: str | None, name: str | None = None) -> list[Run]:
    """Records of deleted runs, newest first; none if the user may not list ConfigMaps. name: only of runs of that name."""
    labels = ENDED if name is None else f"{ENDED}={label_value(name)}"
    try:
        found = session.list("ConfigMap", namespace, labels)
    except errors.Forbidden:
        if name is None:
            raise
        return []
    runs = []
    for one in found:
        data = one.get("data") or {}
        try:
            obj = json.loads(data[RUN_KEY])
            # A record is the user's own to edit: what it says of its namespace counts for nothing.
            name = str(obj["metadata"]["name"])
            obj["metadata"] |= {"namespace": one["metadata"]["namespace"], "name": name}
            runs.append(Run(obj, data))
        except (KeyError, ValueError, TypeError):
            continue
    return sorted(runs, key=lambda run: run.ended_at, reverse=True)


def _no_run(session: Session, name: str) -> str:
    """What to do about a run that does not exist."""
    text = f"there is no run {name!r} in the namespace {session.namespace}"
    try:
        here = [str(run["metadata"]["name"]) for run in session.list(RUN, session.namespace)]
    except errors.NotFound:
        return not_installed()
    except errors.ApiError:
        return text
    if close := difflib.get_close_matches(name, here, n=3, cutoff=0.6):
        return f"{text}; did you mean {' or '.join(close)}?"
    try:
        others = {
            run["metadata"]["namespace"] for run in session.list(RUN, None) if run["metadata"]["name"] == name
        }
    except errors.ApiError:
        others = set()
    if others:
        return f"{text}; there is one in {', '.join(sorted(others))}: use -n"
    shown = ", ".join(here[:5]) + (f" and {len(here) - 5} more" if len(here) > 5 else "")
    return f"{text}; it has {shown or 'none; -n selects another namespace'}"


def advice(condition: Mapping[str, Any]) -> str:
    """What to do about a condition, in the words of its reason; of a reason of another release, of its type."""
    reason = str(condition.get("reason", ""))
    if reason in set(Reason):
        return Reason(reason).text
    if reason in set(Phase):
        return Phase(reason).text
    type_ = condition.get("type")
    return ConditionType(type_).todo if type_ in set(ConditionType) else ""


def plain(text: object) -> str:
    """Text of a cluster on one line, without control characters: messages quote logs of any program.

    >>> plain("a\\nb\\x1b[31m")
    'a b[31m'
    """
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


def since(time_text: object) -> str:
    """Time since an RFC 3339 time, like ``3h30m``; empty without one."""
    try:
        return duration(time.time() - datetime.fromisoformat(str(time_text)).timestamp())
    except ValueError:
        return ""


def duration(seconds: float) -> str:
    """A duration of two units.

    >>> duration(30), duration(200), duration(12_600), duration(400_000)
    ('30s', '3m20s', '3h30m', '4d15h')
    """
    whole = max(0, int(seconds))
    units = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
    for (one, size), (two, below) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{one}{f'{rest}{two}' if rest else ''}"
    return f"{whole}s"
