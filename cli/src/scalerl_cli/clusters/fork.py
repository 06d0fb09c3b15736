"""``scalerl fork NAME``: prints the run file of a fork, for ``scalerl submit -``."""

from __future__ import annotations

import argparse
from typing import Any

from scalerl_api.load import SpecError, run_from_object, to_yaml
from scalerl_api.spec import API_VERSION, KIND
from scalerl_cli.clusters.runs import find
from scalerl_cli.clusters.session import ClusterProblem, Session
from scalerl_cli.clusters.submit import read_objects
from scalerl_cli.exits import BAD_INPUT, DONE
from scalerl_cli.fork import changes_of, fork_name
from scalerl_cli.inputs import replace_value
from scalerl_cli.output import echo
from scalerl_operator.kube.types import Object


def fork(session: Session, arguments: argparse.Namespace) -> int:
    """Print a run with the spec of the source, or of ``-f``, the changes, and ``spec.from``. The operator finds the checkpoint."""
    if arguments.out is not None:
        raise ClusterProblem(
            "--out is for the directory of a run on this machine; a cluster's run needs --name", BAD_INPUT
        )
    source = find(session, arguments.source)
    given: Object = {"metadata": source.obj["metadata"], "spec": source.spec}
    if arguments.file is not None:
        objects = read_objects(str(arguments.file))
        if len(objects) != 1 or not all(isinstance(objects[0].get(part), dict) for part in given):
            raise ClusterProblem(f"{arguments.file}: expected one {KIND}", BAD_INPUT)
        given = objects[0]
    given_name = str(given["metadata"].get("name"))
    metadata: dict[str, Any] = {
        "name": fork_name(given_name, source.name, arguments.name),
        "namespace": source.namespace,
    }
    if labels := given["metadata"].get("labels"):
        metadata["labels"] = dict(labels)
    spec = {**given["spec"], "from": {"run": source.name}}
    spec.pop("suspend", None)
    if arguments.step is not None:
        spec["from"]["step"] = arguments.step
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    try:
        for path, value in changes_of(arguments).items():
            replace_value(spec, path, value, "--set")
        run_from_object(manifest)
    except SpecError as error:
        raise ClusterProblem("\n".join(str(problem) for problem in error.problems), BAD_INPUT) from error
    echo(to_yaml(manifest).rstrip())
    return DONE
