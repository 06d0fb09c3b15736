"""The arguments of the commands for clusters. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scalerl_cli.argument_types import whole
from scalerl_lifecycle.workloads import Role

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

NAMES: Final = ("get", "why", "logs", "fetch", "submit")
"""The commands."""
THINGS: Final = ("curve", "model", "rollouts")
"""What ``fetch`` can fetch."""


def add_cluster_commands(commands: Commands) -> None:
    """Add :data:`NAMES`."""
    get = commands.add_parser("get", help="list the runs of a cluster", description="List runs on a cluster.")
    get.add_argument("name", nargs="?", metavar="NAME", help="only this run")
    get.add_argument("-A", "--all-namespaces", action="store_true", help="in all namespaces")
    get.add_argument("--ended", action="store_true", help="the records of runs that were deleted")
    _add_output(get)
    add_connection(get)

    why = commands.add_parser("why", help="say what a run on a cluster waits for, and what to do")
    why.add_argument("name", metavar="NAME")
    _add_output(why)
    add_connection(why)

    logs = commands.add_parser("logs", help="print the logs of a run's pods on a cluster")
    logs.add_argument("name", metavar="NAME")
    roles = [str(role) for role in Role if role is not Role.FORECASTER]
    logs.add_argument("role", nargs="?", metavar="ROLE", choices=roles, help=f"only {', '.join(roles)}")
    logs.add_argument("-f", "--follow", action="store_true", help="wait for more lines, until the pods end")
    logs.add_argument("-p", "--previous", action="store_true", help="of each container's previous start")
    logs.add_argument("--tail", type=whole, metavar="N", help="only the last N lines of each container")
    add_connection(logs)

    _add_files(commands)


def _add_files(commands: Commands) -> None:
    """``fetch`` and ``submit``."""
    fetch = commands.add_parser(
        "fetch",
        help="copy curve, model or rollouts of a run on a cluster to this machine",
        description="Copy files of a run to this machine, with checksums. An interrupted copy goes on when it is repeated. "
        "docs/clusters.md lists the rights that each needs.",
    )
    fetch.add_argument("name", metavar="NAME")
    fetch.add_argument("what", choices=THINGS)
    fetch.add_argument(
        "-o", "--to", type=Path, default=Path(), metavar="DIR", help="directory (default: this one)"
    )
    which = fetch.add_mutually_exclusive_group()
    which.add_argument(
        "--last", action="store_true", help="the model of the last evaluation (default: of the best)"
    )
    which.add_argument("--step", type=int, metavar="N", help="the exported model of step N")
    fetch.add_argument(
        "--image",
        metavar="IMAGE",
        help="image of the pod that reads the volume of a run without pods; any with sh, find, stat, dd, head, tail and sha256sum "
        "(default: that of the run)",
    )
    add_connection(fetch)

    submit = commands.add_parser(
        "submit",
        help="validate run files and apply them to a cluster",
        description="Validate FILE as `scalerl validate` does, try it on the API server (dry run), and apply it (server-side). "
        "Nothing is applied if one document is refused. Nothing is uploaded: paths in the spec are paths in the pods.",
    )
    submit.add_argument(
        "files", nargs="+", metavar="FILE", help="YAML, also with several documents; - is standard input"
    )
    submit.add_argument("--dry-run", action="store_true", help="do not apply")
    submit.add_argument(
        "--force-conflicts",
        action="store_true",
        help="take fields over from other writers, such as kubectl edit",
    )
    add_connection(submit)


def add_connection(command: argparse.ArgumentParser) -> None:
    """Add the flags by which kubectl selects a cluster."""
    group = command.add_argument_group("cluster, as in kubectl")
    group.add_argument(
        "-n", "--namespace", metavar="NAMESPACE", help="namespace (default: that of the context)"
    )
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="kubeconfig (default: KUBECONFIG, else ~/.kube/config)"
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", choices=["text", "json"], default="text", help="json: for scripts")
