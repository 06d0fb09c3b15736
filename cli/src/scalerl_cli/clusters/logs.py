"""``scalerl logs``: the logs of a run's pods, each line with its pod and container."""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain

from scalerl_cli import output
from scalerl_cli.clusters.runs import Run, find, plain
from scalerl_cli.clusters.session import ClusterProblem, Session
from scalerl_cli.exits import DONE, FAILED, NOT_FOUND
from scalerl_cli.output import echo
from scalerl_operator.kube import errors
from scalerl_operator.names import selector

_Source = tuple[str, str]
"""Pod and container."""
_Entry = tuple[_Source, bytes | errors.ApiError]
"""A line of a log, or why there are no more."""


def logs(session: Session, arguments: argparse.Namespace) -> int:
    """Print the logs; 1 if no container has any."""
    run = find(session, arguments.name)
    labels = ",".join(f"{k}={v}" for k, v in selector(run.uid, arguments.role).items())
    pods = [] if run.record is not None else session.list("Pod", run.namespace, labels)
    pods.sort(key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]))
    if not pods:
        raise ClusterProblem(_no_pods(run, arguments.role), NOT_FOUND)
    sources = [
        (pod["metadata"]["name"], container["name"])
        for pod in pods
        for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
    ]
    query = {"previous": "true"} if arguments.previous else {}
    query |= {"follow": "true"} if arguments.follow else {}
    query |= {"tailLines": str(arguments.tail)} if arguments.tail is not None else {}
    logs_of = [_lines(session, run, source, query) for source in sources]
    printed = 0
    for (pod, container), line in _merged(logs_of) if arguments.follow else chain.from_iterable(logs_of):
        if isinstance(line, errors.ApiError):
            if isinstance(line, errors.Forbidden):
                raise line
            echo(f"{pod}/{container}: {plain(line.message)}", error=True)
        else:
            printed += 1
            echo(f"{pod}/{container} {shown(line)}")
    if not printed:
        echo(f"no container of {run.namespace}/{run.name} has logged anything", error=True)
        return FAILED
    return DONE


def shown(line: bytes) -> str:
    """A line of a log. On a terminal, control characters but tabs are escaped: logs have texts of any origin."""
    text = line.decode(errors="replace")
    return output.shown(text) if sys.stdout.isatty() else text


def _merged(logs_of: list[Iterator[_Entry]]) -> Iterator[_Entry]:
    """Lines of all containers as they come, until all have ended. Pods that are made later are not followed."""
    merged: queue.Queue[_Entry | None] = queue.Queue(maxsize=1000)

    def follow(lines: Iterator[_Entry]) -> None:
        try:
            for entry in lines:
                merged.put(entry)
        finally:
            merged.put(None)

    for lines in logs_of:
        threading.Thread(target=follow, args=(lines,), daemon=True).start()
    for _ in logs_of:
        while (entry := merged.get()) is not None:
            yield entry
            sys.stdout.flush()


def _lines(session: Session, run: Run, source: _Source, query: dict[str, str]) -> Iterator[_Entry]:
    pod, container = source
    follow, waits = "follow" in query, ""
    while True:
        try:
            for line in session.log(run.namespace, pod, query | {"container": container}, follow=follow):
                yield source, line
            return
        except errors.ApiError as error:
            starting = follow and isinstance(error, errors.Invalid) and _is_pending(session, run, pod)
            if not starting or error.message != waits:
                yield source, error
            if not starting:
                return
            waits = error.message
            time.sleep(1.0)


def _is_pending(session: Session, run: Run, pod: str) -> bool:
    """Whether a pod has not started yet: until then, the API server refuses to follow its logs (400)."""
    try:
        found = session.get("Pod", run.namespace, pod) or {}
    except errors.ApiError:
        return False
    return (found.get("status") or {}).get("phase") == "Pending"


def _no_pods(run: Run, role: str | None) -> str:
    """Where to look when there are no pods."""
    what = f"no pods of the role {role}" if role else "no pods"
    state = "was deleted" if run.record is not None else f"is {run.phase}"
    text = f"{run.namespace}/{run.name} {state} and has {what}; the logs of pods end with them"
    text += f". On the volume (claim {run.claim}, directory {run.name}) are metrics.jsonl, decisions.jsonl and the journal: "
    text += f"`scalerl fetch {run.name} rollouts`"
    condition = run.condition
    if condition is not None and condition.get("message"):
        text += f". The last message: {plain(condition['message'])}"
    return text
